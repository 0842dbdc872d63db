"""Above chance: scipy's exact binomial, and the cases that the papers ran into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolkit.analysis.statistics.chance import above_chance
from toolkit.errors import InputError


@given(
    st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.25, 0.5, 0.635])
)
def test_p_and_limits_are_scipys(counts, chance):
    right, rows = counts
    found, oracle = above_chance(right, rows, chance), stats.binomtest(right, rows, chance, alternative="greater")
    limits = stats.binomtest(right, rows).proportion_ci(0.90, method="exact")
    assert found.p == pytest.approx(oracle.pvalue, rel=1e-8, abs=1e-300)
    assert (found.low, found.high) == pytest.approx((limits.low, limits.high), abs=1e-9)
    assert found.above is (found.p <= 0.05)
    if abs(found.low - chance) > 1e-9:
        assert found.above is (found.low > chance)


@pytest.mark.parametrize(("rows", "chance"), [(104, 0.635), (277, 0.53), (20, 0.5), (3, 0.5), (872, 0.509)])
def test_needed_is_the_first_that_is_above(rows, chance):
    needed = above_chance(0, rows, chance).needed
    if needed is None:
        assert not above_chance(rows, rows, chance).above  # three of three at one half: p = .125
    else:
        assert above_chance(needed, rows, chance).above and not above_chance(needed - 1, rows, chance).above


def test_wsc_at_its_majority_class_is_not_above_chance():
    """PACT's bf16 arm scores .635 on WSC, the majority class of its 104 rows: above a coin, not above chance."""
    assert above_chance(66, 104, 0.5).above and not above_chance(66, 104, 0.635).above


def test_a_mean_over_runs_is_rounded_down_and_counts_rows_once():
    assert above_chance(60.99, 100, 0.5).right == 60 and above_chance(61 - 1e-12, 100, 0.5).right == 61


def test_the_edges():
    assert above_chance(5, 5, 1.0).p == 1.0 and above_chance(0, 5, 0.0).p == 1.0 and above_chance(1, 5, 0.0).above
    for right, rows, chance in ((6, 5, 0.5), (0, 0, 0.5), (-1, 5, 0.5), (1, 5, 1.5), (1, 5, float("nan"))):
        with pytest.raises(InputError):
            above_chance(right, rows, chance)
