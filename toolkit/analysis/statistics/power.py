"""What a number of runs can find, by the noncentral t: detectable effects, and the runs that a spread asks for."""

from __future__ import annotations

import math
from collections.abc import Callable

from toolkit.analysis.statistics.distributions import t_power
from toolkit.analysis.statistics.seeds import satterthwaite
from toolkit.errors import InputError

SHARE = 0.8
"""Power that is asked for, where nothing else is."""

MOST = 10_000
"""Runs an arm that are looked at."""


def detectable(error: float | None, df: float | None, *, alpha: float = 0.05, power: float = SHARE) -> float | None:
    """δ with P(|T_ν(δ/s)| > t_{1−α/2, ν}) = power, T noncentral, for a standard error s with ν df, two-sided.

    None where the spread is unknown or zero.

    Source: Cohen (1988), ch. 2; with unequal variances, Welch's df.
    """
    _check(alpha, power)
    if not error or df is None or df <= 0:
        return None
    return error * shift(df, alpha, power)


def shift(df: float, alpha: float = 0.05, power: float = SHARE) -> float:
    """The noncentrality at which a two-sided t-test of `df` has this power: δ/s."""
    low, high = 0.0, 4.0
    while t_power(high, df, alpha) < power:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_power(middle, df, alpha) < power else (low, middle)
        if high - low <= 1e-9 * high:
            break
    return (low + high) / 2


def needed(
    effect: float,
    first_sd: float,
    second_sd: float,
    *,
    alpha: float = 0.05,
    power: float = SHARE,
    most: int = MOST,
) -> int | None:
    """The fewest runs an arm at which Welch's t finds `effect` with this power; None above `most`.

    Raises:
        InputError: a spread below zero, or alpha or power outside (0, 1).
    """
    v, u = _square(first_sd), _square(second_sd)

    def enough(n: int) -> bool:
        return _finds(effect, v / n + u / n, satterthwaite((v / n, n - 1), (u / n, n - 1)), alpha, power)

    return _fewest(enough, effect, v + u, alpha, power, most)


def needed_pairs(
    effect: float, sd: float, *, alpha: float = 0.05, power: float = SHARE, most: int = MOST
) -> int | None:
    """The fewest pairs at which the paired t finds `effect`, `sd` the spread of the pairs' differences."""
    v = _square(sd)
    return _fewest(lambda n: _finds(effect, v / n, n - 1, alpha, power), effect, v, alpha, power, most)


def _finds(effect: float, square: float, df: float, alpha: float, power: float) -> bool:
    return t_power(min(abs(effect) / math.sqrt(square), 1e3), df, alpha) >= power


def _fewest(
    enough: Callable[[int], bool], effect: float, square: float, alpha: float, power: float, most: int
) -> int | None:
    """The smallest n from 2 for which `enough`, which once true stays so."""
    _check(alpha, power)
    if not effect or not math.isfinite(effect):
        return None
    if not square:
        return 2
    high = 2
    while not enough(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def _square(sd: float) -> float:
    if not (sd >= 0 and math.isfinite(sd)):
        raise InputError(f"a spread is finite and not below zero; found {sd}")
    return sd * sd


def _check(alpha: float, power: float) -> None:
    if not (0 < alpha < 1 and 0 < power < 1):
        raise InputError(f"alpha and power lie between 0 and 1; found {alpha} and {power}")
