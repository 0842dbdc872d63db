"""How alike selections and rankings are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from toolkit.errors import InputError
from toolkit.records.selection import Selection


def jaccard(selections: Sequence[Selection]) -> np.ndarray:
    """J(A, B) = |A ∩ B|/|A ∪ B| of every two selections; two empty ones are alike (1).

    Returns:
        (n, n) float64, symmetric, ones on the diagonal.

    Raises:
        InputError: selections of different models or weights.
    """
    for other in selections[1:]:
        if other.fingerprint != selections[0].fingerprint:
            raise InputError(
                f"selections of {selections[0].model} and {other.model} cannot be compared: their fingerprints differ"
            )
    place = {name: at for at, name in enumerate(dict.fromkeys(n for s in selections for n in s.layers))}
    member = np.zeros((len(selections), len(place)))
    for row, selection in zip(member, selections, strict=True):
        row[[place[name] for name in selection.layers]] = 1
    shared = member @ member.T
    sizes = member.sum(axis=1)
    union = sizes[:, None] + sizes[None, :] - shared
    return np.divide(shared, union, out=np.ones_like(shared), where=union > 0)


def spearman(scores: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Spearman's ρ of every two scores: the Pearson correlation of their ranks, ties by average rank.

    Args:
        scores: name → one number a layer, all of one length.

    Returns:
        (n, n) float64 in the mapping's order; NaN where a score is constant, and so has no ranking.

    Raises:
        InputError: scores of different lengths, fewer than two numbers, or NaN.
    """
    names = list(scores)
    rows = []
    for name in names:
        values = np.asarray(scores[name], dtype=np.float64)
        first = np.shape(scores[names[0]])
        if values.ndim != 1 or values.shape != first or values.size < 2:
            raise InputError(f"scores {name!r} have shape {values.shape}; {names[0]!r} has {first}, and two are needed")
        if np.isnan(values).any():
            raise InputError(f"scores {name!r} hold NaN, which has no rank")
        rows.append(average_ranks(values))
    ranks = np.array(rows).reshape(len(rows), -1)
    centred = ranks - ranks.mean(axis=1, keepdims=True) if rows else ranks
    covariance = centred @ centred.T
    spread = np.sqrt(np.diag(covariance))
    scale = np.outer(spread, spread)
    found = np.full_like(covariance, np.nan)
    np.divide(covariance, scale, out=found, where=scale > 0)
    return np.clip(found, -1.0, 1.0)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values sharing the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((2 * last - counts + 1) / 2)[inverse]
