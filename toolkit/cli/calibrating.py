"""The verb that lets data speak: a profile calibrated for selectors that ask for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.output import Output, app, check, emit


@app.command()
def calibrate(
    selectors: Annotated[
        list[str],
        typer.Argument(help="Selector keys that ask for data, such as gradient-sensitivity; several at once."),
    ],
    model: Annotated[str, typer.Option(help="A Hugging Face id, a local directory, or `demo`.")],
    profile: Annotated[Path, typer.Option("--profile", help="Profile file of that model.")],
    task: Annotated[str, typer.Option(help="Task key, whose training rows are read.")],
    data: Annotated[
        str | None, typer.Option(help="Folder or file of the task's rows (default: its code, or the Hub).")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="So many training rows.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Rows a batch; 1: the gradients of single rows.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="The most tokens of a row.")] = 600,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")] = None,
    output: Output = None,
) -> None:
    """Measure on a few training rows what a data-driven selector ranks by; the numbers join the profile.

    Example: toolkit calibrate gradient-sensitivity --model demo --profile profile.json --task arithmetic -o
    calibrated.json; then: toolkit select gradient-sensitivity --profile calibrated.json --budget layers=0.2
    """
    from toolkit.records.profile import Profile
    from toolkit.registry import registry
    from toolkit.runs.calibration import asking, calibrated, expect_asking, training_rows
    from toolkit.runs.models import load_tokenizer

    check(output)
    expect_asking(selectors, asking(selectors))
    key = registry.make("task", task).key
    measured = Profile.load(profile)
    found = training_rows(key, load_tokenizer(model), source=data, rows=rows, length=length)
    if found.cut:
        print(f"{found.cut} rows whose target does not fit into {length} tokens were passed over", file=sys.stderr)
    if len(found.encoded) < rows:
        print(f"only {len(found.encoded)} rows were found of the {rows} asked for", file=sys.stderr)
    made = calibrated(
        measured,
        selectors,
        model=model,
        encoded=found.encoded,
        device=device,
        dtype=dtype,
        batch=batch,
        task=key,
        source=found.source,
        progress=None,
    )
    for statistic in (made.statistics or {}).values():
        if statistic.unreached:
            print(
                f"no gradient reached {len(statistic.unreached)} layers, such as {statistic.unreached[0]}",
                file=sys.stderr,
            )
    emit(made, output)
