"""Timing: an arm's speed, its ratio within rounds, the session's noise floor, and margins over sessions.

Interference only slows a sample, so speeds have a ceiling and a slow tail: the mean of the fastest half is the
paper's estimate (AQLoRA §4), and the others stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from toolkit.analysis.statistics.bootstrap import LEVEL
from toolkit.analysis.statistics.distributions import t_quantile
from toolkit.errors import InputError

LIMIT = 0.03
"""Floor at or above which a session is shown and kept out (AQLoRA §4)."""

FEWEST = 3
"""Runs of the baseline arm that a floor needs."""

SESSIONS = 4
"""Sessions from which an interval is given; fewer print as a range."""

Verdict = Literal["faster", "slower", "within the floor"]


@dataclass(frozen=True)
class Speed:
    """An arm's rounds of one session, in their unit (such as tokens/s)."""

    fastest_half: float
    median: float
    mean: float
    best: float
    rounds: int


def speed(rounds: Sequence[float] | np.ndarray, what: str = "the arm") -> Speed:
    """The mean of the ⌈n/2⌉ fastest rounds (three of five, four of seven), with median, mean and best.

    Raises:
        InputError: no round, or a speed that is not finite and above zero.

    Source: AQLoRA §4.
    """
    x = _speeds(rounds, what)
    half = np.sort(x)[len(x) // 2 :]
    return Speed(float(half.mean()), float(np.median(x)), float(x.mean()), float(x.max()), len(x))


@dataclass(frozen=True)
class Ratio:
    """A ratio of speeds within rounds: geometric mean, and its t-interval on logarithms (None for one round)."""

    value: float
    low: float | None
    high: float | None
    rounds: int


def paired_ratio(
    arm: Sequence[float] | np.ndarray,
    baseline: Sequence[float] | np.ndarray,
    *,
    coverage: float = LEVEL,
    what: str = "the arms",
) -> Ratio:
    """exp(mean of ln(a_k/b_k)) over rounds k, exp(mean ± t_{n−1}·s/√n): what drifts within a session cancels.

    It tells of other rounds of this session, not of other sessions.

    Args:
        arm: (rounds,) speeds.
        baseline: (rounds,), or (duplicates, rounds): then the geometric mean of the duplicates in each round.

    Raises:
        InputError: other numbers of rounds, or a speed that is not finite and above zero.
    """
    a, b = _speeds(arm, what), np.atleast_2d(np.asarray(baseline, dtype=np.float64))
    for row in b:
        _speeds(row, what)
    if b.shape[1] != len(a):
        raise InputError(f"{what}: {len(a)} and {b.shape[1]} rounds cannot be paired")
    gaps = np.log(a) - np.log(b).mean(axis=0)
    middle, n = float(gaps.mean()), len(gaps)
    if n < 2:
        return Ratio(math.exp(middle), None, None, n)
    half = t_quantile((1 + coverage) / 2, n - 1) * float(gaps.std(ddof=1)) / math.sqrt(n)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), n)


@dataclass(frozen=True)
class Floor:
    """A session's noise floor, as shares of a speed.

    Attributes:
        bound: the floor: upper 95% bound of the gap between two runs of one configuration, and no less than the
            noisiest arm's own gap.
        single: the paper's: the gap of the first two runs of the baseline.
        largest: gap of the baseline's runs.
        noisiest: gap of the noisiest arm's two runs; None where it has no duplicate.
        duplicates: runs of the baseline.
        limit: at or above which the session is kept out.
        kept: bound < limit.
        sentence: what it says.
    """

    bound: float
    single: float
    largest: float
    noisiest: float | None
    duplicates: int
    limit: float
    kept: bool
    sentence: str


def floor(
    baseline: Sequence[float] | np.ndarray,
    noisiest: Sequence[float] | np.ndarray | None = None,
    *,
    limit: float = LIMIT,
    level: float = LEVEL,
    what: str = "the baseline",
) -> Floor:
    """exp(t_{(1+level)/2, k−1}·√2·s) − 1, s the spread of ln(speed) over k ≥ 3 runs of one configuration.

    The gap of two further runs is N(0, 2σ²), so |gap| lies below t·√2·s with probability `level`, s being as few runs
    know it. One gap, the paper's floor, is half of the time below ⅔ of the gaps' own spread: with gaps that spread by
    4.2% it is under 3% in 52% of sessions, three runs' bound in 3%. The price: gaps that spread by 1% pass three
    runs' bound in 38% of sessions, five runs' in 66%; more duplicates make it sharper.

    Args:
        baseline: (runs,) the estimate (fastest half) of each run of the baseline arm.
        noisiest: (2,) or more, of the noisiest arm's; their largest gap is a lower bound of the floor, because two
            runs alone bound nothing (t = 12.7).
        limit: kept out at or above it.

    Raises:
        InputError: fewer than three runs, or a speed that is not finite and above zero.

    Source: AQLoRA §4 and §6 for the single gap and the 3%; that the bound is this one, the choice is ours.
    """
    x = np.log(_speeds(baseline, what))
    k = len(x)
    if k < FEWEST:
        raise InputError(f"{what}: a noise floor needs {FEWEST} runs of one configuration; found {k}")
    bound = t_quantile((1 + level) / 2, k - 1) * math.sqrt(2.0) * float(x.std(ddof=1))
    other = None if noisiest is None else float(np.ptp(np.log(_speeds(noisiest, "the noisiest arm"))))
    found = math.expm1(max(bound, other or 0.0))
    single, largest = math.expm1(abs(float(x[1] - x[0]))), math.expm1(float(np.ptp(x)))
    kept = found < limit
    sentence = (
        f"floor {found:.1%}, upper {level:.0%} bound of the gap between two runs of one configuration, of {k} runs "
        f"(one gap, as in the paper: {single:.1%}){'' if kept else f'; kept out: not below {limit:.0%}'}"
    )
    return Floor(found, single, largest, None if other is None else math.expm1(other), k, limit, kept, sentence)


@dataclass(frozen=True)
class Margin:
    """How much faster than the baseline, as a share (below zero: slower), beside the floor.

    Attributes:
        verdict: never a gain where the margin is smaller than the floor.
    """

    value: float
    floor: float
    verdict: Verdict


def margin(arm: float, baseline: float | Sequence[float] | np.ndarray, floor: float) -> Margin:
    """a/b − 1, b the geometric mean of the baseline's runs; within the floor where |ln(a/b)| ≤ ln(1 + floor).

    Args:
        arm, baseline: estimates (fastest half); the baseline's all, duplicates too.
        floor: of the session.

    Raises:
        InputError: a speed or a floor that is not finite, or a speed not above zero.
    """
    a = _speeds([arm], "the arm")
    b = _speeds(np.atleast_1d(np.asarray(baseline, dtype=np.float64)), "the baseline")
    if not (math.isfinite(floor) and floor >= 0):
        raise InputError(f"a floor is finite and not below zero; found {floor}")
    gap = float(np.log(a[0]) - np.log(b).mean())
    within = abs(gap) <= math.log1p(floor) * (1 + 1e-12)
    return Margin(math.expm1(gap), floor, "within the floor" if within else "faster" if gap > 0 else "slower")


@dataclass(frozen=True)
class Across:
    """An arm's margins over the kept sessions.

    Attributes:
        mean, sd: of the margins, sd None for one session.
        low, high: the range of two or three sessions, the t-interval of four or more; None for one.
        form: `one`, `range` or `t`.
        sessions, allocations: how many of each.
        independent: no two sessions of one allocation.
        verdict: a gain only where every session's margin exceeds its floor, and an interval excludes zero.
        notes: what must be said beside it.
    """

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    form: Literal["one", "range", "t"]
    sessions: int
    allocations: int
    independent: bool
    verdict: Verdict
    notes: tuple[str, ...]


def across(
    margins: Sequence[Margin], allocations: Sequence[Hashable], *, coverage: float = LEVEL, what: str = "the arm"
) -> Across:
    """The mean of the sessions' margins; two or three as a range, four or more m̄ ± t_{n−1}·s/√n.

    The session is the unit. Sessions of one allocation share the machine's state: they are marked, and their interval
    tells of that allocation only.

    Args:
        margins: one a kept session.
        allocations: what tells one allocation from the next, one a session.

    Raises:
        InputError: no session, or other numbers of allocations.

    Source: AQLoRA §6 (11.3 ± 2.3% over thirteen sessions), whose sessions of one model differ by up to 8 points.
    """
    if not margins or len(margins) != len(allocations):
        raise InputError(
            f"{what}: one allocation a kept session is asked for; found {len(margins)}, {len(allocations)}"
        )
    x, n = np.array([m.value for m in margins]), len(margins)
    mean, sd = float(x.mean()), float(x.std(ddof=1)) if n > 1 else None
    low, high, form = (float(x.min()), float(x.max()), "range") if n > 1 else (None, None, "one")
    if n >= SESSIONS and sd is not None:
        half = t_quantile((1 + coverage) / 2, n - 1) * sd / math.sqrt(n)
        low, high, form = mean - half, mean + half, "t"
    different = len(set(allocations))
    notes = []
    if n == 1:
        notes.append("one session: how sessions spread is not known")
    if different < n:
        notes.append(
            f"not independent: {n} sessions of {different} allocation{'s' * (different > 1)}; "
            "other allocations may differ by more"
        )
    told = {m.verdict for m in margins}
    verdict: Verdict = margins[0].verdict if len(told) == 1 else "within the floor"
    if form == "t" and low is not None and high is not None and low <= 0 <= high:
        verdict = "within the floor"
    return Across(mean, sd, low, high, form, n, different, different == n, verdict, tuple(notes))  # type: ignore[arg-type]


def _speeds(values: Sequence[float] | np.ndarray, what: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise InputError(f"{what}: at least one round is asked for, in one row; found shape {array.shape}")
    bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if len(bad):
        raise InputError(f"{what}: round {int(bad[0])} is {array[bad[0]]}; a speed is finite and above zero")
    return array
