"""Permutation, sign and variance-ratio tests against scipy and full enumeration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolkit.analysis.statistics import small_tests
from toolkit.errors import InputError

runs = st.lists(st.integers(-20, 20).map(lambda x: x / 8), min_size=1, max_size=5)


def gap(a, b, axis=-1):
    return np.abs(np.mean(a, axis=axis) - np.mean(b, axis=axis))


@given(runs, runs)
def test_two_sample_is_the_share_of_splits(a, b):
    """Values are eighths, so that ties are exact in the oracle's sums."""
    both, n, seen = a + b, len(a), gap(a, b)
    count = total = 0
    for chosen in itertools.combinations(range(len(both)), n):
        rest = [both[i] for i in range(len(both)) if i not in chosen]
        total += 1
        count += gap([both[i] for i in chosen], rest) >= seen - 1e-12
    found = small_tests.two_sample(a, b)
    assert found.p == count / total and (found.splits, found.exact) == (total, True)
    assert found.p >= found.attainable - 1e-15


def test_two_sample_equals_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=6), rng.normal(0.8, 1, 7)
    oracle = stats.permutation_test((a, b), gap, vectorized=True, alternative="greater", n_resamples=np.inf)
    assert small_tests.two_sample(a, b).p == pytest.approx(oracle.pvalue)


def test_many_runs_are_drawn_at_random():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=15), rng.normal(0.7, 1, 14)
    found = small_tests.two_sample(a, b, seed=3)
    assert (found.exact, found.splits, found.attainable) == (False, 19_999, 1 / 20_000)
    assert found.p == pytest.approx(stats.ttest_ind(a, b).pvalue, abs=0.02)
    assert found == small_tests.two_sample(a, b, seed=3)
    pairs = small_tests.paired(a[:14] - b, seed=1)
    assert pairs.exact and small_tests.paired(np.concatenate([a, b]), seed=1).exact is False


@given(runs)
def test_paired_is_the_share_of_signs(d):
    seen = abs(sum(d))
    count = sum(
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) >= seen - 1e-12
        for signs in itertools.product((1, -1), repeat=len(d))
    )
    assert small_tests.paired(d).p == count / 2 ** len(d)


@pytest.mark.parametrize(
    ("n", "m", "p"), [(3, 3, 0.1), (4, 4, 2 / 70), (3, 4, 1 / 35), (2, 2, 1 / 3), (1, 1, 1), (8, 8, 2 / 12870)]
)
def test_attainable_p_is_reached_by_runs_without_overlap(n, m, p):
    assert small_tests.attainable(n, m) == pytest.approx(p)
    a, b = np.arange(n) + 100.0, np.geomspace(0.1, 1, m)
    assert small_tests.two_sample(a, b).p == pytest.approx(p)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_attainable_p_of_pairs(n):
    assert small_tests.paired(np.arange(1.0, n + 1)).p == small_tests.attainable(n) == min(1.0, 2.0 ** (1 - n))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=40))
def test_sign_equals_scipys_binomial(d):
    below, above = sum(x < 0 for x in d), sum(x > 0 for x in d)
    oracle = stats.binomtest(below, below + above).pvalue if below + above else 1.0
    found = small_tests.sign(d)
    assert found.p == pytest.approx(oracle) and found.attainable <= found.p + 1e-15


def test_variance_ratio_against_scipys_f_and_its_interval():
    rng = np.random.default_rng(2)
    a, b = rng.normal(0, 2, 7), rng.normal(0, 1, 5)
    f = np.var(a, ddof=1) / np.var(b, ddof=1)
    found = small_tests.variance_ratio(a, b)
    assert found.p == pytest.approx(2 * min(stats.f.cdf(f, 6, 4), stats.f.sf(f, 6, 4))) and found.df == (6, 4)
    # the interval is the set of true ratios that the two-sided test does not reject
    for edge in (found.low, found.high):
        scaled = f / edge
        assert 2 * min(stats.f.cdf(scaled, 6, 4), stats.f.sf(scaled, 6, 4)) == pytest.approx(0.05)
    assert small_tests.variance_ratio(b, a).p == pytest.approx(found.p) and found.notes == ()


def test_variance_ratio_says_when_it_can_turn_on_one_run():
    found = small_tests.variance_ratio([1.0, 2, 3], [1.0, 1.1, 1.3])
    assert "can turn on one run" in found.notes[0]
    assert small_tests.variance_ratio([1.0, 2, 3, 5], [2.0] * 4).f is None
    with pytest.raises(InputError, match="two runs in each arm; found 1 and 3"):
        small_tests.variance_ratio([1.0], [1.0, 2, 3])


def test_what_is_refused():
    with pytest.raises(InputError, match="outcome 0 is nan"):
        small_tests.two_sample([math.nan], [1.0])
    with pytest.raises(InputError, match="a run in each arm; found 0 and 3"):
        small_tests.attainable(0, 3)
