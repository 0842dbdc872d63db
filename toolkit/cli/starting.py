"""The verb that starts a plan's layers from their weights, and what is said of starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.output import app

if TYPE_CHECKING:
    from toolkit.records.start import StartFile


@app.command()
def initialize(
    plan: Annotated[Path, typer.Argument(help="Plan file; its layers name their initializers.")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="DIR", help="Folder to write; gone on with.")],
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id, a local directory, or `demo` (default: the plan's model).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the adapters.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="Compute dtype: float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
) -> None:
    """Compute what each layer's quantized base and adapter start from; build, train and export read the folder.

    Example: toolkit plan --base nf4 --rank 8 --initializer loftq -o plan.json; then: toolkit initialize
    plan.json --model demo -o starts
    """
    from toolkit.errors import InputError
    from toolkit.records.plan import Plan
    from toolkit.runs.starting.computing import initialize as write

    read = Plan.load(plan)
    if model is None and read.model is None:
        raise InputError(f"{plan} does not say which model it is of: name it (--model)")
    file = write(read, model, output, seed=seed, dtype=dtype, device=device)
    for line in summary(file):
        print(line, file=sys.stderr)
    print(f"wrote {output}", file=sys.stderr)


def summary(file: StartFile) -> list[str]:
    """What was done, in a few lines: layers, mean residuals before and after, what was not as asked for, seconds."""
    from toolkit.runs import starts

    records = file.layers.values()
    before = sum(each.residuals[0] for each in records) / len(records)
    after = sum(each.residuals[each.kept] for each in records) / len(records)
    lines = [
        f"{len(records)} layers in {file.seconds:.1f} s; mean residual of the weights {before:.5f} at iterate 0, "
        f"{after:.5f} as they start"
    ]
    if file.calibration is not None:
        text = file.calibration
        rounded = "" if text.activations == "none" else f", inputs rounded by {text.activations}"
        lines.append(f"calibrated on {text.windows} windows of {text.window} tokens of {text.source}{rounded}")
        errors = [
            (each.notes["output_error_rounding"], each.notes["output_error"])
            for each in records
            if {"output_error", "output_error_rounding"} <= set(each.notes)
        ]
        if errors:
            rounding, reached = (sum(float(e) for e in column) / len(errors) for column in zip(*errors, strict=True))
            lines.append(f"mean output error on that text {rounding:.5f} by rounding, {reached:.5f} as they start")
    for reason, names in starts.fallbacks(file.layers).items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(
            f"not as asked for in {len(names)} of {len(records)} layers: {reason}: {', '.join(names[:3])}{more}"
        )
    return lines
