"""Flips and McNemar's exact test: by hand, against scipy's binomial, and over seeds that share rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolkit.analysis.statistics.flips import binary, flips, mcnemar
from toolkit.analysis.statistics.runs import Runs
from toolkit.errors import InputError

answers = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


@given(answers)
def test_mcnemar_is_scipys_binomial_of_the_flips(pairs):
    a, b = (np.array(x, dtype=float) for x in zip(*pairs, strict=True))
    gained, lost = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    found = mcnemar(a, b)
    oracle = stats.binomtest(lost, gained + lost).pvalue if gained + lost else 1.0
    assert (found.gained, found.lost, found.agree) == (gained, lost, len(pairs) - gained - lost)
    assert found.p == pytest.approx(oracle) and found.attainable <= found.p + 1e-15
    swapped = mcnemar(b, a)
    assert (swapped.gained, swapped.lost, swapped.p) == (lost, gained, found.p)


def test_equal_accuracies_may_hide_many_flips():
    a, b = np.array([1.0] * 30 + [0] * 30 + [1] * 40), np.array([0.0] * 30 + [1] * 30 + [1] * 40)
    found = mcnemar(a, b, seed="3")
    assert (found.gained, found.lost, found.p, found.seed) == (30, 30, 1.0, "3") and a.mean() == b.mean()


def test_each_seed_with_its_own_and_the_row_as_unit():
    arm = Runs.of_scores(np.array([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 0]]), ["0", "1", "2"])
    base = Runs.of_scores(np.array([[0, 1, 0, 1], [0, 1, 1, 1]]), ["1", "0"])
    found = flips(arm, base)
    assert [(f.seed, f.gained, f.lost) for f in found.each] == [("0", 1, 2), ("1", 1, 1)]
    assert (found.gained, found.lost) == (1.0, 1.5)
    # shares right: arm (3, 2, 1, 1)/3, baseline (0, 2, 1, 2)/2: gained, lost, lost, lost
    assert (found.pooled.gained, found.pooled.lost, found.pooled.agree, found.pooled.seed) == (1, 3, 0, None)
    assert "not added up" in found.notes[0]


def test_shares_are_compared_without_rounding():
    """1 of 3 and 2 of 6 are equal though 1/3 is no float."""
    found = flips(
        Runs.of_scores(np.eye(3)[:, :1], [0, 1, 2]), Runs.of_scores(np.tile(np.eye(3)[:, :1], (2, 1)), range(6))
    )
    assert (found.pooled.agree, found.pooled.p) == (1, 1.0)


def test_adding_flips_of_copies_would_invent_evidence():
    """Four identical runs of 5 gained and 1 lost row: pooled by row, p is that of one run."""
    a, b = np.array([1.0] * 5 + [0] + [1] * 9), np.array([0.0] * 5 + [1] + [1] * 9)
    found = flips(Runs.of_scores(np.tile(a, (4, 1)), range(4)), Runs.of_scores(np.tile(b, (4, 1)), range(4)))
    assert found.pooled.p == mcnemar(a, b).p == pytest.approx(0.21875) and stats.binomtest(4, 24).pvalue < 0.002


def test_no_common_seed_leaves_the_pooled_rows():
    found = flips(Runs.of_scores(np.ones((2, 3)), [0, 1]), Runs.of_scores(np.zeros((2, 3)), [5, 6]))
    assert (found.each, found.gained) == ((), None) and found.pooled.gained == 3


def test_shares_have_no_flips():
    runs = Runs.of_scores(np.array([[0.5, 1.0]]), [0])
    assert not binary(runs) and binary(Runs.of_scores(np.array([[0, 1]]), [0]))
    with pytest.raises(InputError, match=r"scores of 0 or 1; found 0\.5"):
        flips(runs, runs)
    with pytest.raises(InputError, match="same rows; found 3 and 2"):
        flips(Runs.of_scores(np.ones((1, 3)), [0]), Runs.of_scores(np.ones((1, 2)), [0]))
    with pytest.raises(InputError, match="same rows"):
        mcnemar(np.ones(3), np.ones(2))
