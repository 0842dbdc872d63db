"""The verb that times: sessions of a study's arms, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.output import Out, Study, app
from toolkit.errors import RunError


@app.command("time")
def time_(
    study: Study,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm, beside the baseline; may be repeated (default: all).")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="So many, one after the other, each a new process.")] = 1,
    model: Annotated[str | None, typer.Option(help="Model instead of the study's: an id or a local directory.")] = None,
    task_data: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: a task's rows instead of the study's; may be repeated.")
    ] = None,
    out: Out = None,
    small: Annotated[bool, typer.Option("--small", help="The study's small form.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 (default: bfloat16 where the device has it).")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the rounds' orders (default: a new one).")] = None,
    beside_others: Annotated[
        bool, typer.Option("--beside-others", help="Time on a CPU that others keep busy; the session is labelled.")
    ] = False,
) -> None:
    """Time a study's arms in one session: interleaved, in random order, whole cycles of one list of batches.

    One session says little about another day: make two or three, or four for an interval, on several allocations.
    Example: toolkit time studies/demo-train --sessions 3 --out demo-train
    """
    if sessions > 1:
        from toolkit.runs.results import folder_of

        folder_of(out, study, small=small)  # refused here rather than by the first session
        given = {"model": model, "out": out, "device": device, "dtype": dtype, "seed": seed}
        options = [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]
        options += [word for name in arm or [] for word in ("--arm", name)]
        options += [word for item in task_data or [] for word in ("--task-data", item)]
        options += ["--small"] * small + ["--beside-others"] * beside_others
        _one_after_the_other(sessions, [str(study), *options])
        return
    from toolkit.runs.timing import time

    path = time(
        study,
        model=model,
        data=task_data,
        out=out,
        small=small,
        device=device,
        dtype=dtype,
        arms=arm,
        seed=seed,
        beside_others=beside_others,
    )
    _tell(path)
    print(f"session in {path}", file=sys.stderr)


def _tell(path: Path) -> None:
    """What the session alone says, on stderr; `toolkit table` has the numbers, and all sessions together."""
    from toolkit.analysis.printing.trained.timing import timing
    from toolkit.analysis.printing.trained.timing_sentences import sentences
    from toolkit.records.finetuning import FineTuning
    from toolkit.records.session import Session
    from toolkit.records.study import STUDY_COPY

    found = timing([Session.load(path)], FineTuning.load(path.parent.parent / STUDY_COPY))
    (session,) = found["sessions"]
    notes = [*session["labels"], *(f"throttled: {reason}" for reason in session["throttled"])]
    notes += [f"other load: {load}" for load in session["load"][:3]]
    for line in [*sentences(found), f"{session['sentence']}.", *(f"note: {note}" for note in notes)]:
        print(line, file=sys.stderr)


def _one_after_the_other(count: int, arguments: list[str]) -> None:
    """The same command again, each time in a new process.

    Raises:
        RunError: a session failed; the ones before it are kept.
    """
    for number in range(1, count + 1):
        print(f"session {number} of {count}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", "toolkit", "time", *arguments], check=False)
        if done.returncode:
            raise RunError(f"session {number} of {count} ended with exit code {done.returncode}; what it says is above")
