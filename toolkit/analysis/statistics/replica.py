"""AQLoRA's own two tests, as a replica: both treat nested budgets of one model as independent, which they are not.

Simulated without any effect in the paper's design (5 models × 3 nested budgets × 10 draws, 4,000 studies), the sign
test over 15 settings rejects 11.2% of the time at a nominal 5%, and the count over 150 draws 47.6%; a test repeats
it. `toolkit.analysis.statistics.joint` is what to use: it rejects 5%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.analysis.statistics.inference import binomial_p
from toolkit.errors import InputError

LABEL = "assumes independence"


@dataclass(frozen=True)
class Replica:
    """One of the paper's tests.

    Attributes:
        better: settings, or draws, in favour.
        total: of how many.
        p: two-sided, exact binomial at 1/2.
        label: what must be said wherever p is.
    """

    better: int
    total: int
    p: float
    label: str = LABEL


def sign_test(gaps: Sequence[float] | np.ndarray) -> Replica:
    """Settings (model × budget) whose gap to the median draw is below zero, two-sided against 1/2; zeros drop out.

    AQLoRA §7.2: 11 of 15, p = .12, which is the two-sided binomial's .118. Assumes that settings are independent.

    Raises:
        InputError: a gap is not finite.
    """
    row = np.asarray(gaps, dtype=np.float64)
    if row.ndim != 1 or not np.isfinite(row).all():
        raise InputError(f"a sign test takes finite gaps in one row; found {row.tolist()}")
    better, total = int((row < 0).sum()), int((row != 0).sum())
    return Replica(better, total, binomial_p(better, total))


def draw_count(better: int, total: int) -> Replica:
    """Draws that beat the arm, of all draws over all settings, two-sided against 1/2.

    AQLoRA §7.2: 50 of 150 "where chance predicts 75"; the paper gives no p. Assumes that draws are independent
    though all draws of a setting are compared with one arm, and settings are nested.

    Raises:
        InputError: counts that do not fit.
    """
    return Replica(better, total, binomial_p(better, total))
