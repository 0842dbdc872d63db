"""Two one-sided tests against scipy's one-sided t-tests, and the smallest margin by its own definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolkit.analysis.statistics import seeds
from toolkit.analysis.statistics.equivalence import equivalence
from toolkit.errors import InputError

runs = st.lists(st.integers(-50, 50).map(lambda x: x / 10), min_size=3, max_size=8).filter(lambda x: np.ptp(x) > 0)


@given(runs, runs, st.sampled_from([0.5, 1.0, 5.0, 40.0]))
def test_p_is_the_larger_of_two_one_sided_tests(a, b, margin):
    found = equivalence(seeds.welch(a, b), margin)
    low = stats.ttest_ind(np.add(a, margin), b, equal_var=False, alternative="greater").pvalue
    high = stats.ttest_ind(np.subtract(a, margin), b, equal_var=False, alternative="less").pvalue
    assert found.p == pytest.approx(max(low, high), rel=1e-6, abs=1e-12)
    assert found.passed is (found.p <= 0.05)


@given(runs, runs)
def test_the_smallest_margin_is_where_it_would_just_pass(a, b):
    found = equivalence(seeds.welch(a, b))
    assert (found.margin, found.passed, found.p) == (None, None, None)  # nothing declared, nothing claimed
    assert equivalence(seeds.welch(a, b), found.smallest * (1 + 1e-9)).passed is True
    assert equivalence(seeds.welch(a, b), found.smallest * (1 - 1e-6)).passed is False
    limits = seeds.welch(a, b, coverage=0.90)
    assert found.smallest == pytest.approx(max(abs(limits.low), abs(limits.high)))


def test_without_a_spread_nothing_is_claimed():
    for estimate in (seeds.welch([1.0], [1.0]), seeds.paired([0.0] * 4)):
        found = equivalence(estimate, 0.5)
        assert (found.margin, found.passed, found.p, found.smallest) == (0.5, None, None, None)


@pytest.mark.parametrize("margin", [0.0, -1.0, float("nan")])
def test_a_margin_lies_above_zero(margin):
    with pytest.raises(InputError, match="lies above zero"):
        equivalence(seeds.paired([1.0, 2.0]), margin)


def test_alpha_is_checked():
    with pytest.raises(InputError, match=r"between 0 and \.5; found 0\.95"):
        equivalence(seeds.paired([1.0, 2.0]), 1.0, alpha=0.95)
