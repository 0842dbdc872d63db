"""The tuned lever: every arm's trials, the value that they choose, and results at the shared and the own value."""

from __future__ import annotations

import math
from typing import Any

from toolkit.analysis.printing.trained.arms import finite, spread
from toolkit.analysis.reading.trained import TrainedResults
from toolkit.analysis.reading.trained_file import ALL, TrainedRun


def tuned(results: TrainedResults) -> dict[str, Any] | None:
    """The trials and what they chose; null where the study tunes nothing."""
    tune = results.study.tune
    if tune is None:
        return None
    entries = []
    for task in results.study.tasks:
        for arm in results.study.arms:
            trials, shared, own = (
                results.trials(task, arm.name),
                results.of(task, arm.name),
                results.of(task, arm.name, own=True),
            )
            if not (trials or own):
                continue
            value = results.chosen(task, arm.name)
            tried = [run.value for run in trials]
            entries.append(
                {
                    "task": task,
                    "arm": arm.name,
                    "trials": [
                        {"value": run.value, "loss": finite(run.scores[ALL].loss), "score": run.scores[ALL].score}
                        for run in trials
                    ],
                    "failed": [value for value in tune.values if value not in tried],
                    "chosen": value,
                    "edge": value is not None and value in (min(tune.values), max(tune.values)),
                    "shared_value": getattr(results.study.levers_of(task, arm.name), tune.lever),
                    "shared": _outcomes(shared),
                    "own": _outcomes(own),
                    "own_is_shared": results.shares(task, arm.name),
                }
            )
    return {"lever": tune.lever, "values": list(tune.values), "rows": tune.rows, "arms": entries}


def _outcomes(runs: list[TrainedRun]) -> dict[str, Any] | None:
    if not runs:
        return None
    scores = [run.scores[ALL] for run in runs]
    return {
        "runs": len(runs),
        "loss": spread([s.loss for s in scores]) if all(math.isfinite(s.loss) for s in scores) else None,
        "score": None if any(s.score is None for s in scores) else spread([s.score or 0.0 for s in scores]),
    }
