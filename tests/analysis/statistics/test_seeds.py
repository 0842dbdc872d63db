"""Intervals over seeds against scipy, and their coverage against that of a percentile bootstrap."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolkit.analysis.statistics import seeds
from toolkit.errors import InputError

numbers = st.lists(st.floats(-100, 100).map(lambda x: round(x, 6)), min_size=2, max_size=12)


@given(numbers, numbers, st.sampled_from([0.8, 0.95, 0.99]))
def test_welch_equals_scipys(a, b, coverage):
    found = seeds.welch(a, b, coverage=coverage)
    if np.ptp(a) < 1e-6 and np.ptp(b) < 1e-6:
        assert found.low is None
        return
    oracle = stats.ttest_ind(a, b, equal_var=False)
    limits = oracle.confidence_interval(coverage)
    assert found.p == pytest.approx(oracle.pvalue, rel=1e-7, abs=1e-300)
    assert found.df == pytest.approx(oracle.df, rel=1e-7)
    assert (found.low, found.high) == pytest.approx((limits.low, limits.high), rel=1e-7, abs=1e-7)
    assert found.n == (len(a), len(b)) and found.estimate == pytest.approx(np.mean(a) - np.mean(b))


@given(numbers)
def test_paired_and_mean_equal_scipys(d):
    if np.ptp(d) < 1e-6:
        return
    found, oracle = seeds.paired(d), stats.ttest_1samp(d, 0.0)
    limits = oracle.confidence_interval(0.95)
    assert found.p == pytest.approx(oracle.pvalue, rel=1e-7, abs=1e-300) and found.df == len(d) - 1
    assert (found.low, found.high) == pytest.approx((limits.low, limits.high), rel=1e-7, abs=1e-7)
    one = seeds.mean(d)
    assert (one.low, one.high, one.p) == (found.low, found.high, None)


def test_paired_is_scipys_related_test():
    a, b = [1.0, 2.5, 2.0, 4.0], [0.5, 2.0, 2.2, 3.1]
    assert seeds.paired(np.subtract(a, b)).p == pytest.approx(stats.ttest_rel(a, b).pvalue)


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0]), ([1.0], [2.0, 3.0]), ([1.0, 2.0, 3.0], [2.0])])
def test_one_run_has_no_interval(a, b):
    found = seeds.welch(a, b)
    assert (found.low, found.high, found.p, found.error) == (None, None, None, None)
    assert found.notes == ("one run: no interval",) and found.estimate == np.mean(a) - np.mean(b)
    assert seeds.paired([0.3]).low is None and seeds.mean([0.3]).estimate == 0.3


def test_runs_that_do_not_vary_are_no_certainty():
    """Equal runs, as deterministic kernels give under one seed, would make t infinite and p zero."""
    for found in (
        seeds.welch([0.7] * 4, [0.6] * 4),
        seeds.paired([0.1] * 3),
        seeds.welch([0.1 + 0.2, 0.3], [0.3, 0.3]),
    ):
        assert (found.low, found.p, found.error) == (None, None, 0.0) and "equal to the last digit" in found.notes[0]
    assert seeds.welch([0.7] * 4, [0.6, 0.61, 0.62]).df == pytest.approx(2)  # only the second arm's spread is there


def test_limits_of_a_spread():
    """χ²: of four runs the sd is known within a factor of .57 to 3.7."""
    sd, low, high = seeds.spread([1.0, 2.0, 3.0, 4.0])
    assert sd == pytest.approx(np.std([1, 2, 3, 4], ddof=1))
    assert (low / sd, high / sd) == pytest.approx(
        (math.sqrt(3 / stats.chi2.ppf(0.975, 3)), math.sqrt(3 / stats.chi2.ppf(0.025, 3)))
    )
    assert f"{low / sd:.2f} {high / sd:.1f}" == "0.57 3.7" and seeds.spread([1.0]) is None


def test_bad_numbers_are_named():
    with pytest.raises(InputError, match="the arms: outcome 1 is nan"):
        seeds.welch([1, math.nan], [1, 2])
    with pytest.raises(InputError, match="lies between 0 and 1; found 95"):
        seeds.paired([1.0, 2.0], coverage=95)


def test_satterthwaite_of_equal_parts_adds_their_df():
    assert seeds.satterthwaite((2.0, 3), (2.0, 3)) == pytest.approx(6)
    assert seeds.satterthwaite((2.0, 3), (0.0, 9)) == pytest.approx(3) and seeds.satterthwaite((0.0, 3)) == math.inf


@pytest.mark.parametrize("runs", [3, 4, 6, 10])
def test_t_intervals_cover_and_the_percentile_bootstrap_does_not(simulation, runs):
    """5,000 studies: 93–97% at every number of seeds; a percentile bootstrap over four seeds covers 85%."""
    found = simulation.over_seeds(runs, 5000, common=0.0, boot=300)
    assert 0.93 <= found["welch"] <= 0.97 and 0.93 <= found["paired t"] <= 0.97
    bootstrap = found["percentile bootstrap, two arms"]
    assert found["percentile bootstrap, pairs"] < bootstrap < 0.93
    if runs == 4:
        assert bootstrap == pytest.approx(0.85, abs=0.02)


def test_what_seeds_share_is_seen_by_pairing_alone(simulation):
    found = simulation.over_seeds(4, 2000, common=1.0, boot=10)
    assert 0.93 <= found["paired t"] <= 0.97 < found["welch"]


def test_pairing_pays_only_where_seeds_add_alike(simulation):
    """Half-widths, medians of 800 studies of six seeds: narrower with a shared part, wider without one."""
    shared = simulation.over_seeds(6, 800, common=2.0, boot=10)["paired half-width / welch's"]
    alone = simulation.over_seeds(6, 800, common=0.0, boot=10)["paired half-width / welch's"]
    assert shared < 0.7 and 1.05 < alone < 1.3
