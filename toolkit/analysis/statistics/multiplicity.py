"""Families of tests: corrected p-values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolkit.analysis.statistics.inference import Side
from toolkit.analysis.statistics.joint import at_least_as_good, standardized
from toolkit.errors import InputError


def holm(ps: Sequence[float] | np.ndarray) -> np.ndarray:
    """p̃_(j) = max_{k ≤ j} min(1, (m − k + 1)·p_(k)), p_(1) ≤ … ≤ p_(m), answered in the order given.

    The family's error is at most its level whatever the dependence between the tests.

    Raises:
        InputError: a p-value outside [0, 1].

    Source: Holm (1979).
    """
    p = np.asarray(ps, dtype=np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise InputError(f"p-values lie in [0, 1], in one row; found {np.asarray(ps).tolist()}")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    steps = np.minimum((len(p) - np.arange(len(p))) * p[order], 1.0)
    adjusted[order] = np.maximum.accumulate(steps) if len(p) else steps
    return adjusted


def max_t(
    values: Sequence[float] | np.ndarray, draws: Sequence[Sequence[float]] | np.ndarray, side: Side
) -> np.ndarray:
    """Westfall and Young's step-down over draws that all tests share, (m,).

    Each row is standardized over its n + 1 values (the arm's in column 0), so that the tests count alike, and
    signed so that larger is better. With T_(1) ≥ … ≥ T_(m) the arms' own,
    p̃_(j) = max_{k ≤ j} (1 + #{i : max_{l ≥ k} T_(l)i ≥ T_(k)})/(n + 1).

    It is exact: let K be the true null hypotheses, with columns 0 … n of the rows K exchangeable (column i is one
    random change of all layers, whichever row it is read in). At the first false rejection the rows left include
    K, so its p̃ is at least (1 + #{i : max_K T_i ≥ max_K T_0})/(n + 1), which is a rank p-value of exchangeable
    columns; it is ≤ α with probability at most α. Near-duplicate rows cost no power: their maximum is hardly
    larger than either.

    Args:
        values: the arms' outcomes or statistics, (m,).
        draws: (m, n); column i of every row is one random change.
        side: `less`: lower is better.

    Raises:
        InputError: shapes that do not fit, or a number that is not finite.

    Source: Westfall and Young (1993), algorithm 2.8; Romano and Wolf (2005), on step-down and monotone maxima.
    """
    value = np.asarray(values, dtype=np.float64)
    drawn = np.asarray(draws, dtype=np.float64)
    if value.ndim != 1 or drawn.ndim != 2 or len(value) != len(drawn) or not drawn.shape[1]:
        raise InputError(
            f"max-t takes one value a test and a (tests, draws) table; found shapes {value.shape} and {drawn.shape}"
        )
    if not (np.isfinite(value).all() and np.isfinite(drawn).all()):
        raise InputError("max-t: a value or a draw is not finite; only finite scores can be compared")
    if side not in ("less", "greater"):
        raise InputError(f"the side of a test is 'less' or 'greater'; found {side!r}")
    t = standardized(value, drawn) * (-1.0 if side == "less" else 1.0)
    order = np.argsort(-t[:, 0], kind="stable")
    best = np.maximum.accumulate(t[order, 1:][::-1], axis=0)[::-1]  # row k: the best of the rows k, k + 1, …
    counts = [at_least_as_good(t[row, 0], best[place], "greater") for place, row in enumerate(order)]
    adjusted = np.empty(len(value))
    adjusted[order] = np.maximum.accumulate((1 + np.array(counts)) / (drawn.shape[1] + 1)) if len(order) else []
    return adjusted
