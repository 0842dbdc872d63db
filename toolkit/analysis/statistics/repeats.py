"""A/A: runs under the very same seeds tell how much of the spread over seeds is run-to-run noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.analysis.statistics.distributions import chi2_quantile
from toolkit.analysis.statistics.runs import outcomes
from toolkit.analysis.statistics.small_tests import Ratio, variance_ratio
from toolkit.errors import InputError

FEWEST = 4
"""Same-seed runs that a trained study repeats; fewer are reported, with a note."""


@dataclass(frozen=True)
class Repeats:
    """Components of the spread of one arm.

    Attributes:
        repeats, seeds: runs under one set of seeds, and runs under different ones.
        noise: run-to-run variance σ_e²; noise_low, noise_high: its limits (χ²; None where there is no noise at all).
        total: variance over seeds, σ_s² + σ_e²; None for one seed.
        seed: σ_s², total − noise, at least 0; None without a total.
        share: noise/total, at most 1: of the spread over seeds, what is run-to-run noise.
        ratio: total/noise as a variance ratio; None where there is no total or no noise.
        sentence: what it says.
    """

    repeats: int
    seeds: int
    noise: float
    noise_low: float | None
    noise_high: float | None
    total: float | None
    seed: float | None
    share: float | None
    ratio: Ratio | None
    sentence: str
    notes: tuple[str, ...] = ()


def components(
    repeats: Sequence[float] | np.ndarray,
    seeds: Sequence[float] | np.ndarray,
    *,
    coverage: float = 0.95,
    what: str = "the A/A arm",
) -> Repeats:
    """σ̂_e² = s²(repeats), σ̂_s² = max(0, s²(seeds) − σ̂_e²), with F = s²(seeds)/s²(repeats), two-sided.

    A run of the repeated seeds may be in both: then leave it out of `seeds`, or F is not exact.

    Args:
        repeats: (runs,), outcomes under one set of seeds.
        seeds: (runs,), outcomes of the same arm under different seeds, one each; may be none.

    Raises:
        InputError: fewer than two repeats, or an outcome that is not finite.

    Source: AQLoRA §7.4: three runs at one seed spread by .24, six seeds by .25.
    """
    same = outcomes(repeats, what)
    other = outcomes(seeds, what) if len(seeds) else np.empty(0)
    if len(same) < 2:
        raise InputError(f"{what}: run-to-run noise needs two runs under the same seeds; found {len(same)}")
    noise, df, tail = float(same.var(ddof=1)), len(same) - 1, (1 - coverage) / 2
    if np.ptp(same) <= 1e-13 * float(np.abs(same).max()):
        noise = 0.0
    limits = (noise * df / chi2_quantile(1 - tail, df), noise * df / chi2_quantile(tail, df)) if noise else (None, None)
    notes = (f"fewer than {FEWEST} same-seed runs: the run-to-run noise is barely known",) * (len(same) < FEWEST)
    if len(other) < 2:
        sentence = f"run-to-run sd {math.sqrt(noise):.3g} over {len(same)} same-seed runs; {_few(len(other))}"
        return Repeats(len(same), len(other), noise, *limits, None, None, None, None, sentence, notes)
    total = float(other.var(ddof=1))
    ratio = variance_ratio(other, same, coverage=coverage, what=what) if noise else None
    share = min(noise / total, 1.0) if total else None
    return Repeats(
        len(same),
        len(other),
        noise,
        *limits,
        total,
        max(total - noise, 0.0),
        share,
        ratio,
        _sentence(len(same), len(other), noise, total, ratio, 1 - coverage),
        notes,
    )


def _few(other: int) -> str:
    return "seeds were not varied" if not other else "one run under other seeds has no spread to set beside it"


def _sentence(same: int, other: int, noise: float, total: float, ratio: Ratio | None, alpha: float) -> str:
    if not noise:
        return f"{same} runs under the same seeds agree to the last digit: the spread over {other} seeds is the seeds'"
    seen = f"sd {math.sqrt(noise):.3g} over {same} same-seed runs, {math.sqrt(total):.3g} over {other} seeds"
    assert ratio is not None and ratio.p is not None
    if ratio.p > alpha:
        return (
            f"{seen}: the seed's own part cannot be told from run-to-run noise (F = {ratio.f:.2g}, p = {ratio.p:.2f})"
        )
    more = "seeds add to" if total > noise else "seeds spread less than"
    return f"{seen}: {more} the run-to-run noise (F = {ratio.f:.2g}, p = {ratio.p:.2g})"
