"""Each arm's own value of the tuned lever, chosen by its trials on rows that no table scores."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.records.finetuning import FineTuning
from toolkit.records.trained import Trained

Key = tuple[str, str]
"""Task and arm."""


def choose(study: FineTuning, trials: Iterable[Trained]) -> tuple[dict[Key, float], dict[Key, str]]:
    """(task, arm) → the value of its best trial, and what is doubtful of it.

    Best by the study's outcome (`Contrasts.best`). Trials that ended early are left out; an arm none of whose trials
    ended well has no own value.
    """
    assert study.tune is not None
    found: dict[Key, dict[float, tuple[float, float | None]]] = {}
    ended: dict[Key, int] = {}
    for trial in trials:
        key = (trial.task, trial.arm)
        if not trial.finished or "" not in trial.scores:
            ended[key] = ended.get(key, 0) + 1
            continue
        assert trial.value is not None
        found.setdefault(key, {})[trial.value] = (trial.scores[""].loss, trial.scores[""].score)
    chosen = {key: study.analysis.best(trials) for key, trials in found.items()}
    low, high = min(study.tune.values), max(study.tune.values)
    labels = {}
    for key, value in chosen.items():
        said = []
        if value in (low, high):
            edge = "lower" if value == low else "upper"
            said.append(f"own {study.tune.lever} {value:g} at the {edge} edge of the grid")
        if key in ended:
            said.append(f"{ended[key]} of {len(study.tune.values)} trials ended early")
        if said:
            labels[key] = "; ".join(said)
    return chosen, labels
