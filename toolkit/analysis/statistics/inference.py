"""What the draws say about an arm: a randomization p-value, quantiles, shares and paired differences.

A p-value here refers to one named control law: the arm's outcome is ranked among the outcomes of selections
that the law drew. p-values of nested budgets of one model are not independent, and nothing here combines them:
`toolkit.analysis.statistics.joint` tests budgets together, and over models the unit of a sign test is the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from toolkit.errors import InputError

Side = Literal["less", "greater"]

EXACT = 20_000
"""Trials up to which a binomial p is made of exact coefficients."""


@dataclass(frozen=True)
class Rank:
    """Where a value stands among its draws.

    Attributes:
        at_least_as_good: draws that are as good as the value or better; ties count against the claim.
        draws: how many draws there are.
        p: (1 + at_least_as_good)/(draws + 1).
        smallest_p: 1/(draws + 1), the smallest p that this many draws can give.
    """

    at_least_as_good: int
    draws: int
    p: float
    smallest_p: float


def rank(value: float, draws: Sequence[float] | np.ndarray, side: Side, what: str = "the value") -> Rank:
    """p = (1 + #{draws at least as good})/(draws + 1), one-sided, ties against the claim.

    Args:
        value: the arm's outcome.
        draws: the outcomes of its draws, at least one.
        side: `less`: the claim is that the value is lower than its draws'; `greater`: higher.
        what: names the value in errors.

    Raises:
        InputError: the value or a draw is NaN or infinite, there is no draw, or the side is neither of the two.
    """
    drawn = _finite(draws, f"the draws of {what}")
    _finite([value], what)
    if side not in ("less", "greater"):
        raise InputError(f"the side of a test is 'less' or 'greater'; found {side!r}")
    better = int((drawn <= value).sum() if side == "less" else (drawn >= value).sum())
    return Rank(better, len(drawn), (1 + better) / (len(drawn) + 1), smallest_p(len(drawn)))


def smallest_p(draws: int) -> float:
    """1/(draws + 1): what p is when no draw is as good as the arm."""
    if draws < 1:
        raise InputError(f"a p-value needs at least one draw; found {draws}")
    return 1 / (draws + 1)


def exact(single_total: bool | None) -> bool:
    """Whether a p-value may be called exact: only where every feasible subset holds the same total.

    Elsewhere the law mixes selections of slightly different totals, or leaves out the arm's layers, so that the
    arm is not one draw of it.
    """
    return single_total is True


@dataclass(frozen=True)
class Spread:
    """Quantiles of the draws, linear between order statistics (R's type 7)."""

    smallest: float
    low: float
    median: float
    high: float
    largest: float


def spread(draws: Sequence[float] | np.ndarray, what: str = "the draws", tail: float = 0.05) -> Spread:
    """The extremes, the `tail` and 1 − `tail` quantiles and the median of the draws."""
    drawn = _finite(draws, what)
    return Spread(*(float(q) for q in np.quantile(drawn, [0.0, tail, 0.5, 1.0 - tail, 1.0])))


def gap_to_median(value: float, draws: Sequence[float] | np.ndarray, what: str = "the value") -> float:
    """value − median(draws), in the outcome's unit; below zero, a loss is better than the median draw's."""
    return float(_finite([value], what)[0] - np.median(_finite(draws, f"the draws of {what}")))


def recovered(loss: float, base: float, sixteen_bit: float) -> float | None:
    """(loss_base − loss_arm)/(loss_base − loss_16bit): 0 at the base, 1 at 16 bit.

    None where the base's loss does not lie above the 16-bit loss: there is no gap to share.
    """
    _finite([loss, base, sixteen_bit], "the losses")
    gap = base - sixteen_bit
    return (base - loss) / gap if gap > 0 else None


@dataclass(frozen=True)
class Paired:
    """A paired difference, nats a token, its standard error over windows (None for a single window), windows."""

    difference: float
    standard_error: float | None
    windows: int


def paired(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    tokens: Sequence[int] | np.ndarray,
    what: str = "the windows",
) -> Paired:
    """D = Σ(a_w − b_w)/Σt_w over windows w, from summed losses a, b (nats) and scored tokens t.

    The standard error is that of a ratio: √(n/(n−1) · Σ(a_w − b_w − D·t_w)²)/Σt_w; for windows of equal length
    it is the usual one of a mean, s/√n. It tells of other windows of the same text, not of other texts.

    Raises:
        InputError: the lengths differ, a value is not finite, or a window has no tokens.
    """
    a, b = _finite(first, what), _finite(second, what)
    t = np.asarray(tokens, dtype=np.float64)
    if not len(a) == len(b) == len(t):
        raise InputError(f"{what}: {len(a)}, {len(b)} and {len(t)} windows cannot be paired")
    if (t <= 0).any():
        raise InputError(f"{what}: window {int(np.flatnonzero(t <= 0)[0])} has no scored tokens")
    delta, total, n = a - b, t.sum(), len(t)
    difference = float(delta.sum() / total)
    error = None
    if n > 1:
        error = float(np.sqrt(n / (n - 1) * np.square(delta - difference * t).sum()) / total)
    return Paired(difference, error, n)


def binomial_p(successes: int, total: int) -> float:
    """min(1, 2·P(X ≤ min(k, m − k))), X binomial(m, 1/2): the exact two-sided p; 1 where m = 0.

    The largest term is exact up to `EXACT` trials; above, it is a product of floating-point steps (relative error
    below 1e-9 for a million trials), because binomial coefficients of that size take minutes.

    Raises:
        InputError: counts below zero, or more successes than trials.
    """
    if not 0 <= successes <= total:
        raise InputError(f"a binomial test takes 0 to {total} successes of {total}; found {successes}")
    few = min(successes, total - successes)
    tail = term = 1.0  # P(X ≤ few)/P(X = few), from the largest term down
    for k in range(few, 0, -1):
        term *= k / (total - k + 1)
        if term < 1e-18:
            break
        tail += term
    return min(1.0, 2 * tail * (math.comb(total, few) / 2**total if total <= EXACT else _share(few, total)))


def _share(few: int, total: int) -> float:
    """C(m, k)/2^m, kept in range by halving as it grows."""
    term, halvings = 1.0, total
    for k in range(1, few + 1):
        term *= (total - few + k) / k
        while term > 1.0 and halvings:
            term /= 2.0
            halvings -= 1
    return math.ldexp(term, -halvings)


@dataclass(frozen=True)
class Signs:
    """A sign test over models: those with a gap below and above zero, of all that differ from zero, two-sided p."""

    below: int
    above: int
    models: int
    p: float
    smallest_p: float


def sign_over_models(gaps: Mapping[str, float]) -> Signs:
    """The exact two-sided sign test whose unit is the model: one gap a model, zeros left out.

    Settings of one model share layers and are no units of their own: give each model one number, such as its joint
    statistic. m models give no p below 2^(1 − m).

    Raises:
        InputError: no model, or a gap that is not finite.
    """
    if not gaps:
        raise InputError("a sign test over models needs at least one model")
    for model, gap in gaps.items():
        if not math.isfinite(gap):
            raise InputError(f"the gap of model {model!r} is {gap}; only finite gaps have a sign")
    below, above = sum(g < 0 for g in gaps.values()), sum(g > 0 for g in gaps.values())
    total = below + above
    return Signs(below, above, total, binomial_p(below, total), min(1.0, 2.0 ** (1 - total)))


def _finite(values: Sequence[float] | np.ndarray, what: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise InputError(f"{what}: at least one number is asked for, in one row; found shape {array.shape}")
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise InputError(f"{what}: number {int(bad[0])} is {array[bad[0]]}; only finite scores can be compared")
    return array
