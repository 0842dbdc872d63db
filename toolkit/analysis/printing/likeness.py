"""How alike the selections of a study are: shared layers, and rank correlation of the scores behind them."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.reading.reports import Results, profile_of
from toolkit.errors import InputError
from toolkit.interfaces import RankingSelector
from toolkit.records.profile import PROFILE
from toolkit.registry import registry
from toolkit.selection.similarity import jaccard, spearman

MOST = 50
"""A matrix of more arms than this is read by nobody, and is left out."""


def likeness(results: Results) -> dict[str, Any]:
    """Jaccard index |A∩B|/|A∪B| of the arms' selections, and Spearman's ρ of the scores that ranked them.

    Returns:
        `selections`: budget → `arms` and the `jaccard` matrix; `scores`: `selectors` and the `spearman` matrix
        (null where a score is constant), recomputed from the profile beside the runs, or a `reason` why not.
    """
    selections: dict[str, Any] = {}
    for budget in results.budgets:
        arms = [a.label for a in results.study.arms if (budget, a.label) in results.arms]
        sets = [results.arms[budget, a].selection for a in arms]
        if 1 < len(arms) <= MOST:
            matrix = jaccard([s for s in sets if s is not None])
            selections[budget] = {"arms": arms, "jaccard": _plain(matrix)}
    return {"selections": selections, "scores": _scores(results)}


def _scores(results: Results) -> dict[str, Any]:
    if not (results.folder / PROFILE).exists():
        return {"reason": f"there is no {PROFILE} beside the runs"}
    profile = profile_of(results)
    keys = list(dict.fromkeys(arm.selector for arm in results.study.arms))
    if len(keys) > MOST:
        return {"reason": f"there are {len(keys)} selectors, and at most {MOST} are compared"}
    names, columns, left_out = [], [], []
    for key in keys:
        try:
            selector = registry.make("selector", key)
        except InputError:  # a plug-in that is not installed here; the losses do not need it
            left_out.append(key)
            continue
        if isinstance(selector, RankingSelector):
            names.append(key)
            columns.append([float(v) for v in selector.score(profile)])
    found: dict[str, Any] = (
        {"selectors": names, "spearman": _plain(spearman(dict(zip(names, columns, strict=True))))} if names else {}
    )
    if left_out:
        found["reason"] = f"not installed here: {', '.join(left_out)}"
    return found


def _plain(matrix: Any) -> list[list[float | None]]:
    """A matrix as JSON data; NaN, which JSON does not have, as null."""
    return [[float(v) if v == v else None for v in row] for row in matrix]
