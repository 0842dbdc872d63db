"""Speeds, floors, margins, sessions: by hand, by scipy, and how often a floor passes in simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolkit.analysis.statistics.timing import Margin, across, floor, margin, paired_ratio, speed
from toolkit.errors import InputError


def margins(*values, verdict="faster"):
    return [Margin(v, 0.02, verdict) for v in values]


def test_estimators_by_hand():
    found = speed([5.0, 1.0, 4.0, 2.0, 10.0])
    assert (found.fastest_half, found.median, found.mean, found.best) == (pytest.approx(19 / 3), 4.0, 4.4, 10.0)
    assert speed([3.0]).fastest_half == 3.0 and speed([1.0, 3.0]).fastest_half == 3.0
    assert speed(range(1, 8)).fastest_half == 5.5 and speed(range(1, 8)).rounds == 7


def test_the_fastest_half_shrugs_off_the_slow_tail():
    """Three of seven rounds slowed by a quarter: the mean moves by 11%, the fastest half does not."""
    rounds = [100.0, 100.2, 99.8, 100.1, 75.0, 74.0, 76.0]
    assert speed(rounds).fastest_half == pytest.approx(100.025) and speed(rounds).mean < 90


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=2, max_size=8))
def test_paired_ratio_is_scipys_t_on_logarithms(pairs):
    a, b = np.array(pairs).T
    gaps = np.log(a) - np.log(b)
    found = paired_ratio(a, b)
    assert found.value == pytest.approx(stats.gmean(a) / stats.gmean(b)) and found.rounds == len(a)
    if np.std(gaps) > 1e-9:
        limits = stats.ttest_1samp(gaps, 0).confidence_interval()
        assert (found.low, found.high) == pytest.approx((math.exp(limits.low), math.exp(limits.high)))


def test_what_drifts_cancels_within_a_round():
    """The machine halves its speed during the session; the arm stays 10% faster in each round."""
    base = np.array([100.0, 90, 80, 65, 50])
    found = paired_ratio(1.1 * base, base)
    assert (found.value, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    doubled = paired_ratio(1.1 * base, [base, base * 1.21])
    assert doubled.value == pytest.approx(1.0)  # the geometric mean of both duplicates
    assert paired_ratio([2.0], [1.0]).low is None


def test_floor_by_hand():
    x = np.array([100.0, 101.0, 99.5])
    found = floor(x)
    assert found.bound == pytest.approx(math.expm1(stats.t.ppf(0.975, 2) * math.sqrt(2) * np.std(np.log(x), ddof=1)))
    assert found.single == pytest.approx(0.01) and found.largest == pytest.approx(101 / 99.5 - 1)
    assert found.kept is (found.bound < 0.03) is False and "kept out: not below 3%" in found.sentence
    assert "(one gap, as in the paper: 1.0%)" in found.sentence
    calm = floor([100.0, 100.1, 99.95, 100.02])
    assert calm.kept and calm.duplicates == 4 and "kept out" not in calm.sentence


def test_the_noisiest_arms_gap_is_a_lower_bound():
    calm = [100.0, 100.01, 99.99]
    assert floor(calm).kept and not floor(calm, [50.0, 52.0]).kept
    found = floor(calm, [50.0, 52.0])
    assert found.bound == found.noisiest == pytest.approx(0.04)
    assert floor(calm, [50.0, 50.001]).bound == floor(calm).bound


def test_a_further_gap_lies_below_the_floor_in_95_percent_of_sessions():
    rng = np.random.default_rng(0)
    for runs in (3, 5):
        x = np.exp(rng.normal(0, 0.01, (4000, runs + 2)))
        held = [abs(math.log(row[-1] / row[-2])) <= math.log1p(floor(row[:runs]).bound) for row in x]
        assert np.mean(held) == pytest.approx(0.95, abs=0.012)


def test_one_gap_passes_half_of_the_time_and_the_bound_does_not():
    """The gaps of a machine spread by 4.2%: the paper's floor is under 3% in half of the sessions."""
    rng = np.random.default_rng(1)
    found = [floor(row) for row in np.exp(rng.normal(0, 0.042 / math.sqrt(2), (4000, 3)))]
    assert np.mean([f.single < 0.03 for f in found]) == pytest.approx(0.52, abs=0.03)
    assert np.mean([f.kept for f in found]) < 0.05
    calm = [floor(row) for row in np.exp(rng.normal(0, 0.003 / math.sqrt(2), (1000, 3)))]
    assert np.mean([f.kept for f in calm]) > 0.97


def test_a_floor_at_the_limit_is_kept_out():
    """ "At or above": equality does not pass."""
    found = floor([100.0, 101.0, 99.0])
    assert floor([100.0, 101.0, 99.0], limit=found.bound).kept is False
    assert floor([100.0, 101.0, 99.0], limit=found.bound * 1.0001).kept is True
    assert floor([5.0, 5.0, 5.0]).bound == 0.0


@given(st.floats(0.5, 2.0), st.floats(0, 0.3))
def test_no_margin_below_its_floor_is_a_gain(ratio, bound):
    found = margin(ratio * 80.0, [80.0, 80.0, 80.0], bound)
    assert found.value == pytest.approx(ratio - 1, abs=1e-12)
    if found.value <= bound and found.value >= 0:
        assert found.verdict == "within the floor" or math.isclose(found.value, bound, rel_tol=1e-9)
    if found.value > bound * (1 + 1e-9) + 1e-12:
        assert found.verdict == "faster"
    back = margin(80.0, ratio * 80.0, bound)
    mirrored = {"faster": "slower", "slower": "faster", "within the floor": "within the floor"}
    assert back.verdict == mirrored[found.verdict] or math.isclose(
        abs(math.log(ratio)), math.log1p(bound), rel_tol=1e-9
    )


def test_a_margin_equal_to_its_floor_is_none():
    assert margin(1.03, 1.0, 0.03).verdict == "within the floor"
    assert margin(1.04, [0.5, 2.0], 0.03) == Margin(pytest.approx(0.04), 0.03, "faster")  # geometric mean 1


def test_two_and_three_sessions_are_a_range_four_a_t_interval():
    for values in ((0.05, 0.07), (0.05, 0.07, 0.11)):
        found = across(margins(*values), range(len(values)))
        assert (found.form, found.low, found.high) == ("range", min(values), max(values)) and found.verdict == "faster"
        assert found.independent and found.notes == ()
    values = [0.130, 0.129, 0.112, 0.118]
    found = across(margins(*values), "abcd")
    limits = stats.ttest_1samp(values, 0).confidence_interval()
    assert found.form == "t" and (found.low, found.high) == pytest.approx((limits.low, limits.high))
    assert found.sd == pytest.approx(np.std(values, ddof=1)) and found.verdict == "faster"


def test_sessions_of_one_allocation_are_marked():
    found = across(margins(0.1, 0.11, 0.12, 0.1), ["one", "one", "one", "two"])
    assert not found.independent and (found.sessions, found.allocations) == (4, 2)
    assert found.notes[0].startswith("not independent: 4 sessions of 2 allocations")
    single = across(margins(0.1, 0.12), ["x", "x"])
    assert "2 sessions of 1 allocation;" in single.notes[0]


def test_one_session_says_nothing_of_sessions():
    found = across(margins(0.1), ["a"])
    assert (found.form, found.low, found.sd) == ("one", None, None) and "is not known" in found.notes[0]


def test_a_gain_over_sessions_is_one_in_each():
    mixed = [*margins(0.08, 0.09), Margin(0.01, 0.02, "within the floor")]
    assert across(mixed, "abc").verdict == "within the floor"
    assert across(margins(-0.08, -0.09, verdict="slower"), "ab").verdict == "slower"
    wide = across(margins(0.03, 0.3, 0.04, 0.05), "abcd")  # each above its floor, the interval over sessions holds 0
    assert wide.low < 0 < wide.high and wide.verdict == "within the floor"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: speed([]), "at least one round"),
        (lambda: speed([1.0, 0.0]), "round 1 is 0.0; a speed is finite and above zero"),
        (lambda: speed([math.nan]), "round 0 is nan"),
        (lambda: paired_ratio([1.0, 2], [1.0]), "2 and 1 rounds cannot be paired"),
        (lambda: floor([1.0, 1.1]), "needs 3 runs of one configuration; found 2"),
        (lambda: margin(1.0, 1.0, math.nan), "a floor is finite"),
        (lambda: across([], []), "found 0, 0"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(InputError, match=said):
        call()
