"""Whether an accuracy lies above chance: an exact one-sided binomial test."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.analysis.statistics.distributions import binomial_at_least, clopper_pearson
from toolkit.errors import InputError


@dataclass(frozen=True)
class AboveChance:
    """An accuracy against chance.

    Attributes:
        p: P(at least so many right by chance); low, high: exact limits of the accuracy.
        above: p ≤ α. Where it is not, the task is flagged, and averages are printed with and without it.
        needed: right rows of so many that would be above.
    """

    right: int
    rows: int
    chance: float
    p: float
    low: float
    high: float
    above: bool
    needed: int | None
    alpha: float


def above_chance(right: float, rows: int, chance: float, *, alpha: float = 0.05) -> AboveChance:
    """p = P(X ≥ right), X binomial(rows, chance); exact limits that cover 1 − 2α: above is low > chance.

    For a mean over runs, give the mean number of right rows: it is rounded down, and rows are counted once, because
    runs share them. Chance is the larger of uniform guessing and the majority class of these rows.

    Raises:
        InputError: counts that do not fit, or a chance outside [0, 1].

    Source: the test is Clopper and Pearson's (1934); that chance is the larger of the two, the choice is ours.
    """
    if rows < 1 or not 0 <= right <= rows:
        raise InputError(f"right answers lie from 0 to {rows} rows, at least one; found {right}")
    if not 0 <= chance <= 1:
        raise InputError(f"chance is a share in [0, 1]; found {chance}")
    count = math.floor(right + 1e-9)
    p = binomial_at_least(count, rows, chance)
    low, high = clopper_pearson(count, rows, alpha)
    return AboveChance(count, rows, chance, p, low, high, p <= alpha, _fewest(rows, chance, alpha), alpha)


def _fewest(rows: int, chance: float, alpha: float) -> int | None:
    """The fewest right rows whose p is at most alpha; None where no number is."""
    low, high = 0, rows + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if binomial_at_least(middle, rows, chance) <= alpha else (middle + 1, high)
    return low if low <= rows else None
