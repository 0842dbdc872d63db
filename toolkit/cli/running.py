"""Verbs of a study: run it, and lock its analysis before."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.output import Out, Study, app
from toolkit.errors import InputError

Model = Annotated[str | None, typer.Option(help="Model instead of the study's: an id, a local directory, or `demo`.")]
Small = Annotated[bool, typer.Option("--small", help="The study's small form.")]
Text = Annotated[
    list[str] | None,
    typer.Option(
        help="Ablations, starts: text instead of the study's: [NAME=]python-topics, wikitext2 or a file; repeatable."
    ),
]
Calibration = Annotated[
    str | None, typer.Option(help="Studies of starts: text to calibrate on instead of the study's: a name or a file.")
]
TaskData = Annotated[
    list[str] | None,
    typer.Option(
        help="Fine-tuning: NAME=PATH, a task's rows instead of the study's; NAME:train=PATH for those trained on; "
        "repeatable."
    ),
]


@app.command()
def run(
    study: Study,
    model: Model = None,
    text: Text = None,
    calibration: Calibration = None,
    task_data: TaskData = None,
    out: Out = None,
    small: Small = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1 (default: CUDA where there is one).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 (default: bfloat16 where the device has it).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Fine-tuning: runs side by side on each device, as its memory allows.")
    ] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="Fine-tuning: a tracker, by Trainer's name (tensorboard …); repeatable.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="Fine-tuning: local hours in which it runs, such as 22:00-07:00.")
    ] = None,
    pause_above: Annotated[
        float | None, typer.Option(help="Fine-tuning: wait while the device is hotter than so many °C.")
    ] = None,
    resume_below: Annotated[
        float | None, typer.Option(help="Fine-tuning: until it is cooler than this (default: 10 °C less).")
    ] = None,
    stop_file: Annotated[
        Path | None,
        typer.Option(help="Fine-tuning: wait while this file exists; with the word `stop` in it, save and end."),
    ] = None,
) -> None:
    """Run a study; runs already on disk are skipped, an interrupted one goes on where it stopped.

    Example: toolkit run studies/ranking-control --small --out demo

    Fine-tuning: toolkit run studies/demo-train --workers 2 --out demo-train

    Starts: toolkit run studies/loftq-scaling --small --out starts
    """
    from toolkit.runs.studies import run as start

    paced = {"window": window, "pause_above": pause_above, "resume_below": resume_below, "stop_file": stop_file}
    paced = {name: value for name, value in paced.items() if value is not None}
    pacing = None
    if paced:
        _for_training(study, paced)
        from toolkit.runs.training import Pacing

        pacing = Pacing(**paced)  # type: ignore[arg-type]
    results = start(
        study,
        model=model,
        texts=text,
        calibration=calibration,
        data=task_data,
        out=out,
        small=small,
        device=device,
        dtype=dtype,
        workers=workers,
        report_to=report_to,
        pacing=pacing,
    )
    if os.environ.get("RANK", "0") == "0":  # of several processes that train one model, the first speaks
        print(f"results in {results}", file=sys.stderr)


def _for_training(study: Path, given: dict[str, object]) -> None:
    """Refuse, by its own name, an option of pacing for a study that trains nothing."""
    from toolkit.records.declared import KINDS, kind_of

    if (kind := kind_of(study)) != KINDS[1]:
        name = f"--{next(iter(given)).replace('_', '-')}"
        raise InputError(f"{name} is not for a study of kind {kind!r}, which trains nothing: leave it out")


@app.command()
def lock(
    study: Study,
    out: Out = None,
    small: Small = False,
    model: Model = None,
    text: Text = None,
    calibration: Calibration = None,
    task_data: TaskData = None,
) -> None:
    """Seal a study's analysis before its first run; prints the hash that every report will carry.

    The options are those that `run` will be given. Example: toolkit lock studies/ranking-control --small --out demo
    """
    from toolkit.records.lock import Lock
    from toolkit.runs.studies import lock as seal

    path = seal(study, out=out, small=small, model=model, texts=text, calibration=calibration, data=task_data)
    print(Lock.load(path).hash)
    print(f"locked in {path}", file=sys.stderr)
