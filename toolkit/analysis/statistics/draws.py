"""An arm against matched random arms over a grid of draws × seeds: draw is a random effect."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.analysis.statistics import crossed, seeds
from toolkit.analysis.statistics.bootstrap import LEVEL
from toolkit.analysis.statistics.runs import Estimate
from toolkit.errors import InputError

THIS_DRAW = "this draw only"
"""Label of a matched arm whose one draw all runs share: its results hold for that draw."""

FEW = 4
"""Draws below which their spread is barely known."""


@dataclass(frozen=True)
class Grid:
    """Outcomes of a matched random arm, and the arm's difference to it.

    Attributes:
        draws, seeds: of the grid; cells: runs that it holds, draws × seeds where none is missing.
        draw, seed, rest: variances σ_d², σ_s², σ_e² (at least 0).
        mean: of the random arm, over other draws and other seeds.
        contrast: arm − random; None where no arm was given.
        notes: what must be said beside it.
    """

    draws: int
    seeds: int
    cells: int
    draw: float
    seed: float
    rest: float
    mean: Estimate
    contrast: Estimate | None
    notes: tuple[str, ...]


def grid(
    table: np.ndarray,
    arm: Sequence[float] | np.ndarray | None = None,
    *,
    paired: bool = False,
    coverage: float = LEVEL,
    names: Sequence[Hashable] | None = None,
    what: str = "the grid",
) -> Grid:
    """y_ds = μ + δ_d + σ_s + ε_ds: variance components, μ's interval, and arm − μ.

    Balanced: Var(μ̂) = σ_d²/D + σ_s²/S + σ_e²/DS, estimated by (MS_d + MS_s − MS_e)/DS, the part of the seeds at least
    0. Missing cells: components by the method of moments, μ̂ the mean of all cells, Var = σ_d²Σ(n_d/N)² +
    σ_s²Σ(n_s/N)² + σ_e²/N. Unpaired, the arm's s²/n is added; paired, the table is that of the differences
    arm_s − y_ds, whose seed effect is then that of the difference. df join the parts as `crossed.joint_df` does.

    Args:
        table: (draws, seeds) outcomes, NaN where a run is missing.
        arm: (seeds,) its outcomes, in the table's order where `paired`.
        paired: by seed, as declared.
        names: of the draws, for errors.

    Raises:
        InputError: fewer than two draws or seeds, an infinite outcome, a draw or seed without any run, or pairing with
            other numbers of seeds.

    Source: Searle, Casella and McCulloch (1992), ch. 5 (Henderson's method III).
    """
    y = np.asarray(table, dtype=np.float64)
    _check(y, names, what)
    present = ~np.isnan(y)
    own = None if arm is None else np.asarray(arm, dtype=np.float64)
    if own is not None and (own.ndim != 1 or not np.isfinite(own).all() or not len(own)):
        raise InputError(f"{what}: the arm's outcomes are finite and in one row; found {own.tolist()}")
    if paired and own is not None and len(own) != y.shape[1]:
        raise InputError(f"{what}: pairing by seed takes one run of the arm a seed; found {len(own)} for {y.shape[1]}")
    draws, count = y.shape
    notes = [f"{draws} draws: how draws spread is barely known"] if draws < FEW else []
    missing = int((~present).sum())
    if missing:
        notes.append(f"{missing} of {y.size} runs of the grid are missing: components by the method of moments")
    method = f"draw as a random effect, {draws} draws × {count} seeds: other draws and other seeds"
    parts = _components(y, present)
    mean = _mean(y, present, coverage, method, null=False)
    contrast = None
    if own is not None and paired:
        contrast = _mean(own - y, present, coverage, f"{method}, paired by seed", null=True)
    elif own is not None:
        square = seeds.variance(own) / len(own) if len(own) > 1 else None
        contrast = _apart(float(own.mean()) - mean.estimate, square, len(own), y, present, coverage, method)
    return Grid(draws, count, int(present.sum()), *parts, mean, contrast, tuple(notes))


def _components(y: np.ndarray, present: np.ndarray) -> tuple[float, float, float]:
    """σ_d², σ_s², σ_e², each at least 0: with N cells and the additive fit's rank k,

    SSE = (N − k)σ_e²; SSE(seeds alone) − SSE = (N − S)σ_d² + (k − S)σ_e²; the draws' likewise, on average.
    """
    draws, count = y.shape
    of_draw, of_seed = np.nonzero(present)
    x, total = y[present] - y[present].mean(), int(present.sum())
    by_draw, by_seed = np.eye(draws)[of_draw], np.eye(count)[of_seed]
    fitted, _, rank, _ = np.linalg.lstsq(both := np.hstack([by_draw, by_seed]), x, rcond=None)
    left = float(np.square(x - both @ fitted).sum())
    alone = []
    for group in (by_seed, by_draw):
        means = (group.T @ x) / group.sum(axis=0)
        alone.append(float(np.square(x - group @ means).sum()))
    rest = left / (total - rank)
    draw = (alone[0] - left - (rank - count) * rest) / (total - count)
    seed = (alone[1] - left - (rank - draws) * rest) / (total - draws)
    return max(draw, 0.0), max(seed, 0.0), rest


def _variance(
    y: np.ndarray, present: np.ndarray
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Of the mean of all cells: the draws' part, the seeds' part and (balanced) what both count, with their df."""
    draws, count = y.shape
    df = (draws - 1, count - 1, (draws - 1) * (count - 1))
    if present.all():
        found = crossed.parts([y], np.ones(count))
        return (found.seeds, df[0]), (found.rows, df[1]), (-found.cells, df[2])
    draw, seed, rest = _components(y, present)
    total = present.sum()
    # shared out as in the balanced case: both main parts hold the rest's, which is taken off once
    part = rest / total
    return (
        (draw * float(np.square(present.sum(axis=1) / total).sum()) + part, df[0]),
        (seed * float(np.square(present.sum(axis=0) / total).sum()) + part, df[1]),
        (-part, max(int(total) - draws - count + 1, 1)),
    )


def _mean(y: np.ndarray, present: np.ndarray, coverage: float, method: str, *, null: bool) -> Estimate:
    first, second, both = _variance(y, present)
    square = first[0] + max(second[0] + both[0], 0.0)
    df = crossed.joint_df(first, second, both, coverage=coverage)
    scale = float(np.abs(y[present]).max())
    return seeds.interval(float(y[present].mean()), square, df, coverage, y.shape, method, null=null, scale=scale)


def _apart(
    difference: float,
    square: float | None,
    runs: int,
    y: np.ndarray,
    present: np.ndarray,
    coverage: float,
    method: str,
) -> Estimate:
    """The arm's own runs beside the grid: their variances add."""
    if square is None:
        return seeds.interval(difference, None, 0, coverage, (runs, int(present.sum())), method)
    first, second, both = _variance(y, present)
    rest = max(second[0] + both[0], 0.0)
    own = (square + rest, seeds.satterthwaite((square, runs - 1), (rest, second[1])))
    df = crossed.joint_df(first, own, coverage=coverage)
    scale = float(np.abs(y[present]).max())
    return seeds.interval(difference, first[0] + own[0], df, coverage, (runs, int(present.sum())), method, scale=scale)


def _check(y: np.ndarray, names: Sequence[Hashable] | None, what: str) -> None:
    if y.ndim != 2 or min(y.shape) < 2:
        raise InputError(
            f"{what}: draw as a random effect needs two draws and two seeds at least; found shape {y.shape}. "
            f"Results of one draw are labelled {THIS_DRAW!r}"
        )
    if np.isinf(y).any():
        raise InputError(f"{what}: an outcome is infinite; only finite outcomes can be compared")
    empty = np.flatnonzero(np.isnan(y).all(axis=1))
    if len(empty):
        raise InputError(f"{what}: draw {names[int(empty[0])] if names else int(empty[0])} has no finished run")
    if np.isnan(y).all(axis=0).any():
        raise InputError(f"{what}: seed {int(np.flatnonzero(np.isnan(y).all(axis=0))[0])} has no finished run")
    present = int((~np.isnan(y)).sum())
    if present < sum(y.shape):
        raise InputError(f"{what}: {present} runs are too few for {y.shape[0]} draws × {y.shape[1]} seeds")
