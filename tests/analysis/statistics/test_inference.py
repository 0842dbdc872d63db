"""Ranks, quantiles and paired differences against scipy and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolkit.analysis.statistics import inference
from toolkit.errors import InputError

losses = st.floats(-50, 50).map(lambda v: round(v, 2))  # two decimals: ties happen


@given(losses, st.lists(losses, min_size=1, max_size=60), st.sampled_from(["less", "greater"]))
def test_p_equals_scipys_monte_carlo_test(value, draws, side):
    found = inference.rank(value, draws, side)
    oracle = stats.monte_carlo_test(
        np.array([value, value]),
        lambda size: np.repeat(np.array(draws)[:, None], 2, axis=1).reshape(size),
        lambda x, axis: x.mean(axis=axis),
        n_resamples=len(draws),
        alternative=side,
    )
    assert found.p == pytest.approx(oracle.pvalue, abs=1e-12)
    assert found.draws == len(draws) and found.smallest_p == 1 / (len(draws) + 1)


@given(losses, st.lists(losses, min_size=1, max_size=60))
def test_count_equals_scipys_percentile_with_ties_against_the_claim(value, draws):
    weak = stats.percentileofscore(draws, value, kind="weak") / 100 * len(draws)
    strict = stats.percentileofscore(draws, value, kind="strict") / 100 * len(draws)
    assert inference.rank(value, draws, "less").at_least_as_good == round(weak)
    assert inference.rank(value, draws, "greater").at_least_as_good == len(draws) - round(strict)


def test_ties_count_against_the_claim_on_both_sides():
    assert inference.rank(1.0, [1.0, 1.0, 2.0], "less").p == 3 / 4
    assert inference.rank(1.0, [1.0, 1.0, 0.0], "greater").p == 3 / 4
    assert inference.rank(1.0, [2.0] * 499, "less").p == 1 / 500
    assert inference.rank(3.0, [2.0] * 499, "less").p == 1.0


def test_p_is_valid_under_the_law():
    """P(p ≤ level) ≤ level when the arm itself is one draw more: counted over every place it can take."""
    for draws in (9, 19):
        ps = [inference.rank(at, [d for d in range(draws + 1) if d != at], "less").p for at in range(draws + 1)]
        for level in (0.05, 0.1, 0.2, 0.5):
            assert np.mean([p <= level for p in ps]) <= level + 1e-12


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused_by_name(bad):
    with pytest.raises(InputError, match=r"the draws of top on text 'a': number 1 is"):
        inference.rank(1.0, [1.0, bad], "less", "top on text 'a'")
    with pytest.raises(InputError, match=r"top on text 'a': number 0 is"):
        inference.rank(bad, [1.0], "less", "top on text 'a'")
    with pytest.raises(InputError, match="the losses"):
        inference.recovered(bad, 2.0, 1.0)


def test_no_draws_or_no_side():
    with pytest.raises(InputError, match="at least one number"):
        inference.rank(1.0, [], "less")
    with pytest.raises(InputError, match="'less' or 'greater'; found 'both'"):
        inference.rank(1.0, [1.0], "both")
    with pytest.raises(InputError, match="at least one draw; found 0"):
        inference.smallest_p(0)


def test_exact_only_where_the_law_holds_a_single_total():
    assert inference.exact(True) and not inference.exact(False) and not inference.exact(None)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40))
def test_quantiles_equal_scipys(draws):
    found = inference.spread(draws)
    oracle = stats.mstats.mquantiles(draws, [0, 0.05, 0.5, 0.95, 1], alphap=1, betap=1)  # R's type 7
    got = [found.smallest, found.low, found.median, found.high, found.largest]
    assert got == pytest.approx([float(v) for v in oracle], rel=1e-9, abs=1e-9)


def test_gap_to_the_median():
    assert inference.gap_to_median(2.5, [3.0, 2.0, 4.0]) == -0.5
    assert inference.gap_to_median(2.5, [3.0, 2.0]) == 0.0


def test_share_of_the_gap_recovered():
    assert inference.recovered(2.75, 3.0, 2.0) == 0.25
    assert inference.recovered(3.0, 3.0, 2.0) == 0.0 and inference.recovered(2.0, 3.0, 2.0) == 1.0
    assert inference.recovered(3.5, 3.0, 2.0) == -0.5 and inference.recovered(1.5, 3.0, 2.0) == 1.5
    assert inference.recovered(2.0, 2.0, 2.0) is None and inference.recovered(2.0, 1.0, 2.0) is None


@given(
    st.lists(st.tuples(st.floats(0, 900), st.floats(0, 900)), min_size=2, max_size=30),
    st.integers(1, 2000),
)
def test_paired_difference_of_equal_windows_equals_scipys(pairs, tokens):
    a, b = (np.array(column) for column in zip(*pairs, strict=True))
    found = inference.paired(a, b, [tokens] * len(a))
    assert found.difference == pytest.approx(np.mean(a - b) / tokens, abs=1e-9)
    assert found.standard_error == pytest.approx(stats.sem(a - b) / tokens, abs=1e-9)
    assert found.windows == len(a)


def test_paired_standard_error_equals_the_t_test_of_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1400, 20, 16), rng.normal(1395, 20, 16)
    found = inference.paired(a, b, [511] * 16)
    oracle = stats.ttest_rel(a, b)
    assert found.difference / found.standard_error == pytest.approx(oracle.statistic, rel=1e-12)


def test_unequal_windows_weigh_by_tokens():
    found = inference.paired([10.0, 30.0], [5.0, 15.0], [10, 30])
    assert found.difference == 0.5  # 20 nats over 40 tokens, not the mean of the windows' means
    assert found.standard_error == pytest.approx(0.0, abs=1e-15)  # every window differs by 0.5 a token
    other = inference.paired([10.0, 30.0], [0.0, 30.0], [10, 30])
    assert other.difference == 0.25
    assert other.standard_error == pytest.approx(math.sqrt(2 * (7.5**2 + 7.5**2)) / 40)


def test_paired_refusals():
    assert inference.paired([1.0], [2.0], [3]).standard_error is None
    with pytest.raises(InputError, match="1, 2 and 1 windows cannot be paired"):
        inference.paired([1.0], [1.0, 2.0], [3])
    with pytest.raises(InputError, match="window 1 has no scored tokens"):
        inference.paired([1.0, 1.0], [1.0, 2.0], [3, 0])
    with pytest.raises(InputError, match="number 0 is nan"):
        inference.paired([math.nan], [1.0], [3])
