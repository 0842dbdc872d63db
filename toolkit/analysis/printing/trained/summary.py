"""A fine-tuning study's results as plain data: every number of its table, and nothing about how it is printed."""

from __future__ import annotations

import os
from typing import Any

from toolkit.analysis.certificates import locks
from toolkit.analysis.printing.trained import KIND, arms, contrasts, noise, sentences, timing, tuning
from toolkit.analysis.reading.outcomes import Reader
from toolkit.analysis.reading.sessions import read_sessions
from toolkit.analysis.reading.trained import TrainedResults, read
from toolkit.analysis.reading.trained_file import ALL, TrainedRun
from toolkit.errors import InputError
from toolkit.records.session import Session

SCHEMA = 1


def summary(study: str | os.PathLike[str] | TrainedResults) -> dict[str, Any]:
    """Everything that a fine-tuning study's table states, as plain JSON data.

    Returns:
        `status` (confirmatory, or exploratory and why), `arms` (one entry a task, set and arm), `averages` (with and
        without flagged sets), `contrasts`, `noise` (the A/A arm), `tune`, `timing`, `runs` (one entry a run),
        `unfinished`, `missing`, `sentences`, `notes`, and what was run. Losses are in nats a target token, scores and
        shares are fractions, memory is in bytes.

    Raises:
        InputError: sessions of other weights or another form than the runs; and as
            `toolkit.analysis.reading.trained.read`, `toolkit.analysis.reading.outcomes.Reader` and
            `toolkit.analysis.reading.sessions.read_sessions`.
    """
    results = study if isinstance(study, TrainedResults) else read(study)
    sessions = read_sessions(results.folder, results.study.name)
    _belong(results, sessions)
    reader = Reader()
    for run in [
        *results.runs.values(),
        *results.untrained.values(),
    ]:  # every report is held to its rows, and the arms of a task to the same rows
        if run.finished:
            reader.outcomes(run)
    declared, one = results.study, results.any
    entries = arms.entries(results)
    flagged = {e["task"] for e in entries if e["group"] == ALL and arms.doubtful(e)}
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        "study": declared.name,
        "question": declared.question,
        "form": declared.form,
        "model": _model(results, sessions)[0],
        "fingerprint": _model(results, sessions)[1],
        "reference": None if one is None else one.note,
        "device": sorted({run.device for run in results.runs.values()}),
        "compute_dtype": sorted({run.dtype for run in results.runs.values()}),
        "levers": declared.levers.model_dump(mode="json"),
        "factors": list(declared.factors),
        "analysis": declared.analysis.model_dump(mode="json"),
        "seeds": [str(seeds) for seeds in declared.runs_of_an_arm],
        "tasks": [_task(results, task) for task in results.tasks],
        "reports": len(results.runs),
        "arms": entries,
        "averages": arms.averages(results, entries),
        "contrasts": contrasts.contrasts(results, reader, flagged),
        "noise": noise.noise(results, reader),
        "tune": tuning.tuned(results),
        "timing": timing.timing(sessions, declared) if sessions else None,
        "runs": [_run(run) for run in results.runs.values()],
        "unfinished": arms.unfinished(results),
        "missing": [str(key) for key in results.missing],
    }
    data["status"] = _status(results)
    data["sentences"] = sentences.sentences(data)
    data["notes"] = sentences.notes(results, data)
    return data


def _belong(results: TrainedResults, sessions: list[Session]) -> None:
    """Refuse sessions of other weights or of another form than the runs and the study."""
    one = results.any
    for session in sessions[:1]:  # they agree among themselves
        if one is not None and session.fingerprint != one.fingerprint:
            raise InputError(
                f"{results.folder}: the timing sessions are of {session.model} (weights {session.fingerprint[:12]}) "
                f"and the runs of {one.model} ({one.fingerprint[:12]}); move one of them to a folder of its own (--out)"
            )
        if session.form != results.study.form:
            raise InputError(
                f"{results.folder}: the timing sessions are of the {session.form} form, and the study beside them is "
                f"the {results.study.form} one; move one of them to a folder of its own (--out)"
            )


def _model(results: TrainedResults, sessions: list[Session]) -> tuple[str, str]:
    if results.any is not None:
        return results.any.model, results.any.fingerprint
    return sessions[0].model, sessions[0].fingerprint


def _status(results: TrainedResults) -> dict[str, Any]:
    """Whether the trained results are confirmatory; timing sessions alone claim nothing that is locked."""
    if results.any is None:
        reasons = ["there are timing sessions alone, and no run"]
        return {"confirmatory": False, "reasons": reasons, "lock": None}
    lost = [str(key) for key in results.missing] + [f"{run.name} (not finished)" for run in results.unfinished]
    found = locks.judged(results.folder, results.study, results.any.fingerprint, results.texts, results.marks, lost)
    return {"confirmatory": found.confirmatory, "reasons": list(found.reasons), "lock": found.hash}


def _task(results: TrainedResults, task: str) -> dict[str, Any]:
    """What was trained on and scored, which all runs of a task share."""
    run = next(run for key, run in results.runs.items() if key.task == task and run.finished and key.role != "tune")
    zero = results.untrained.get(task)
    return {
        "task": task,
        "key": results.study.tasks[task].task,
        "metric": run.scores[ALL].metric,
        "chance": run.scores[ALL].chance,
        "train": run.train.model_dump(mode="json"),
        "test": run.test.model_dump(mode="json"),
        "untrained": None
        if zero is None
        else {"arm": zero.arm, "loss": arms.finite(zero.scores[ALL].loss), "score": zero.scores[ALL].score},
    }


def _run(run: TrainedRun) -> dict[str, Any]:
    scores = run.scores.get(ALL)
    return {
        "run": run.name,
        "role": run.role,
        "task": run.task,
        "arm": run.arm,
        "seeds": run.seeds.model_dump(mode="json"),
        "draw": run.draw,
        "value": run.value,
        "own": run.own,
        "finished": run.finished,
        "loss": None if scores is None else arms.finite(scores.loss),
        "score": None if scores is None else scores.score,
        "learning_rate": run.levers.learning_rate,
        "trainable": run.course.trainable,
        "first_loss": run.course.first_loss,
        "last_loss": run.course.last_loss,
        "seconds": run.course.seconds,
        "padding": run.course.padding,
        "memory": run.memory,
    }
