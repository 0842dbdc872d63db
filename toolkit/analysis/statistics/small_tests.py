"""Tests for few runs: permutation, sign, variance ratio; and the smallest p that so few runs can give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from toolkit.analysis.statistics.distributions import f_quantile, f_two_sided
from toolkit.analysis.statistics.inference import binomial_p
from toolkit.analysis.statistics.runs import outcomes
from toolkit.errors import InputError

SPLITS = 50_000
"""Splits up to which all are enumerated."""

DRAWN = 19_999
"""Random splits where there are more."""

TIE = 1e-10
"""Relative gap below which two statistics are one: sums in another order differ by rounding."""


@dataclass(frozen=True)
class Permutation:
    """A permutation test, two-sided.

    Attributes:
        p: share of splits whose |difference| is at least the observed one.
        attainable: the smallest p that this many runs can give.
        splits: that were looked at; exact: all there are.
    """

    p: float
    attainable: float
    splits: int
    exact: bool


def two_sample(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray, *, seed: int = 0, what: str = "the arms"
) -> Permutation:
    """p = #{splits with |ā − b̄| at least the observed}/C(n_a + n_b, n_a); the runs of both arms are exchangeable.

    Above 50,000 splits, 19,999 random ones: p = (1 + #)/(1 + 19,999).

    Raises:
        InputError: an arm without a run, or an outcome that is not finite.

    Source: Fisher (1935); Phipson and Smyth (2010), on the random form.
    """
    a, b = outcomes(first, what), outcomes(second, what)
    n, m = len(a), len(b)
    both = np.concatenate([a, b])
    both = both - both.mean()
    total, splits = both.sum(), math.comb(n + m, n)
    if splits <= SPLITS:
        sums = both[_splits(n + m, n)].sum(axis=1)
    else:
        keys = np.random.PCG64(seed).random_raw(DRAWN * (n + m)).reshape(DRAWN, n + m)
        sums = both[np.argpartition(keys, n - 1, axis=1)[:, :n]].sum(axis=1)
    gaps, seen = np.abs(sums / n - (total - sums) / m), abs(float(a.mean() - b.mean()))
    extreme = int((gaps >= seen - TIE * float(np.abs(both).max())).sum())
    if splits <= SPLITS:
        return Permutation(extreme / splits, attainable(n, m), splits, True)
    return Permutation((1 + extreme) / (1 + DRAWN), max(attainable(n, m), 1 / (1 + DRAWN)), DRAWN, False)


def paired(differences: Sequence[float] | np.ndarray, *, seed: int = 0, what: str = "the pairs") -> Permutation:
    """p = #{signs with |mean of ±d| at least the observed}/2ⁿ; above 50,000 signs, 19,999 random ones.

    Raises:
        InputError: no pair, or a difference that is not finite.
    """
    d = outcomes(differences, what)
    n, count = len(d), 2 ** len(d)
    if count <= SPLITS:
        signs = 1.0 - 2.0 * ((np.arange(count)[:, None] >> np.arange(n)) & 1)
    else:
        signs = 1.0 - 2.0 * (np.random.PCG64(seed).random_raw(DRAWN * n).reshape(DRAWN, n) >> np.uint64(63))
    sums = np.abs(signs @ d)
    extreme = int((sums >= abs(float(d.sum())) - TIE * float(np.abs(d).sum())).sum())
    if count <= SPLITS:
        return Permutation(extreme / count, attainable(n), count, True)
    return Permutation((1 + extreme) / (1 + DRAWN), max(attainable(n), 1 / (1 + DRAWN)), DRAWN, False)


def attainable(first: int, second: int | None = None) -> float:
    """The smallest two-sided p: 2/C(2n, n) for arms of n, 1/C(n + m, n) for unequal ones; 2/2ⁿ for n pairs.

    Unequal arms have no mirrored split, so only one split is the most extreme. Where runs tie, it cannot be reached.
    """
    if min(first, second or 1) < 1:
        raise InputError(f"a permutation test needs a run in each arm; found {first} and {second}")
    if second is None:
        return min(1.0, 2.0 ** (1 - first))
    return min(1.0, (2 if first == second else 1) / math.comb(first + second, first))


@dataclass(frozen=True)
class Sign:
    """Pairs below and above zero, the exact two-sided p, and the smallest p that so many pairs can give."""

    below: int
    above: int
    p: float
    attainable: float


def sign(differences: Sequence[float] | np.ndarray, what: str = "the pairs") -> Sign:
    """The exact two-sided sign test; zeros drop out. The pairs must be independent.

    Raises:
        InputError: no pair, or a difference that is not finite.

    Source: AQLoRA §7.2 (11 of 15, p = .12), whose settings are not independent: see `replica`.
    """
    d = outcomes(differences, what)
    below, above = int((d < 0).sum()), int((d > 0).sum())
    return Sign(below, above, binomial_p(below, below + above), min(1.0, 2.0 ** (1 - below - above)))


@dataclass(frozen=True)
class Ratio:
    """A variance ratio s_a²/s_b² with its df, two-sided p and interval; None where the lower variance is zero."""

    f: float | None
    df: tuple[int, int]
    p: float | None
    low: float | None
    high: float | None
    notes: tuple[str, ...] = ()


def variance_ratio(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    coverage: float = 0.95,
    what: str = "the arms",
) -> Ratio:
    """F = s_a²/s_b² on n_a − 1 and n_b − 1 df, p = 2·min(P(F ≤ f), P(F ≥ f)); it asks for normal outcomes.

    Raises:
        InputError: fewer than two runs in an arm, or an outcome that is not finite.

    Source: AQLoRA §7.4: F = 71 on 2 and 2 df, p = .03; F = 1.9 on 3 and 3, p = .60.
    """
    a, b = outcomes(first, what), outcomes(second, what)
    if min(len(a), len(b)) < 2:
        raise InputError(f"{what}: a variance ratio needs two runs in each arm; found {len(a)} and {len(b)}")
    above, below = float(np.var(a, ddof=1)), float(np.var(b, ddof=1))
    df = (len(a) - 1, len(b) - 1)
    notes = ("a variance ratio of fewer than four runs an arm can turn on one run",) if min(df) < 3 else ()
    if below == 0:
        return Ratio(None, df, None, None, None, (*notes, "the second arm's runs are all equal"))
    return ratio_of(above / below, *df, coverage=coverage, notes=notes)


def ratio_of(f: float, df_above: int, df_below: int, *, coverage: float = 0.95, notes: tuple[str, ...] = ()) -> Ratio:
    """`variance_ratio` from a printed F and its degrees of freedom."""
    tail = (1 - coverage) / 2
    low, high = f / f_quantile(1 - tail, df_above, df_below), f / f_quantile(tail, df_above, df_below)
    return Ratio(f, (df_above, df_below), f_two_sided(f, df_above, df_below), low, high, notes)


@lru_cache(maxsize=8)
def _splits(total: int, chosen: int) -> np.ndarray:
    """All ways to choose, (splits, chosen)."""
    flat = itertools.chain.from_iterable(itertools.combinations(range(total), chosen))
    return np.fromiter(flat, dtype=np.int64).reshape(-1, chosen)
