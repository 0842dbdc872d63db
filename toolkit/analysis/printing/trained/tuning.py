"""The tuned lever: every arm's trials, the value that they choose, and results at the shared and the own value."""

from __future__ import annotations

import math
from typing import Any

from toolkit.analysis.printing.trained.arms import finite, spread
from toolkit.analysis.reading.trained import TrainedResults
from toolkit.analysis.reading.trained_file import ALL, TrainedRun


def chosen(results: TrainedResults, task: str, arm: str) -> float | None:
    """The value whose trial is best: lowest loss, or highest score where that is the declared outcome.

    Of equal scores the one of lower loss, then the smaller value. None where the arm has neither an own run nor a
    finished trial.
    """
    own = results.of(task, arm, own=True)
    if own:
        return own[0].value
    trials = results.trials(task, arm)
    if not trials or results.study.tune is None:
        return None
    return min(trials, key=lambda run: (*_cost(results, run), run.value or 0.0)).value


def _cost(results: TrainedResults, run: TrainedRun) -> tuple[float, float]:
    scores = run.scores[ALL]
    loss = scores.loss if math.isfinite(scores.loss) else 0.0
    if results.study.analysis.outcome == "score" and scores.score is not None:
        return -scores.score, loss
    return loss, loss


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
            value = chosen(results, task, arm.name)
            common = getattr(results.study.levers_of(task, arm.name), tune.lever)
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
                    "shared_value": common,
                    "shared": _outcomes(shared),
                    "own": _outcomes(own or (shared if value == common else [])),
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
