"""Whether pairing by seed removed variance: identities, scipy's correlation, and what is said of few seeds."""

import numpy as np
import pytest
from scipy import stats

from toolkit.analysis.statistics.pairing import pairing
from toolkit.errors import InputError


def arms(shared, n=12, seed=0):
    rng = np.random.default_rng(seed)
    common = shared * rng.normal(size=n)
    return common + rng.normal(size=n), 0.5 + common + 1.5 * rng.normal(size=n)


@pytest.mark.parametrize("shared", [0.0, 1.0, 4.0])
def test_numbers_are_those_of_scipy_and_the_identity(shared):
    a, b = arms(shared)
    found, oracle = pairing(a, b), stats.pearsonr(a, b)
    limits = oracle.confidence_interval()
    assert found.correlation == pytest.approx(oracle.statistic) and found.p == pytest.approx(oracle.pvalue)
    assert (found.low, found.high) == pytest.approx((limits.low, limits.high))
    sa, sb = np.std(a, ddof=1), np.std(b, ddof=1)
    assert found.removed == pytest.approx(2 * oracle.statistic * sa * sb / (sa**2 + sb**2))
    assert found.paired == pytest.approx(np.var(a - b, ddof=1))


def test_a_shared_part_is_removed_and_said():
    assert pairing(*arms(4.0)).sentence.startswith("pairing by seed removed 8")
    assert "cannot be told from nothing (p = " in pairing(*arms(0.0)).sentence
    assert "added" in pairing([1.0, 2, 3, 4], [4.0, 3, 2, 1.5]).sentence


def test_few_seeds_say_little():
    found = pairing([1.0, 2.0, 3.0], [1.0, 2.1, 3.0])
    assert (found.low, found.high) == (None, None) and "over 3 seeds, too few" in found.sentence
    two = pairing([1.0, 2.0], [3.0, 5.0])
    assert (two.p, two.correlation) == (None, None)  # any two points lie on a line
    assert two.removed == pytest.approx(1 - 0.5 / (0.5 + 2))


def test_runs_that_do_not_vary():
    assert pairing([1.0] * 4, [2.0] * 4).sentence == "the runs do not vary: nothing to remove"
    found = pairing([1.0] * 4, [2.0, 3, 4, 6])
    assert found.correlation is None and found.removed == pytest.approx(0.0)


def test_identical_arms():
    found = pairing([1.0, 2, 4, 3], [1.0, 2, 4, 3])
    assert (found.removed, found.paired) == (1.0, 0.0) and found.p == pytest.approx(0, abs=1e-12)
    assert found.low > 0.99


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0]), ([1.0, 2.0], [1.0])])
def test_two_seeds_at_least_in_both(a, b):
    with pytest.raises(InputError, match="two seeds or more"):
        pairing(a, b)
