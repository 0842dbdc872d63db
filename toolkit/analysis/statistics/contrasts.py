"""Two arms compared over shared rows: every number that a table prints of them, in one call."""

from __future__ import annotations

import math

import numpy as np

from toolkit.analysis.statistics import bootstrap, crossed, power, seeds, small_tests
from toolkit.analysis.statistics.distributions import t_p
from toolkit.analysis.statistics.equivalence import equivalence
from toolkit.analysis.statistics.pairing import pairing
from toolkit.analysis.statistics.runs import FEW, MANY, UNKNOWN, Contrast, Estimate, Power, Runs
from toolkit.errors import InputError

ROWS = 4_000
"""Rows up to which their interval is resampled; with more, t is as good."""


def contrast(
    first: Runs,
    second: Runs,
    *,
    paired: bool = False,
    coverage: float = bootstrap.LEVEL,
    margin: float | None = None,
    resamples: int | None = 2000,
    seed: int = 0,
    what: str = "the contrast",
) -> Contrast:
    """first − second over their shared rows, over other seeds, over other rows, and over both.

    Below ten runs an arm intervals over seeds are t-based (Welch's, or the paired t); from ten on, seeds × rows is
    resampled crossed; an average over tasks, whose rows are strata, stays with t. α of every test is 1 − coverage.
    For the loss, below zero is better; for a score, above.

    Args:
        paired: pair runs of one seed, as the study declared; runs without a partner are left out, with a note.
        coverage: of every interval, 1 − the analysis' level.
        margin: of equivalence, in the outcome's unit, declared before the first run; None: none was.
        resamples, seed: of the bootstrap over rows, and of the crossed one; no resamples: t instead of both, for what
            stands beside the declared contrasts.
        what: names the contrast in errors.

    Raises:
        InputError: arms that scored other rows, or pairing declared for arms without a common seed.
    """
    _shared(first, second, what)
    alpha = round(1 - coverage, 12)
    notes: list[str] = []
    if paired:
        first, second = _pairs(first, second, notes, what)
    a, b, weights = first.means, second.means, first.weights
    sides = [first.values - second.values] if paired else [first.values, second.values]
    n = (len(a),) if paired else (len(a), len(b))
    over_seeds = (
        seeds.paired(a - b, coverage=coverage, what=what) if paired else seeds.welch(a, b, coverage=coverage, what=what)
    )
    strata = first.strata
    if min(n) >= MANY and resamples is not None and strata is None:
        both = crossed.resampled(sides, weights, coverage=coverage, resamples=resamples, seed=seed, n=n)
    else:
        both = crossed.interval(sides, weights, coverage=coverage, n=n, strata=strata)
    known = min(n) >= FEW
    if not known:
        notes.append(UNKNOWN)
    permuted = small_tests.paired(a - b, seed=seed) if paired else small_tests.two_sample(a, b, seed=seed)
    common = [(first.seeds.index(s), second.seeds.index(s)) for s in first.seeds if s in second.seeds]
    strength = _power(sides, weights, strata, over_seeds, both, paired, margin, alpha)
    if strength.rows_limit:
        notes.append("more seeds would not find a difference of this size: more rows are needed")
    return Contrast(
        first=float(a.mean()),
        second=float(b.mean()),
        first_sd=_sd(a),
        second_sd=_sd(b),
        runs=(len(a), len(b)),
        rows=len(weights),
        paired=paired,
        seeds=over_seeds,
        rows_only=_over_rows(first, second, coverage, resamples, seed, n),
        both=both,
        permutation_p=permuted.p,
        attainable=permuted.attainable,
        spread_known=known,
        equivalence=equivalence(both, margin, alpha=alpha),
        power=strength,
        pairing=pairing(a[[i for i, _ in common]], b[[j for _, j in common]], coverage=coverage)
        if len(common) > 1
        else None,
        notes=tuple(notes),
    )


def _shared(first: Runs, second: Runs, what: str) -> None:
    if len(first.weights) != len(second.weights):
        raise InputError(
            f"{what}: {len(first.weights)} rows in the first arm and {len(second.weights)} in the second; "
            "arms are compared on the rows that all their runs scored"
        )
    other = np.flatnonzero(~np.isclose(first.weights, second.weights, rtol=1e-12, atol=0))
    if len(other):
        row = int(other[0])
        raise InputError(
            f"{what}: row {row} weighs {first.weights[row]:g} in the first arm and {second.weights[row]:g} in the "
            "second (its target tokens, for a loss): the arms did not score the same rows"
        )
    one, two = (arm.strata if arm.strata is not None else np.zeros(len(arm.weights)) for arm in (first, second))
    if not np.array_equal(one, two):
        raise InputError(f"{what}: the arms' rows belong to other tasks; an average is over the same tasks in both")


def _pairs(first: Runs, second: Runs, notes: list[str], what: str) -> tuple[Runs, Runs]:
    """The runs of common seeds, in one order."""
    common = [s for s in first.seeds if s in second.seeds]
    if not common:
        raise InputError(
            f"{what}: pairing by seed was declared, but the arms have no seed in common: "
            f"{_some(first.seeds)} and {_some(second.seeds)}"
        )
    alone = [s for s in (*first.seeds, *second.seeds) if s not in common]
    if alone:
        notes.append(f"runs without a partner left out: seed{'s' * (len(alone) > 1)} {_some(alone)}")

    def chosen(arm: Runs) -> Runs:
        return Runs(arm.values[[arm.seeds.index(s) for s in common]], arm.weights, tuple(common), arm.strata)

    return chosen(first), chosen(second)


def _over_rows(
    first: Runs, second: Runs, coverage: float, resamples: int | None, seed: int, n: tuple[int, ...]
) -> Estimate:
    """The mean over rows of the runs' mean difference: other rows, these runs."""
    d, w = first.values.mean(axis=0) - second.values.mean(axis=0), first.shares
    estimate, rows = float(d @ w), len(w)
    told = "other rows, these runs"
    if rows < 2:
        return Estimate(
            estimate, None, None, coverage, None, None, None, n, f"bootstrap over rows: {told}", ("one row",)
        )
    told += "" if first.strata is None else ", of the same tasks"
    error = math.sqrt(crossed.by_rows(d, w, first.strata))
    p = t_p(estimate / error, rows - 1) if error else None
    if rows > ROWS or not error or resamples is None or first.strata is not None:
        plain = seeds.interval(estimate, error**2, rows - 1, coverage, n, f"t over {rows:,} rows: {told}")
        return plain
    found = bootstrap.mean(d * w, w, resamples=resamples, level=coverage, seed=seed)
    method = f"studentized bootstrap over rows, {resamples:,} resamples: {told}"
    few = (f"{rows} rows: too few for an interval",) if found.low is None else ()
    return Estimate(estimate, found.low, found.high, coverage, error, rows - 1, p, n, method, few)


def _power(
    sides: list[np.ndarray],
    weights: np.ndarray,
    strata: np.ndarray | None,
    over_seeds: Estimate,
    both: Estimate,
    paired: bool,
    margin: float | None,
    alpha: float,
) -> Power:
    target = margin if margin is not None else abs(over_seeds.estimate)
    shares = weights / weights.sum()
    spreads = [_sd(x @ shares) for x in sides]
    wanted: int | None = None
    limited = False
    if over_seeds.error:
        known = [s for s in spreads if s is not None]
        wanted = (
            power.needed_pairs(target, *known, alpha=alpha) if paired else power.needed(target, *known, alpha=alpha)
        )
        if len(weights) > 1:
            found = crossed.parts(sides, weights, strata)
            limited = math.sqrt(found.apart) * power.shift(found.rows_df, alpha) > target
    return Power(
        power.detectable(over_seeds.error, over_seeds.df, alpha=alpha),
        power.detectable(both.error, both.df, alpha=alpha),
        target,
        wanted,
        limited,
        power.SHARE,
        alpha,
        power.MOST,
    )


def _sd(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _some(names: list[object] | tuple[object, ...], most: int = 6) -> str:
    shown = ", ".join(str(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
