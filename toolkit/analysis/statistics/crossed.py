"""Seeds × rows: the interval of a difference when seeds and rows both vary, and all runs share the rows.

Row r of run i of an arm is x_ir = μ + ρ_r + σ_i + ε_ir. Resampling all outcomes, or runs and rows within them, counts
the shared rows once a run and is too narrow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolkit.analysis.statistics import seeds
from toolkit.analysis.statistics.bootstrap import LEVEL
from toolkit.analysis.statistics.distributions import df_of_t, t_quantile
from toolkit.analysis.statistics.runs import Estimate
from toolkit.errors import InputError

CELLS = 1_000_000
"""Resamples × rows that are held at once."""


@dataclass(frozen=True)
class Parts:
    """The variance of D = Σ± mean of means, in parts.

    Attributes:
        difference: D.
        seeds: Σ_g s_g²/n_g of the runs' means: seeds, and a share of the interaction.
        rows: of the rows' mean differences: rows, and the same share of the interaction.
        cells: that share, which both count.
        seeds_df, rows_df, cells_df: degrees of freedom; of the rows, their effective number less one.
    """

    difference: float
    seeds: float
    rows: float
    cells: float
    seeds_df: float
    rows_df: float
    cells_df: float

    @property
    def apart(self) -> float:
        """What the rows add to the seeds' part: V_rows − V_cells, at least 0."""
        return max(self.rows - self.cells, 0.0)

    @property
    def variance(self) -> float:
        """V = V_seeds + max(V_rows − V_cells, 0)."""
        return self.seeds + self.apart

    def df(self, coverage: float) -> float:
        """ν with t_ν = ½(t_Satterthwaite + t_Cochran), at this coverage."""
        return joint_df(
            (self.seeds, self.seeds_df), (self.rows, self.rows_df), (-self.cells, self.cells_df), coverage=coverage
        )


def joint_df(first: tuple[float, float], *others: tuple[float, float], coverage: float) -> float:
    """Degrees of freedom of a sum of variances of which the first has few: (variance, df) each, others in one sum.

    t_ν = ½(t_s + t_c): t_s by Satterthwaite's df; t_c = (V₁·t_{ν₁} + V₂·t_{ν₂})/(V₁ + V₂), Cochran and Cox's, V₂ the
    sum of the others (at least 0) and ν₂ the df of the second. With three runs and rows that weigh as much as the
    seeds, the first covers .92–.95 where 95% is asked for, the second .95–.98, their mean .94–.96. That it is the
    mean is our choice, held by that simulation.

    Source: Satterthwaite (1946); Cochran and Cox (1950), on the Behrens-Fisher problem.
    """
    one, two = first[0], max(sum(v for v, _ in others), 0.0)
    if not one + two:
        return first[1]
    share = (1 + coverage) / 2
    few, many = t_quantile(share, first[1]), t_quantile(share, others[0][1])
    below, above = sorted((first[1], others[0][1]))
    plain = min(max(seeds.satterthwaite(first, *others), below), above + first[1])
    wanted = (t_quantile(share, plain) + (one * few + two * many) / (one + two)) / 2
    return df_of_t(share, wanted)


def parts(sides: list[np.ndarray], weights: np.ndarray, strata: np.ndarray | None = None) -> Parts:
    """The parts from one table (paired differences) or two (first, second), each (runs, rows), runs ≥ 2, rows ≥ 2.

    With w_r = weights/Σ, M_i = Σ_r w_r·x_ir, d_r the rows' mean (difference), D = Σ w_r·d_r, c = R/(R − 1):
    V_seeds = Σ_g s²(M)/n_g; V_rows = c·Σ w_r²(d_r − D)²;
    V_cells = Σ_g c·Σ_r w_r²·Σ_i (x_ir − M_i − x̄_r + M)²/(n_g(n_g − 1)).
    With strata, D, M_i, M and R of the last two are those of the row's own stratum; a stratum of one row cannot tell
    how its rows vary, and adds nothing.

    Source: the two-way random-effects analysis (Searle, Casella, McCulloch 1992, ch. 4), with weighted rows.
    """
    w = weights / weights.sum()
    member, within, scaled = _strata(w, strata)
    d = np.zeros(len(w))
    own: list[tuple[float, float]] = []
    cells = cells_df = 0.0
    for sign, x in zip((1.0, -1.0), sides, strict=False):
        n, middle = len(x), x.mean(axis=0)
        d += sign * middle
        own.append((seeds.variance(x @ w) / n, n - 1))
        away = x - middle
        rest = away - (away @ within)[:, member]
        cells += float(np.square(rest).sum(axis=0) @ scaled) / (n * (n - 1))
        cells_df += n - 1
    row_df = max(float((w**2).sum() ** 2 / (w**4).sum()) - within.shape[1], 1e-9)
    return Parts(
        float(d @ w),
        sum(v for v, _ in own),
        by_rows(d, w, strata),
        cells,
        min(seeds.satterthwaite(*own), float(sum(df for _, df in own))),
        row_df,
        cells_df * row_df,
    )


def by_rows(d: np.ndarray, weights: np.ndarray, strata: np.ndarray | None = None) -> float:
    """V_rows of `parts`: the variance of Σ w_r·d_r over other rows."""
    member, within, scaled = _strata(weights / weights.sum(), strata)
    return float(np.square(d - (d @ within)[member]) @ scaled)


def _strata(w: np.ndarray, strata: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's stratum, the weights within each (rows, strata), and w_r²·R/(R − 1) of its stratum."""
    member = np.zeros(len(w), dtype=int) if strata is None else strata
    of = np.eye(member.max() + 1)[member]
    within, count = of * w[:, None] / (w @ of), of.sum(axis=0)
    return member, within, w**2 * (count / np.maximum(count - 1, 1))[member]


def interval(
    sides: list[np.ndarray],
    weights: np.ndarray,
    *,
    coverage: float = LEVEL,
    n: tuple[int, ...] | None = None,
    strata: np.ndarray | None = None,
) -> Estimate:
    """D ± t_ν·√V over other seeds and other rows, V and ν from `parts`.

    Coverage in simulation is in `benchmarks/results/seeds.json`: 93–97% at 3, 4, 6 and 10 runs an arm.

    Raises:
        InputError: tables that do not share their rows.
    """
    n = n or tuple(len(x) for x in sides)
    method = "seeds × rows, t from the variance of both: other seeds and other rows"
    _check(sides, weights)
    scale = float(max(np.abs(x).max() for x in sides))
    if min(len(x) for x in sides) < 2 or len(weights) < 2:
        value = [float((x @ weights / weights.sum()).mean()) for x in sides]
        return seeds.interval(value[0] - sum(value[1:]), None, 0, coverage, n, method)
    found = parts(sides, weights, strata)
    return seeds.interval(found.difference, found.variance, found.df(coverage), coverage, n, method, scale=scale)


def resampled(
    sides: list[np.ndarray],
    weights: np.ndarray,
    *,
    coverage: float = LEVEL,
    resamples: int = 2000,
    seed: int = 0,
    n: tuple[int, ...] | None = None,
) -> Estimate:
    """D ± c·√V, c the quantile of |D* − D|/√V* over crossed resamples: for ten runs an arm and more.

    Each resample draws runs within each arm and, once for all runs of both arms, rows. V* is that of `parts` on the
    resample. p = (1 + #{|t*| ≥ |t|})/(B + 1).
    Fewer than ten runs leave too few distinct resamples: use `interval`.

    Args:
        resamples: B.
        seed: equal seeds give equal intervals, on any version of numpy.

    Raises:
        InputError: tables that do not share their rows.

    Source: Owen (2007), the pigeonhole bootstrap; that it is studentized is our choice, because unstudentized it
    counts the interaction three times and few seeds too narrowly.
    """
    _check(sides, weights)
    n = n or tuple(len(x) for x in sides)
    plain = interval(sides, weights, coverage=coverage, n=n)
    method = f"seeds × rows, crossed bootstrap of {resamples:,} resamples, studentized: other seeds and other rows"
    if plain.low is None or plain.error is None:
        return plain
    rng = np.random.PCG64(seed)
    step = max(1, CELLS // len(weights))
    t = np.concatenate(
        [
            _studentized(sides, weights, plain.estimate, min(step, resamples - at), rng)
            for at in range(0, resamples, step)
        ]
    )
    place = min(int(np.ceil(coverage * (resamples + 1))), resamples)
    half = float(np.partition(t, place - 1)[place - 1]) * plain.error
    p = (1 + int((t >= abs(plain.estimate) / plain.error).sum())) / (resamples + 1)
    low, high = plain.estimate - half, plain.estimate + half
    return Estimate(plain.estimate, low, high, coverage, plain.error, plain.df, p, n, method, plain.notes)


def _studentized(
    sides: list[np.ndarray], weights: np.ndarray, centre: float, count: int, rng: np.random.PCG64
) -> np.ndarray:
    """|D* − D|/√V* of `count` resamples."""
    rows = len(weights)
    times = _counts(rng, count, rows, rows)  # (count, rows)
    w = times * weights
    w /= w.sum(axis=1, keepdims=True)
    squares = np.divide(w**2, times, out=np.zeros_like(w), where=times > 0)  # times · (weight of one copy)²
    more = rows / (rows - 1)
    d = np.zeros((count, rows))
    variance, cells = np.zeros(count), np.zeros(count)
    for sign, x in zip((1.0, -1.0), sides, strict=False):
        n = len(x)
        k = _counts(rng, count, n, n)
        means = w @ x.T  # (count, n)
        middle = k @ x / n  # (count, rows)
        d += sign * middle
        away = means - (k * means).sum(axis=1, keepdims=True) / n
        main = (k * away**2).sum(axis=1)
        variance += main / (n * (n - 1))
        within = ((k @ x**2 - n * middle**2) * squares).sum(axis=1)
        mixed = (k * away * (squares @ x.T - (squares * middle).sum(axis=1, keepdims=True))).sum(axis=1)
        cells += more * (within - 2 * mixed + main * squares.sum(axis=1)) / (n * (n - 1))
    found = (d * w).sum(axis=1)
    by_rows = more * (np.square(d - found[:, None]) * squares).sum(axis=1)
    total = variance + np.maximum(by_rows - cells, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(found - centre) / np.sqrt(total)
    return np.where(total > 0, t, np.where(np.abs(found - centre) > 0, np.inf, 0.0))


def _counts(rng: np.random.PCG64, count: int, drawn: int, of: int) -> np.ndarray:
    """How often each of `of` was drawn, in `count` resamples of `drawn`."""
    index = (rng.random_raw(count * drawn) % np.uint64(of)).astype(np.int64)
    index += np.repeat(np.arange(count) * of, drawn)
    return np.bincount(index, minlength=count * of).reshape(count, of).astype(np.float64)


def _check(sides: list[np.ndarray], weights: np.ndarray) -> None:
    for x in sides:
        if x.ndim != 2 or x.shape[1] != len(weights):
            raise InputError(f"a table (runs, rows) of {len(weights)} shared rows is asked for; found shape {x.shape}")
