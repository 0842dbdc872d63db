"""The paper's own tests against scipy and the numbers it prints."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolkit.analysis.statistics.inference import binomial_p, sign_over_models
from toolkit.analysis.statistics.replica import LABEL, draw_count, sign_test
from toolkit.errors import InputError


@given(st.integers(0, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_binomial_equals_scipys(counts):
    better, total = counts
    oracle = stats.binomtest(better, total).pvalue if total else 1.0
    assert binomial_p(better, total) == pytest.approx(oracle, rel=1e-9)


@pytest.mark.parametrize("total", [20_001, 400_001, 1_000_000])
@pytest.mark.parametrize("deviations", [0, 2, 30])
def test_binomial_of_very_many_equals_scipys(total, deviations):
    """Above `EXACT` trials the largest term is a product of floating-point steps."""
    better = int(total / 2 - deviations * total**0.5 / 2)
    assert binomial_p(better, total) == pytest.approx(stats.binomtest(better, total).pvalue, rel=1e-9)


def test_the_papers_numbers():
    found = sign_test([-0.01] * 11 + [0.02] * 4)
    assert (found.better, found.total, f"{found.p:.2f}") == (11, 15, "0.12")  # AQLoRA 7.2: 11 of 15, p = .12
    assert draw_count(50, 150).p == pytest.approx(stats.binomtest(50, 150).pvalue)
    assert found.label == draw_count(50, 150).label == LABEL == "assumes independence"


def test_many_draws_are_counted_quickly_and_exactly():
    assert draw_count(14_000, 30_000).p == pytest.approx(stats.binomtest(14_000, 30_000).pvalue, rel=1e-6)
    assert draw_count(0, 30_000).p == 0.0 and draw_count(15_000, 30_000).p == 1.0


def test_zeros_drop_out_and_bad_gaps_are_refused():
    assert sign_test([0.0, -1.0, 1.0]).total == 2 and sign_test([0.0]).p == 1.0 and sign_test([]).total == 0
    with pytest.raises(InputError, match="finite gaps"):
        sign_test([math.nan])
    with pytest.raises(InputError, match="0 to 3 successes of 3; found 4"):
        draw_count(4, 3)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_the_unit_of_a_sign_test_is_the_model(gaps):
    found = sign_over_models({f"model-{i}": g for i, g in enumerate(gaps)})
    below, above = sum(g < 0 for g in gaps), sum(g > 0 for g in gaps)
    oracle = stats.binomtest(below, below + above).pvalue if below + above else 1.0
    assert (found.below, found.above, found.models) == (below, above, below + above)
    assert found.p == pytest.approx(oracle) and found.smallest_p <= found.p


def test_five_models_cannot_reach_five_percent():
    found = sign_over_models(dict.fromkeys("abcde", -0.1))
    assert found.p == found.smallest_p == 0.0625
    with pytest.raises(InputError, match="at least one model"):
        sign_over_models({})
    with pytest.raises(InputError, match="'b' is nan"):
        sign_over_models({"a": 1.0, "b": math.nan})
