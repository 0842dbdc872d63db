"""A contrast holds what its parts say, refuses what cannot be compared, and says what must be said."""

import numpy as np
import pytest
from scipy import stats

from toolkit.analysis.statistics import bootstrap, crossed, power
from toolkit.analysis.statistics.contrasts import ROWS, contrast
from toolkit.analysis.statistics.runs import UNKNOWN, Runs
from toolkit.errors import InputError


def arms(runs=(5, 5), rows=60, gap=-0.2, seed=0, names=None, spread=0.1, own=0.25):
    """Two arms of summed losses over shared tokens."""
    rng = np.random.default_rng(seed)
    tokens, base = rng.integers(1, 9, rows), rng.gamma(2.0, 0.5, rows)
    base = [base + own * rng.normal(size=rows), base]  # an arm's own effect on each row
    made = []
    for k, n in enumerate(runs):
        loss = base[k] + gap * (k == 0) + spread * rng.normal(size=(n, 1)) + 0.2 * rng.normal(size=(n, rows))
        made.append(Runs.of_losses(loss * tokens, tokens, names[k] if names else range(n)))
    return made


def test_the_loss_is_the_difference_of_ratios_of_sums():
    a, b = arms()
    found = contrast(a, b)
    sums = [(x.values * x.weights).sum(axis=1) / x.weights.sum() for x in (a, b)]
    assert found.difference == pytest.approx(sums[0].mean() - sums[1].mean())
    assert (found.first, found.second) == pytest.approx((sums[0].mean(), sums[1].mean()))
    assert (found.first_sd, found.second_sd) == pytest.approx([np.std(s, ddof=1) for s in sums])
    assert found.rows == 60 and found.runs == (5, 5) and found.spread_known and found.notes == ()


def test_intervals_are_welchs_the_rows_bootstrap_and_both():
    a, b = arms((5, 7))
    found = contrast(a, b, resamples=500, seed=3)
    oracle = stats.ttest_ind(a.means, b.means, equal_var=False)
    assert found.seeds.p == pytest.approx(oracle.pvalue)
    d = a.values.mean(axis=0) - b.values.mean(axis=0)
    rows = bootstrap.mean(d * a.weights, a.weights, resamples=500, seed=3)
    assert (found.rows_only.low, found.rows_only.high) == pytest.approx((rows.low, rows.high))
    assert found.both == crossed.interval([a.values, b.values], a.weights)
    assert found.both.error > found.seeds.error
    exact = stats.permutation_test(
        (a.means, b.means),
        lambda x, y, axis: np.abs(x.mean(axis) - y.mean(axis)),
        n_resamples=10**6,
        alternative="greater",
        vectorized=True,
    )
    assert found.permutation_p == pytest.approx(exact.pvalue) and found.attainable == pytest.approx(1 / 792)


def test_paired_uses_the_seeds_that_both_have_whatever_their_order():
    names = [(3, 1, 2, 0, 9), (0, 1, 2, 3, 7)]
    a, b = arms(names=names)
    found = contrast(a, b, paired=True)
    x = np.array([a.means[names[0].index(s)] - b.means[names[1].index(s)] for s in (0, 1, 2, 3)])
    assert found.seeds.p == pytest.approx(stats.ttest_1samp(x, 0).pvalue) and found.seeds.n == (4,)
    assert found.runs == (4, 4) and found.notes == ("runs without a partner left out: seeds 9, 7",)
    assert found.attainable == 1 / 8 and found.pairing.pairs == 4
    assert found.difference == pytest.approx(x.mean())


def test_ten_runs_are_resampled_crossed():
    a, b = arms((10, 11), rows=40)
    found = contrast(a, b, resamples=300)
    assert "crossed bootstrap of 300" in found.both.method
    assert found.both == crossed.resampled([a.values, b.values], a.weights, resamples=300)
    assert (
        "Welch" in found.seeds.method
        and "Welch" not in contrast(*arms((10, 10)), paired=True, resamples=200).seeds.method
    )


@pytest.mark.parametrize("runs", [(3, 8), (1, 1), (2, 2), (8, 1)])
def test_fewer_than_four_runs_are_said(runs):
    found = contrast(*arms(runs))
    assert not found.spread_known and UNKNOWN in found.notes
    if min(runs) == 1:
        assert (found.seeds.low, found.both.low, found.power.detectable, found.equivalence.smallest) == (None,) * 4
        assert found.rows_only.low is not None  # rows still vary


def test_equivalence_only_against_a_declared_margin():
    a, b = arms(gap=0.0, spread=0.01, own=0.0)
    assert contrast(a, b).equivalence.passed is None and contrast(a, b).equivalence.smallest > 0
    assert contrast(a, b, margin=1.0).equivalence.passed is True
    assert contrast(a, b, margin=1e-4).equivalence.passed is False


def test_power_is_of_the_observed_spread():
    a, b = arms()
    found = contrast(a, b)
    assert found.power.target == pytest.approx(abs(found.difference))
    assert found.power.seeds == power.needed(found.difference, found.first_sd, found.second_sd)
    assert found.power.detectable == pytest.approx(found.seeds.error * power.shift(found.seeds.df))
    assert found.power.detectable_both > found.power.detectable
    assert contrast(a, b, margin=0.05).power.target == 0.05
    sd = np.std(a.means - b.means, ddof=1)
    assert contrast(a, b, paired=True).power.seeds == power.needed_pairs(found.difference, sd)


def test_more_seeds_cannot_make_up_for_few_rows():
    rng = np.random.default_rng(2)
    rows = 20
    own = rng.normal(size=rows)  # the arm helps some rows and hurts others
    a = Runs.of_scores(own + 0.001 * rng.normal(size=(4, rows)) + 0.05 - own.mean(), range(4))
    b = Runs.of_scores(0.001 * rng.normal(size=(4, rows)), range(4))
    found = contrast(a, b)
    assert found.seeds.p < 1e-6 and found.both.p > 0.5 and found.power.rows_limit
    assert "more seeds would not find a difference of this size: more rows are needed" in found.notes
    assert not contrast(*arms(own=0.1)).power.rows_limit


def test_an_arm_with_itself_is_nothing():
    a, b = arms(gap=0.0)
    found = contrast(a, a)
    assert found.difference == 0 and found.permutation_p == 1.0 and found.seeds.p == pytest.approx(1.0)
    found = contrast(a, a, paired=True)
    assert found.seeds.p is None and "equal to the last digit" in found.seeds.notes[0]
    assert b is not a


def test_equal_runs_give_no_certainty():
    """Deterministic copies: no spread over seeds is no proof."""
    x = np.tile(np.random.default_rng(0).normal(size=30), (4, 1))
    found = contrast(Runs.of_scores(x + 1, range(4)), Runs.of_scores(x, range(4)))
    assert found.seeds.p is None and found.both.low is None and found.power.detectable is None


def test_many_rows_use_t_and_few_have_no_interval():
    many = contrast(*arms((4, 4), rows=ROWS + 1))
    assert "t over 4,001 rows" in many.rows_only.method
    few = contrast(*arms((4, 4), rows=3))
    assert few.rows_only.low is None and "too few" in few.rows_only.notes[0]
    one = contrast(*arms((4, 4), rows=1))
    assert one.rows_only.low is None and one.both.low is None and one.seeds.low is not None


def test_nothing_depends_on_the_order_of_rows_or_the_unit():
    a, b = arms((4, 5))
    order = np.random.default_rng(1).permutation(60)
    shuffled = contrast(*(Runs(x.values[:, order], x.weights[order], x.seeds) for x in (a, b)))
    scaled = contrast(*(Runs(1000 * x.values, 7 * x.weights, x.seeds) for x in (a, b)))
    plain = contrast(a, b)
    assert shuffled.both.low == pytest.approx(plain.both.low) and shuffled.seeds.p == pytest.approx(plain.seeds.p)
    assert scaled.both.low == pytest.approx(1000 * plain.both.low) and scaled.both.p == pytest.approx(plain.both.p)
    assert scaled.power.seeds == plain.power.seeds


def test_level_reaches_every_part():
    found = contrast(*arms(), coverage=0.99)
    assert found.seeds.coverage == found.both.coverage == found.rows_only.coverage == 0.99
    assert found.equivalence.alpha == found.power.alpha == 0.01


def test_arms_that_scored_other_rows_are_refused():
    a, b = arms()
    with pytest.raises(InputError, match="aqlora-q with qlora: 60 rows in the first arm and 59 in the second"):
        contrast(a, Runs(b.values[:, 1:], b.weights[1:], b.seeds), what="aqlora-q with qlora")
    weights = b.weights.copy()
    weights[4] += 1
    with pytest.raises(InputError, match=r"row 4 weighs .* did not score the same rows"):
        contrast(a, Runs(b.values, weights, b.seeds))


def test_pairing_without_a_common_seed_is_refused():
    a, b = arms(names=[range(5), range(5, 10)])
    with pytest.raises(InputError, match="no seed in common: 0, 1, 2, 3, 4 and 5, 6, 7, 8, 9"):
        contrast(a, b, paired=True)
    assert contrast(a, b).pairing is None


def test_an_average_over_tasks_is_a_contrast_within_tasks():
    a, b = arms(rows=40, seed=1)
    c, d = arms(rows=25, seed=2, gap=-3.0)
    found = contrast(Runs.average([a, c]), Runs.average([b, d]))
    alone = [contrast(a, b, resamples=None), contrast(c, d, resamples=None)]
    assert found.difference == pytest.approx((alone[0].difference + alone[1].difference) / 2)
    assert found.rows_only.error == pytest.approx(np.hypot(*(x.rows_only.error for x in alone)) / 2)
    assert "of the same tasks" in found.rows_only.method
    assert contrast(Runs.average([a, c]), Runs.average([b, d]), paired=True).both.low is not None
    with pytest.raises(InputError, match="belong to other tasks"):
        contrast(Runs.average([a, c]), Runs(np.hstack([b.values, d.values]), Runs.average([b, d]).weights, b.seeds))
