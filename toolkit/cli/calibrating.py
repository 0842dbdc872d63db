"""The verb that lets data speak: a profile calibrated for selectors that ask for it, or a plan's starts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.output import app, check, emit
from toolkit.errors import InputError, closest


@app.command()
def calibrate(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN|SELECTOR...",
            help="A plan file; or keys of selectors that ask for data, such as gradient-sensitivity.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id, a local directory, or `demo` (a plan: by default its own).")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="A plan: wikitext2, python-topics, or a file (.txt, .jsonl, or .gz of them).")
    ] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="A plan: windows of the text (default 128).")] = None,
    window: Annotated[int | None, typer.Option(min=2, help="A plan: tokens a window (default 512).")] = None,
    seed: Annotated[int | None, typer.Option(help="A plan: seed of the adapters (default 0).")] = None,
    fallbacks: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="A plan: share of layers that may be started otherwise (default 0.1)."),
    ] = None,
    profile: Annotated[Path | None, typer.Option("--profile", help="Selectors: profile file of that model.")] = None,
    task: Annotated[str | None, typer.Option(help="Selectors: task key, whose training rows are read.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Selectors: folder or file of the rows (default: the task's code, or the Hub).")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Selectors: so many training rows (default 32).")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows or windows a batch (default 8); 1 row: gradients of single rows.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Selectors: the most tokens of a row (default 600).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 (selectors: float32; a plan: the device's own).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A plan: folder to write. Selectors: file; else stdout.")
    ] = None,
) -> None:
    """Measure on data what selectors rank by or initializers fit to; the first argument that is a file is a plan.

    Example: toolkit calibrate plan.json --text python-topics --model demo -o starts

    Example: toolkit calibrate gradient-sensitivity --model demo --profile profile.json --task arithmetic -o
    calibrated.json; then: toolkit select gradient-sensitivity --profile calibrated.json --budget layers=0.2
    """
    common = {"batch": batch, "device": device, "dtype": dtype}
    of_plans = {"text": text, "windows": windows, "window": window, "seed": seed, "fallbacks": fallbacks}
    of_selectors = {"profile": profile, "task": task, "data": data, "rows": rows, "length": length}
    if Path(what[0]).is_file():
        if len(what) > 1:
            raise InputError(f"one plan at a time; {what[0]} and {', '.join(what[1:])} are given")
        _refuse(of_selectors, "a plan")
        _plan(Path(what[0]), model, output, _given(common | of_plans))
    else:
        if what[0].endswith(".json"):
            beside = [p.name for p in Path(what[0]).parent.glob("*.json")]
            near = closest(Path(what[0]).name, beside) if beside else ""
            raise InputError(f"there is no plan {what[0]}" + (f"; {near}" if near.startswith("did you mean") else ""))
        _no_initializers(what)
        _refuse(of_plans, "selectors")
        _selectors(what, model, output, _given(common | of_selectors))


def _given(options: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in options.items() if value is not None}


def _refuse(options: dict[str, object], what: str) -> None:
    """Options of the other form of the verb are no part of this one."""
    for key in _given(options):
        raise InputError(f"--{key} plays no part where {what} {'is' if what == 'a plan' else 'are'} calibrated")


def _no_initializers(keys: list[str]) -> None:
    """An initializer is calibrated as part of a plan."""
    from toolkit.registry import registry
    from toolkit.spec import parse

    known = registry.of_kind("initializer")
    for key in keys:
        if parse(key)[0] in known:
            raise InputError(
                f"{key} is an initializer, and is calibrated as part of a plan: toolkit plan --base QUANTIZER --rank R "
                f"--initializer {shlex.quote(key)} -o plan.json; then: toolkit calibrate plan.json --text FILE -o DIR"
            )


def _needed(option: str, value: object, why: str) -> None:
    if value is None:
        raise InputError(f"{option} is needed: {why}")


def _plan(path: Path, model: str | None, output: Path | None, options: dict) -> None:
    from toolkit.cli.starting import summary
    from toolkit.records.plan import Plan
    from toolkit.runs.starting.calibrating import calibrate as write

    plan = Plan.load(path)
    _needed("--model", model or plan.model, "the plan names none")
    _needed("--text", options.get("text"), "what the plan's initializers are calibrated on")
    _needed("-o", output, "the folder of the starts")
    assert output is not None
    file = write(plan, options.pop("text"), output, model=model, **options)
    asked = options.get("windows")
    if file.calibration is not None and asked is not None and file.calibration.windows < asked:
        print(f"only {file.calibration.windows} windows were found of the {asked} asked for", file=sys.stderr)
    for line in summary(file):
        print(line, file=sys.stderr)
    print(f"wrote {output}", file=sys.stderr)


def _selectors(selectors: list[str], model: str | None, output: Path | None, options: dict) -> None:
    from toolkit.records.profile import Profile
    from toolkit.registry import registry
    from toolkit.runs.calibration import ROWS, asking, calibrated, expect_asking, training_rows
    from toolkit.runs.models import load_tokenizer

    _needed("--model", model, "the profile's model")
    _needed("--profile", options.get("profile"), "the file whose rows are calibrated")
    _needed("--task", options.get("task"), "its training rows are what selectors are calibrated on")
    assert model is not None
    check(output)
    expect_asking(selectors, asking(selectors))
    key = registry.make("task", options.pop("task")).key
    measured = Profile.load(options.pop("profile"))
    rows = options.pop("rows", ROWS)
    length = {"length": options.pop("length")} if "length" in options else {}
    found = training_rows(key, load_tokenizer(model), source=options.pop("data", None), rows=rows, **length)
    if found.cut:
        print(f"{found.cut} rows whose target does not fit into the length were passed over", file=sys.stderr)
    if len(found.encoded) < rows:
        print(f"only {len(found.encoded)} rows were found of the {rows} asked for", file=sys.stderr)
    made = calibrated(
        measured,
        selectors,
        model=model,
        encoded=found.encoded,
        task=key,
        source=found.source,
        progress=None,
        **options,
    )
    for statistic in (made.statistics or {}).values():
        if statistic.unreached:
            print(
                f"no gradient reached {len(statistic.unreached)} layers, such as {statistic.unreached[0]}",
                file=sys.stderr,
            )
    emit(made, output)
