"""Corrections against their definitions, closed testing, and simulation of the family's error."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from toolkit.analysis.statistics import inference
from toolkit.analysis.statistics.multiplicity import holm, max_t
from toolkit.errors import InputError
from toolkit.records.study import Analysis


def closed_testing(ps):
    """Holm as what it is: the closed test of Bonferroni's; a hypothesis' p is the largest of all sets that hold it."""
    m = len(ps)
    found = [Fraction(0)] * m
    for size in range(1, m + 1):
        for chosen in itertools.combinations(range(m), size):
            p = min(Fraction(1), size * min(Fraction(ps[i]) for i in chosen))
            for i in chosen:
                found[i] = max(found[i], p)
    return [float(p) for p in found]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holm_is_the_closed_bonferroni_test(ps):
    assert holm(ps) == pytest.approx(closed_testing(ps), rel=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.randoms())
def test_holm_keeps_order_and_bounds_in_any_order(ps, random):
    adjusted = holm(ps)
    assert (adjusted >= np.array(ps)).all() and (adjusted <= np.minimum(1, len(ps) * np.array(ps).max() + 1e-12)).all()
    order = random.sample(range(len(ps)), len(ps))
    assert holm([ps[i] for i in order]) == pytest.approx(adjusted[order])
    by_p = np.argsort(ps, kind="stable")
    assert (np.diff(adjusted[by_p]) >= 0).all()


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # R: p.adjust(p, "holm")
    assert holm([]).tolist() == [] and holm([0.3]).tolist() == [0.3]
    with pytest.raises(InputError, match="lie in"):
        holm([0.5, 1.5])
    with pytest.raises(InputError, match="lie in"):
        holm([0.5, float("nan")])


def closed_max_t(table, side):
    """Max-t as the closed test of all intersections, column 0 the arms'; larger is better after the sign."""
    sign = -1 if side == "less" else 1
    sd = table.std(axis=1, keepdims=True)
    z = sign * np.divide(table - table.mean(axis=1, keepdims=True), sd, out=np.zeros_like(table), where=sd > 1e-12)
    m, found = len(z), np.zeros(len(z))
    for size in range(1, m + 1):
        for chosen in itertools.combinations(range(m), size):
            best = z[list(chosen)].max(axis=0)
            p = (best >= best[0] - 1e-7).mean()
            for i in chosen:
                found[i] = max(found[i], p)
    return found


@given(
    hnp.arrays(float, st.tuples(st.integers(1, 5), st.integers(2, 15)), elements=st.integers(-9, 9)),
    st.sampled_from(["less", "greater"]),
)
def test_step_down_max_t_is_the_closed_test(table, side):
    assert max_t(table[:, 0], table[:, 1:], side) == pytest.approx(closed_max_t(table, side))


@given(st.floats(-9, 9), st.lists(st.floats(-9, 9), min_size=1, max_size=30), st.sampled_from(["less", "greater"]))
def test_one_test_needs_no_correction(value, draws, side):
    value, draws = round(value, 2), [round(d, 2) for d in draws]
    assert max_t([value], [draws], side) == pytest.approx([inference.rank(value, draws, side).p])


def test_a_copy_of_a_test_costs_nothing():
    rng = np.random.default_rng(0)
    draws = rng.normal(size=99)
    alone = max_t([-2.0], [draws], "less")[0]
    twice = max_t([-2.0, -2.0], [draws, draws], "less")
    scaled = max_t([-2.0, -200.0], [draws, 100 * draws], "less")  # another unit is no other test
    assert twice.tolist() == [alone, alone] and scaled.tolist() == [alone, alone]


@pytest.mark.parametrize(
    ("values", "draws", "side", "message"),
    [
        ([1.0], [[1.0], [2.0]], "less", "one value a test"),
        ([1.0], [[]], "less", "one value a test"),
        ([np.nan], [[1.0]], "less", "not finite"),
        ([1.0], [[1.0]], "up", "'less' or 'greater'"),
    ],
)
def test_max_t_refuses_what_does_not_fit(values, draws, side, message):
    with pytest.raises(InputError, match=message):
        max_t(values, draws, side)


def test_reachable_level_is_reached_and_not_passed():
    def reachable(tests, draws, correction):
        return Analysis(control="any", correction=correction).reachable(tests, draws)

    for tests, draws in ((1, 19), (4, 99), (30, 499), (12, 10)):
        best = [inference.smallest_p(draws)] * tests
        assert reachable(tests, draws, "holm") == pytest.approx(holm(best).min())
        table = np.column_stack([np.zeros(tests), np.arange(1.0, draws + 1)[None].repeat(tests, axis=0)])
        assert reachable(tests, draws, "max-t") == pytest.approx(max_t(table[:, 0], table[:, 1:], "less").min())
        assert reachable(tests, draws, "none") == best[0]
    assert reachable(30, 10, "holm") == 1.0


def selectors(rng, trials, shift=0.0, layers=60, held=12, draws=399):
    """Eight near-duplicate selectors and one other, under one permutation of the layers a draw: (trials, 9, 1 + n).

    Each near-duplicate exchanges one layer of the first `held`; `shift` is the gain of each of those.
    """
    sets = np.zeros((9, layers))
    for row in range(8):
        sets[row, :held] = 1
        sets[row, [row, held + row]] = 0, 1
    sets[8, -held:] = 1
    tables = np.empty((trials, 9, draws + 1))
    for trial in range(trials):
        gains = rng.normal(size=layers)
        gains[:held] += shift
        orders = rng.permuted(np.tile(np.arange(layers), (draws + 1, 1)), axis=1)
        orders[0] = np.arange(layers)
        tables[trial] = -sets @ gains[orders].T
    return tables


@pytest.mark.slow
def test_max_t_keeps_the_familys_level_and_beats_holm_for_near_duplicates(capsys):
    """The family's error is the level with max-t and less with Holm, which pays for every copy with power."""
    rng = np.random.default_rng(3)
    shown = {}
    for name, trials, shift in (("null", 1000, 0.0), ("real", 400, 0.7)):
        rejected = np.zeros(2)
        for table in selectors(rng, trials, shift):
            by_max = max_t(table[:, 0], table[:, 1:], "less")
            by_holm = holm([inference.rank(row[0], row[1:], "less").p for row in table])
            rows = slice(None) if name == "null" else slice(0, 8)
            rejected += [p[rows].min() <= 0.05 + 1e-12 for p in (by_max, by_holm)]
        shown[name] = rejected / trials
    with capsys.disabled():
        print(f"\n  any rejection at 5%, max-t and Holm: null {shown['null']}, with an effect {shown['real']}")
    assert abs(shown["null"][0] - 0.05) < 3 * np.sqrt(0.05 * 0.95 / 1000)
    assert shown["null"][1] < 0.05
    assert shown["real"][0] > shown["real"][1] + 0.05


def test_max_t_keeps_the_level_among_true_nulls_beside_a_real_effect():
    """Strong control: the arm that is truly better does not make the null ones rejected too often."""
    rng = np.random.default_rng(4)
    trials, draws = 500, 19
    hits = 0
    for _ in range(trials):
        table = rng.normal(size=(3, draws + 1)) + rng.normal(size=draws + 1)
        table[0, 0] -= 20
        hits += (max_t(table[:, 0], table[:, 1:], "less")[1:] <= 0.05 + 1e-12).any()
    assert hits / trials <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / trials)
