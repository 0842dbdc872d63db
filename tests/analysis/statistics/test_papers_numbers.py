"""Our tests on the inputs that AQLoRA prints give the p-values that it prints."""

import math

import numpy as np
import pytest
from scipy import stats

from toolkit.analysis.statistics import repeats, seeds, small_tests
from toolkit.analysis.statistics.timing import speed

PHI = {"aqlora+rs": (75.49, 0.31), "rslora": (75.16, 0.37)}
"""AQLoRA §D, six seeds each; printed to two digits, so that a mean may be .005 off."""


def of_moments(mean, sd, n):
    """Values with exactly this mean and sd, so that a test on values can stand in for one on moments."""
    x = np.arange(n, dtype=float)
    return mean + sd * (x - x.mean()) / x.std(ddof=1)


def test_rs_composition_at_six_seeds():
    """§D: a margin of .32 with p = .14; the printed means differ by .33, their rounding by up to .01."""
    (a, sa), (b, sb) = PHI.values()
    values = seeds.welch(of_moments(a, sa, 6), of_moments(b, sb, 6))
    moments = seeds.from_moments(a, sa**2, 6, b, sb**2, 6)
    assert moments.p == pytest.approx(values.p, rel=1e-9)
    assert f"{seeds.from_moments(0.32, sa**2, 6, 0.0, sb**2, 6).p:.2f}" == "0.14"
    assert (
        seeds.from_moments(0.325, sa**2, 6, 0, sb**2, 6).p <= 0.14 <= seeds.from_moments(0.315, sa**2, 6, 0, sb**2, 6).p
    )


def test_rs_composition_at_three_seeds():
    """§D: .29 with p = .005, "both standard deviations near .06"."""
    assert seeds.from_moments(0.29, 0.055**2, 3, 0, 0.055**2, 3).p < 0.005
    assert f"{seeds.from_moments(0.29, 0.063**2, 3, 0, 0.063**2, 3).p:.3f}" == "0.005"
    assert seeds.from_moments(0.29, 0.065**2, 3, 0, 0.065**2, 3).p > 0.005


def test_variance_ratios():
    """§7.4: F = 71 on 2 and 2 df, two-sided p = .03; a fourth seed, F = 1.9, p = .60; six seeds, F = 1.2."""
    found = small_tests.ratio_of(71, 2, 2)
    assert found.p == pytest.approx(2 / 72) and f"{found.p:.2f}" == "0.03"  # on 2 and 2 df, P(F ≥ f) = 1/(1 + f)
    assert small_tests.ratio_of(1.95, 3, 3).p < 0.60 < small_tests.ratio_of(1.85, 3, 3).p
    assert small_tests.ratio_of(0.25**2 / 0.22**2, 5, 5).p > 0.7


def test_no_overlap_of_three_seeds_is_one_in_ten():
    """§7.4: 89.08 ± .19 and 88.80 ± .11, three seeds, no overlap: p cannot lie below .1, and Welch's is .11."""
    a, b = [88.97, 89.02, 89.25], [88.68, 88.81, 88.91]
    assert small_tests.two_sample(a, b).p == small_tests.attainable(3, 3) == pytest.approx(0.1)
    assert seeds.from_moments(89.08, 0.19**2, 3, 88.80, 0.11**2, 3).p == pytest.approx(0.108, abs=5e-4)


def test_settings_in_favour():
    """§7.2: 11 of 15, p = .12."""
    found = small_tests.sign([-1.0] * 11 + [1.0] * 4)
    assert (found.below, found.above, f"{found.p:.2f}") == (11, 4, "0.12")


def test_run_to_run_noise_is_as_wide_as_seeds():
    """§7.4: three runs at one seed spread by .24, six seeds by .25."""
    found = repeats.components(of_moments(74.8, 0.24, 3), of_moments(74.78, 0.25, 6))
    assert math.sqrt(found.noise) == pytest.approx(0.24) and found.seed == pytest.approx(0.25**2 - 0.24**2)
    assert found.ratio.f == pytest.approx((0.25 / 0.24) ** 2)
    assert found.ratio.p == pytest.approx(2 * stats.f.cdf((0.24 / 0.25) ** 2, 2, 5), abs=0.2) and found.ratio.p > 0.9
    assert "cannot be told from run-to-run noise" in found.sentence
    assert found.notes == ("fewer than 4 same-seed runs: the run-to-run noise is barely known",)


@pytest.mark.parametrize(("repeats", "fastest"), [(5, 3), (7, 4)])
def test_the_fastest_half_of_five_or_seven_is_three_or_four(repeats, fastest):
    """§4: "three or four runs rather than one lucky maximum"."""
    rounds = [10.0 + i for i in range(repeats)]
    assert speed(rounds).fastest_half == pytest.approx(np.mean(rounds[-fastest:]))
