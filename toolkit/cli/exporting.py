"""The verb that hands results to other libraries: adapters, quantized bases, merged checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.output import Output, app, check, emit


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(help="Folder of a fine-tuning run, of an adapter or of starts; or a plan file.")
    ],
    format: Annotated[str, typer.Option("--format", help="peft, bnb, compressed-tensors or merged.")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="DIR", help="Folder to write.")],
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id, a local directory, or `demo` (default: the plan's model).")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Folder of starts, where an initializer changed the adapter's base.")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="peft: an exported base, which the adapter's config names.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="bnb, compressed-tensors: merge the adapter and quantize again.")
    ] = False,
    onto: Annotated[
        str | None, typer.Option(help="Merge onto `base`, decoded as it was trained, or `dense`, the original weights.")
    ] = None,
    least: Annotated[
        float, typer.Option(help="Share of the adapter's change that must survive being quantized again.")
    ] = 0.5,
    fused: Annotated[
        str, typer.Option(help="Scales of q/k/v and gate/up: shared (as vLLM reads them), separate or requantize.")
    ] = "shared",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 of what is not packed (default: the checkpoint's).")
    ] = None,
    shard: Annotated[str, typer.Option(help="The most bytes of a file.")] = "5GB",
    verify: Annotated[bool, typer.Option(help="Load what was written with its own library, and compare.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write a run's adapter or model in a form that other libraries load; the folder appears whole or not at all.

    Example: toolkit export results/runs/sums--qlora--seed0 --format peft -o adapter

    A base for vLLM: toolkit export plan.json --format compressed-tensors --model demo -o base
    """
    from toolkit.runs.exporting import export as write

    report = write(
        run,
        format,
        output,
        model=model,
        start=start,
        base=base,
        merge=merge,
        onto=onto,  # type: ignore[arg-type]
        least=least,
        fused=fused,  # type: ignore[arg-type]
        dtype=dtype,
        shard=shard,
        verify=verify,
        force=force,
    )
    for note in report.notes:
        print(note, file=sys.stderr)
    if report.merged is not None and report.merged.share is not None:
        print(
            f"of the adapter's change, {report.merged.share:.4f} arrived (‖·‖ {report.merged.norm:.4f})",
            file=sys.stderr,
        )
    print("; ".join([f"wrote {output}", *report.checked]), file=sys.stderr)


@app.command()
def fuse(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id, a local directory, or `demo` (default: the plan's model).")
    ] = None,
    output: Output = None,
) -> None:
    """Give layers that engines compute as one product (q/k/v, gate/up) one scale, before they are calibrated.

    Example: toolkit fuse plan.json --model demo -o fused.json
    """
    from toolkit.errors import InputError
    from toolkit.records.plan import Plan
    from toolkit.runs.exporting import fuse as share

    check(output)
    read = Plan.load(plan)
    source = model or read.model
    if source is None:
        raise InputError(f"{plan} does not say which model it is of: name it (--model)")
    made = share(read, source)
    given = sum(made.layers[name].quantizer != read.layers.get(name, read.default).quantizer for name in made.layers)
    if given:
        print(f"{given} layers share the scale of their fused group", file=sys.stderr)
    else:
        print(
            "no layer was given a shared scale: a group is shared where all of it is planned with one quantizer, "
            "whose scale is of the whole tensor and not given yet",
            file=sys.stderr,
        )
    emit(made, output)
