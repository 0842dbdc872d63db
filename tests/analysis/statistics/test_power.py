"""Detectable effects and runs asked for: published tables, scipy's noncentral t, and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from toolkit.analysis.statistics import power, seeds
from toolkit.errors import InputError


@pytest.mark.parametrize(("effect", "runs"), [(0.2, 394), (0.5, 64), (0.8, 26), (1.0, 17), (1.2, 12)])
def test_runs_an_arm_are_those_of_cohens_tables(effect, runs):
    """Cohen (1988) table 2.4.1, two-sided .05, power .80: 393, 64, 26, 17, 12; G*Power gives 394 for d = .2."""
    assert power.needed(effect, 1.0, 1.0) == runs


@pytest.mark.parametrize(("effect", "pairs"), [(0.5, 34), (0.8, 15), (1.0, 10), (0.2, 199)])
def test_pairs_are_those_of_g_power(effect, pairs):
    assert power.needed_pairs(effect, 1.0) == pairs


def test_the_number_is_the_first_with_that_power():
    for sds in ((1.0, 1.0), (0.4, 1.3)):
        n = power.needed(0.7, *sds)
        for runs, enough in ((n, True), (n - 1, False)):
            v, u = sds[0] ** 2 / runs, sds[1] ** 2 / runs
            df = (v + u) ** 2 / ((v * v + u * u) / (runs - 1))
            t = stats.t.ppf(0.975, df)
            shift = 0.7 / math.sqrt(v + u)
            assert (stats.nct.sf(t, df, shift) + stats.nct.cdf(-t, df, shift) >= 0.8) is np.bool_(enough)


@pytest.mark.parametrize("runs", [3, 4, 8])
def test_the_detectable_difference_is_found_in_four_of_five_studies(runs):
    rng = np.random.default_rng(runs)
    df = 2 * runs - 2
    effect = power.detectable(math.sqrt(2 / runs), df)
    a, b = rng.normal(effect, 1, (20_000, runs)), rng.normal(0, 1, (20_000, runs))
    found = stats.ttest_ind(a, b, axis=1).pvalue <= 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("df", [1.0, 2.5, 6, 40, 1e4, math.inf])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_shift_has_that_power(df, alpha):
    shift = power.shift(df, alpha)
    t = stats.t.ppf(1 - alpha / 2, df)
    tail = stats.norm.sf(t - shift) + stats.norm.cdf(-t - shift) if df > 1e3 else stats.nct.sf(t, df, shift)
    assert tail == pytest.approx(0.8, abs=1e-3 if df > 1e3 else 2e-4)


def test_more_runs_detect_less_and_no_spread_asks_for_two():
    found = [power.detectable(seeds.welch([0, 1, 2] * n, [0, 1, 2] * n).error, 6 * n - 2) for n in (1, 2, 4)]
    assert found == sorted(found, reverse=True)
    assert power.needed(0.1, 0.0, 0.0) == 2 and power.needed(0.0, 1.0, 1.0) is None
    assert power.detectable(None, None) is None and power.detectable(0.0, 4) is None


def test_a_small_effect_asks_for_more_than_is_looked_at():
    assert power.needed(1e-4, 1.0, 1.0) is None
    assert power.needed(0.5, 1.0, 1.0, most=63) is None and power.needed(0.5, 1.0, 1.0, most=64) == 64


def test_what_is_refused():
    with pytest.raises(InputError, match="not below zero; found -1"):
        power.needed(1.0, -1.0, 1.0)
    with pytest.raises(InputError, match="alpha and power"):
        power.detectable(1.0, 3, alpha=5)
