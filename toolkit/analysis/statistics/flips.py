"""Flips against the baseline: rows that an arm gained and lost, and McNemar's exact test."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from toolkit.analysis.statistics.inference import binomial_p
from toolkit.analysis.statistics.runs import Runs
from toolkit.errors import InputError


@dataclass(frozen=True)
class Flips:
    """One run against one run of the baseline, or all against all.

    Attributes:
        seed: of the two runs; None for the rows' majority over all runs.
        gained: rows that only the arm got right; lost: rows that only the baseline did.
        agree: all other rows.
        p: exact McNemar, two-sided; attainable: the smallest p that so many flips can give.
    """

    seed: Hashable | None
    gained: int
    lost: int
    agree: int
    p: float
    attainable: float


@dataclass(frozen=True)
class Flipped:
    """All runs of an arm against the baseline's.

    Attributes:
        each: one a seed that both arms have; rows are shared, so these are not independent and are not added up.
        pooled: each row once: gained where a larger share of the arm's runs got it right than of the baseline's.
        gained, lost: means over `each`; None where there is no common seed.
        notes: what must be said beside it.
    """

    each: tuple[Flips, ...]
    pooled: Flips
    gained: float | None
    lost: float | None
    notes: tuple[str, ...]


def mcnemar(arm: np.ndarray, baseline: np.ndarray, *, seed: Hashable | None = None) -> Flips:
    """p = min(1, 2·P(X ≤ min(gained, lost))), X binomial(gained + lost, ½), over rows paired by row.

    It tells of other rows, for these two runs; not of other seeds.

    Args:
        arm, baseline: (rows,), right or wrong.

    Raises:
        InputError: lengths that differ, no row, or a score that is neither 0 nor 1.

    Source: McNemar (1947), exact form.
    """
    a, b = _binary(arm), _binary(baseline)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise InputError(f"flips are counted over the same rows; found shapes {a.shape} and {b.shape}")
    return _counted(a - b, seed)


def flips(arm: Runs, baseline: Runs) -> Flipped:
    """Flips a seed, and pooled with the row as the unit: the sign of the difference of the shares of right runs.

    Adding flips of several seeds would count each shared row once a seed; with the row as unit, McNemar's exact test
    holds for these runs over other rows. Pooling by the sign of the shares is our choice.

    Raises:
        InputError: arms that scored other numbers of rows, or a score that is neither 0 nor 1.
    """
    a, b = _binary(arm.values), _binary(baseline.values)
    if a.shape[1] != b.shape[1]:
        raise InputError(f"flips are counted over the same rows; found {a.shape[1]} and {b.shape[1]}")
    common = [s for s in arm.seeds if s in baseline.seeds]
    each = tuple(_counted(a[arm.seeds.index(s)] - b[baseline.seeds.index(s)], s) for s in common)
    gap = a.sum(axis=0) * len(b) - b.sum(axis=0) * len(a)  # whole numbers: shares compared without rounding
    notes = ("flips of several seeds share their rows: they are not added up",) if len(each) > 1 else ()
    return Flipped(
        each,
        _counted(np.sign(gap), None),
        float(np.mean([f.gained for f in each])) if each else None,
        float(np.mean([f.lost for f in each])) if each else None,
        notes,
    )


def binary(runs: Runs) -> bool:
    """Whether every score is 0 or 1, so that flips can be counted."""
    return bool(np.isin(runs.values, (0.0, 1.0)).all())


def _counted(signs: np.ndarray, seed: Hashable | None) -> Flips:
    gained, lost = int((signs > 0).sum()), int((signs < 0).sum())
    return Flips(
        seed,
        gained,
        lost,
        len(signs) - gained - lost,
        binomial_p(lost, gained + lost),
        min(1.0, 2.0 ** (1 - gained - lost)),
    )


def _binary(values: np.ndarray) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    odd = array[~np.isin(array, (0.0, 1.0))]
    if odd.size:
        raise InputError(f"flips need scores of 0 or 1; found {odd[0]:g}: a share such as F1 has no flips")
    return array
