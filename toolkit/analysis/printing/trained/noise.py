"""The A/A arm: how much of the spread over seeds is run-to-run noise, on each task and outcome."""

from __future__ import annotations

import math
from typing import Any

from toolkit.analysis.reading.outcomes import Reader
from toolkit.analysis.reading.trained import TrainedResults, first_seeds
from toolkit.analysis.reading.trained_file import ALL, TrainedRun


def noise(results: TrainedResults, reader: Reader) -> list[dict[str, Any]]:
    """One entry a task and outcome: spread of the repeats, of the other seeds, and their components.

    The repeated seeds' own run counts among the repeats, and so not among the seeds. `identical` says whether the
    repeats agree on every row's loss and score.
    """
    from toolkit.analysis.statistics.repeats import components

    if results.study.repeats is None:
        return []
    arm, first = results.study.repeats.arm, first_seeds(results.study)
    found = []
    for task in results.tasks:
        same = results.repeats(task)
        if len(same) < 2:
            continue
        other = [run for run in results.of(task, arm) if run.seeds != first]
        for outcome in ("loss", "score"):
            repeats, seeds = _values(same, outcome), _values(other, outcome)
            if repeats is None or seeds is None:
                continue
            parts = components(repeats, seeds, what=f"{arm} on {task}")
            found.append(
                {
                    "task": task,
                    "arm": arm,
                    "outcome": outcome,
                    "repeats": parts.repeats,
                    "seeds": parts.seeds,
                    "values": repeats,
                    "repeat_sd": math.sqrt(parts.noise),
                    "repeat_low": None if parts.noise_low is None else math.sqrt(parts.noise_low),
                    "repeat_high": None if parts.noise_high is None else math.sqrt(parts.noise_high),
                    "total_sd": None if parts.total is None else math.sqrt(parts.total),
                    "seed_sd": None if parts.seed is None else math.sqrt(parts.seed),
                    "share": parts.share,
                    "f": None if parts.ratio is None else parts.ratio.f,
                    "p": None if parts.ratio is None else parts.ratio.p,
                    "identical": _identical(same, reader, outcome),
                    "deterministic": all(run.levers.deterministic for run in same),
                    "sentence": f"A/A, {arm} on {task} ({outcome}): {parts.sentence}.",
                    "notes": list(parts.notes),
                }
            )
    return found


def _values(runs: list[TrainedRun], outcome: str) -> list[float] | None:
    """The runs' outcomes; None where one has none."""
    values = [getattr(run.scores[ALL], outcome) for run in runs]
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    return [float(value) for value in values]


def _identical(runs: list[TrainedRun], reader: Reader, outcome: str) -> bool:
    table = getattr(reader.scored(runs), outcome)
    return table is not None and bool((table == table[0]).all())
