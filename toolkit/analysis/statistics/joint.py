"""One test over nested budgets: an arm's standardized gaps, averaged, and ranked among whole families of draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.analysis.statistics.inference import Side, rank, smallest_p
from toolkit.errors import InputError

TIE = 1e-9
"""Standardized statistics closer than this (in standard deviations) are one value: rounding never decides a rank."""


@dataclass(frozen=True)
class Joint:
    """Where an arm's budgets together stand among families of draws.

    Attributes:
        statistic: the effect: the mean over budgets of (value − median draw)/sd(draws), sd with n − 1; signed as
            measured. None where no budget's draws differ, or there is a single draw.
        at_least_as_good: families that are as good as the arm's or better; ties count against the claim.
        draws: families drawn.
        p: (1 + at_least_as_good)/(draws + 1).
        smallest_p: 1/(draws + 1).
        flat: places of the budgets at which arm and draws are all equal; they add nothing.
    """

    statistic: float | None
    at_least_as_good: int
    draws: int
    p: float
    smallest_p: float
    flat: tuple[int, ...] = ()


def joint(
    values: Sequence[float] | np.ndarray,
    draws: Sequence[Sequence[float]] | np.ndarray,
    side: Side,
    what: str = "the arm",
) -> Joint:
    """p = (1 + #{i : T_i at least as good as T_0})/(n + 1), T_i = Σ_b v_ib/s_b over budgets b.

    Column 0 is the arm's family and columns 1 … n are the drawn ones. s_b is the standard deviation of budget b's
    n + 1 values together. Under the null hypothesis the n + 1 families are exchangeable; s_b does not change when
    they are permuted, so the T_i are exchangeable too, and P(p ≤ α) ≤ α whatever the dependence between budgets.
    (A standard deviation of the draws alone would treat the arm's family unlike the others, and that argument
    would fail.) Any centre that is common to the n + 1 families cancels in the rank. The reported `statistic` is
    centred and scaled by the draws alone, because that is what a reader expects of an effect.

    A budget at which all n + 1 values are equal adds nothing; where every budget is so, p = 1. With one budget, or
    one that is not flat, this is `inference.rank` of its values.

    Args:
        values: the arm's outcome at each budget, (budgets,).
        draws: (budgets, n); column i of every row belongs to one family.
        side: `less`: the claim is that the arm's outcomes are lower.
        what: names the arm in errors.

    Raises:
        InputError: shapes that do not fit, no family, a number that is not finite, or a wrong side.

    Source: the ranking of exchangeable families is Phipson & Smyth (2010); the statistic is our choice.
    """
    value, drawn = _arrays(values, draws, what)
    if side not in ("less", "greater"):
        raise InputError(f"the side of a test is 'less' or 'greater'; found {side!r}")
    count = drawn.shape[1]
    flat = tuple(at for at in range(len(value)) if (drawn[at] == value[at]).all())
    left = [at for at in range(len(value)) if at not in flat]
    if not left:
        better = count
    elif len(left) == 1:
        better = rank(value[left[0]], drawn[left[0]], side, what).at_least_as_good
    else:
        all_of_them = statistics(value[left], drawn[left])
        better = at_least_as_good(all_of_them[0], all_of_them[1:], side)
    smallest = smallest_p(count)
    return Joint(effect(value, drawn), better, count, (1 + better) / (count + 1), smallest, flat)


def statistics(values: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """T of the arm's family and of each drawn one, (n + 1,): the mean over budgets of `standardized`."""
    return standardized(values, draws).mean(axis=0)


def standardized(values: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """(v_ib − v̄_b)/s_b, (budgets, n + 1): the arm's in column 0, centre and scale over all n + 1; 0 where flat."""
    together = np.column_stack([values, draws])
    flat = (together == together[:, :1]).all(axis=1)
    centred = together - together.mean(axis=1, keepdims=True)
    scale = np.where(flat, 1.0, np.sqrt(np.square(centred).mean(axis=1)))
    return np.where(flat[:, None], 0.0, centred / scale[:, None])


def at_least_as_good(value: float, draws: np.ndarray, side: Side) -> int:
    """Standardized draws as good as a standardized value or better, ties (to within `TIE`) included."""
    return int((draws <= value + TIE).sum() if side == "less" else (draws >= value - TIE).sum())


def effect(values: np.ndarray, draws: np.ndarray) -> float | None:
    """Mean over budgets of (value − median draw)/sd(draws); None where no budget's draws have a spread."""
    if draws.shape[1] < 2:
        return None
    spread = np.where((draws == draws[:, :1]).all(axis=1), 0.0, draws.std(axis=1, ddof=1))
    if not spread.any():
        return None
    gaps = values - np.median(draws, axis=1)
    return float((gaps[spread > 0] / spread[spread > 0]).mean())


def _arrays(values: object, draws: object, what: str) -> tuple[np.ndarray, np.ndarray]:
    value = np.asarray(values, dtype=np.float64)
    try:
        drawn = np.asarray(draws, dtype=np.float64)
    except ValueError:
        raise InputError(
            f"{what}: a joint test needs as many draws at every budget; found rows of unlike length"
        ) from None
    if value.ndim != 1 or not len(value) or drawn.ndim != 2 or len(drawn) != len(value) or not drawn.shape[1]:
        raise InputError(
            f"{what}: a joint test takes one outcome a budget and a (budgets, draws) table; found shapes "
            f"{value.shape} and {drawn.shape}"
        )
    bad = np.argwhere(~np.isfinite(np.column_stack([value, drawn])))
    if len(bad):
        budget, at = (int(v) for v in bad[0])
        who = "the outcome" if at == 0 else f"draw {at - 1}"
        raise InputError(f"{what}: {who} at budget {budget} is not finite; only finite scores can be compared")
    return value, drawn
