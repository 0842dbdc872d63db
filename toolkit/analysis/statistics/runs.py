"""Runs of one arm over shared evaluation rows, and what is said of two arms: plain data that other modules fill."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.errors import InputError

FEW = 4
"""Runs an arm below which the spread over seeds is not known."""

MANY = 10
"""Runs an arm from which a bootstrap over seeds is used; below, intervals are t-based."""

UNKNOWN = "fewer than four runs an arm: the spread is not known"


@dataclass(frozen=True, eq=False)
class Runs:
    """One arm's runs on one task: every run scored the same rows.

    Attributes:
        values: (runs, rows), the outcome of each row in each run.
        weights: (rows,), above zero; a run's outcome is Σ w_r·x_r/Σ w_r.
        seeds: what tells the runs apart, one a run; equal ones in two arms are a pair. No two may be equal.
        strata: (rows,) whole numbers: the task that a row is of, where the outcome is an average over tasks. Other rows
            are then other rows of the same tasks. None: one stratum.

    Raises:
        InputError: shapes that do not fit, no run or no row, a number that is not finite, a weight that is not above
            zero, or a seed given twice; it names the run and the row.
    """

    values: np.ndarray
    weights: np.ndarray
    seeds: tuple[Hashable, ...]
    strata: np.ndarray | None = None

    def __post_init__(self) -> None:
        values, weights = np.asarray(self.values, dtype=np.float64), np.asarray(self.weights, dtype=np.float64)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if values.ndim != 2 or not values.size:
            raise InputError(f"outcomes are a (runs, rows) table with at least one of each; found shape {values.shape}")
        if weights.shape != (values.shape[1],):
            raise InputError(f"{values.shape[1]} rows ask for as many weights; found shape {weights.shape}")
        if len(self.seeds) != len(values):
            raise InputError(f"{len(values)} runs ask for as many seeds; found {len(self.seeds)}")
        if self.strata is not None:
            object.__setattr__(self, "strata", np.unique(np.asarray(self.strata), return_inverse=True)[1])
            if self.strata.shape != weights.shape:
                raise InputError(f"{values.shape[1]} rows ask for as many strata; found shape {self.strata.shape}")
        for seed in self.seeds:
            if self.seeds.count(seed) > 1:
                raise InputError(f"seed {seed!r} stands for {self.seeds.count(seed)} runs of one arm; each has its own")
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            run, row = (int(i) for i in bad[0])
            raise InputError(
                f"the run of seed {self.seeds[run]!r}, row {row}: {values[run, row]}; only finite outcomes are compared"
            )
        light = np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))
        if len(light):
            raise InputError(f"row {int(light[0])} weighs {weights[light[0]]}; a weight is finite and above zero")

    @classmethod
    def of_losses(cls, nll: np.ndarray, tokens: Sequence[int] | np.ndarray, seeds: Sequence[Hashable]) -> Runs:
        """Summed nll (runs, rows), nats, over shared target tokens (rows,): a run's outcome is Σnll/Σtokens.

        All runs score the same targets, so the ratio is linear: rows nll_r/t_r, weighted by t_r.

        Raises:
            InputError: also where a row has no target token.
        """
        count = np.asarray(tokens, dtype=np.float64)
        none = np.flatnonzero(~(count > 0))
        if len(none):
            raise InputError(
                f"row {int(none[0])} has {count[none[0]]:g} target tokens; a loss a token needs at least one"
            )
        table = np.asarray(nll, dtype=np.float64)
        if table.ndim != 2 or count.shape != (table.shape[-1],):
            raise InputError(f"losses (runs, rows) and tokens (rows,) do not fit: {table.shape} and {count.shape}")
        return cls(table / count, count, tuple(seeds))

    @classmethod
    def of_scores(cls, scores: np.ndarray, seeds: Sequence[Hashable]) -> Runs:
        """Scores (runs, rows) in [0, 1], every row alike: a run's outcome is their mean."""
        table = np.asarray(scores, dtype=np.float64)
        return cls(table, np.ones(table.shape[-1] if table.ndim else 0), tuple(seeds))

    @classmethod
    def average(cls, parts: Sequence[Runs]) -> Runs:
        """Several tasks as one outcome, the plain average over tasks, of the seeds that all have; tasks are strata.

        Raises:
            InputError: no task, or no seed that all tasks have.
        """
        seeds = [s for s in parts[0].seeds if all(s in part.seeds for part in parts)] if parts else []
        if not seeds:
            raise InputError(f"an average over tasks needs a seed that all {len(parts)} tasks have")
        chosen = [part.values[[part.seeds.index(s) for s in seeds]] for part in parts]
        return cls(
            np.concatenate(chosen, axis=1),
            np.concatenate([part.shares for part in parts]),
            tuple(seeds),
            np.repeat(np.arange(len(parts)), [len(part.weights) for part in parts]),
        )

    @property
    def shares(self) -> np.ndarray:
        """Weights that sum to 1, (rows,)."""
        return self.weights / self.weights.sum()

    @property
    def means(self) -> np.ndarray:
        """Each run's outcome, (runs,)."""
        return self.values @ self.shares

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Estimate:
    """A difference, or a mean, with its interval.

    Attributes:
        low, high: None where the data do not bound it.
        coverage: that the interval is asked for, such as .95.
        error: standard error; df: its degrees of freedom (infinite: known, or resampled).
        p: two-sided, against zero; None where it is no difference, or cannot be had.
        n: runs of each side; one number where they are paired or there is one side.
        method: one sentence: how it was made and what it tells of.
        notes: what must be said beside it.
    """

    estimate: float
    low: float | None
    high: float | None
    coverage: float
    error: float | None
    df: float | None
    p: float | None
    n: tuple[int, ...]
    method: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests.

    Attributes:
        margin: declared before the first run; None: none was, and nothing is claimed.
        passed, p: against that margin; None without one, or where no interval can be had.
        smallest: the smallest margin at which it would pass; None where no interval can be had.
        alpha: of each of the two tests.
    """

    margin: float | None
    passed: bool | None
    p: float | None
    smallest: float | None
    alpha: float


@dataclass(frozen=True)
class Power:
    """What the observed spread over seeds allows, two-sided. A spread of few runs is itself a rough guess.

    Attributes:
        detectable: smallest true difference that this many runs find with probability `power` on these rows; None:
            the spread cannot be had.
        detectable_both: the same where rows vary as well.
        target: the difference that `seeds` is for: the declared margin, else the observed difference.
        seeds: runs an arm that find `target` on these rows; None: no number up to `most`, or no spread to go by.
        rows_limit: where rows vary as well, no number of seeds finds `target`: more rows are needed.
        most: the largest number looked at.
    """

    detectable: float | None
    detectable_both: float | None
    target: float
    seeds: int | None
    rows_limit: bool
    power: float
    alpha: float
    most: int


@dataclass(frozen=True)
class Pairing:
    """Whether pairing by seed removed variance.

    Attributes:
        pairs: seeds that both arms have.
        paired, unpaired: variance of a difference of two runs, of one seed and of two seeds.
        removed: 1 − paired/unpaired; below zero, pairing added variance.
        correlation: of the arms' outcomes over the seeds, None below 3 pairs; low, high: its interval (Fisher's z),
            None below 4.
        p: of no correlation, two-sided; None below 3 pairs or where an arm does not vary.
        sentence: what it says.
    """

    pairs: int
    paired: float | None
    unpaired: float | None
    removed: float | None
    correlation: float | None
    low: float | None
    high: float | None
    p: float | None
    sentence: str


@dataclass(frozen=True)
class Contrast:
    """First arm minus second, for one task and outcome.

    Attributes:
        first, second: means over the runs; first_sd, second_sd: over seeds (n − 1); None for one run.
        runs: of each arm, those compared; rows: shared.
        paired: by seed, as declared.
        seeds: over other seeds, these rows (Welch's or the paired t).
        rows_only: over other rows, these runs (bootstrap).
        both: over other seeds and other rows: the one to claim by.
        permutation_p: exact where all splits were enumerated; attainable: the smallest p that so few runs can give.
        spread_known: at least four runs an arm.
        pairing: None where the arms share fewer than two seeds.
        notes: what must be said beside the row.
    """

    first: float
    second: float
    first_sd: float | None
    second_sd: float | None
    runs: tuple[int, int]
    rows: int
    paired: bool
    seeds: Estimate
    rows_only: Estimate
    both: Estimate
    permutation_p: float
    attainable: float
    spread_known: bool
    equivalence: Equivalence
    power: Power
    pairing: Pairing | None
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> float:
        """First minus second, in the outcome's unit."""
        return self.both.estimate


def outcomes(values: Sequence[float] | np.ndarray, what: str = "the runs") -> np.ndarray:
    """One finite outcome a run, (runs,), as float64.

    Raises:
        InputError: no outcome, or one that is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise InputError(f"{what}: at least one outcome is asked for, in one row; found shape {array.shape}")
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise InputError(f"{what}: outcome {int(bad[0])} is {array[bad[0]]}; only finite outcomes can be compared")
    return array
