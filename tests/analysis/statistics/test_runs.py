"""Tables of runs × rows: what they hold, and what is refused."""

import math

import numpy as np
import pytest

from toolkit.analysis.statistics.runs import Runs, outcomes
from toolkit.errors import InputError


def test_loss_is_the_ratio_of_sums():
    nll, tokens = np.array([[2.0, 9.0, 1.0], [4.0, 3.0, 5.0]]), [1, 3, 6]
    runs = Runs.of_losses(nll, tokens, ["0", "1"])
    assert runs.means == pytest.approx([12 / 10, 12 / 10]) and len(runs) == 2
    assert runs.values[0] == pytest.approx([2.0, 3.0, 1 / 6]) and runs.shares == pytest.approx([0.1, 0.3, 0.6])


def test_score_is_the_mean_and_integers_become_floats():
    runs = Runs.of_scores(np.array([[1, 0, 1, 1]]), [7])
    assert runs.means == pytest.approx([0.75]) and runs.values.dtype == np.float64 and runs.seeds == (7,)


@pytest.mark.parametrize(
    ("values", "weights", "seeds", "said"),
    [
        (np.zeros((2, 0)), [], [0, 1], r"found shape \(2, 0\)"),
        (np.zeros(3), [1, 1, 1], [0], r"found shape \(3,\)"),
        (np.zeros((1, 2)), [1], [0], "2 rows ask for as many weights"),
        (np.zeros((2, 2)), [1, 1], [0], "2 runs ask for as many seeds; found 1"),
        (np.zeros((3, 2)), [1, 1], [4, 5, 4], "seed 4 stands for 2 runs"),
        (np.array([[0.0, 1], [1, math.nan]]), [1, 1], [3, 8], "the run of seed 8, row 1: nan"),
        (np.zeros((1, 2)), [1, 0], [0], "row 1 weighs 0"),
        (np.zeros((1, 2)), [math.inf, 1], [0], "row 0 weighs inf"),
    ],
)
def test_what_is_refused(values, weights, seeds, said):
    with pytest.raises(InputError, match=said):
        Runs(values, np.array(weights, dtype=float), tuple(seeds))


def test_a_row_without_a_target_token_is_named():
    with pytest.raises(InputError, match="row 1 has 0 target tokens"):
        Runs.of_losses(np.ones((2, 3)), [1, 0, 2], [0, 1])
    with pytest.raises(InputError, match="do not fit"):
        Runs.of_losses(np.ones((2, 3)), [1, 2], [0, 1])


@pytest.mark.parametrize(
    ("values", "said"), [([], "at least one"), ([[1.0]], "in one row"), ([1, math.inf], "outcome 1")]
)
def test_outcomes_are_finite_and_in_one_row(values, said):
    with pytest.raises(InputError, match=f"the pairs: .*{said}"):
        outcomes(values, "the pairs")


def test_an_average_over_tasks_counts_each_task_alike():
    one = Runs.of_losses(np.array([[2.0, 2.0], [4.0, 4.0]]), [1, 3], ["0", "1"])
    two = Runs.of_scores(np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]), ["1", "0", "9"])
    both = Runs.average([one, two])
    assert both.seeds == ("0", "1") and both.strata.tolist() == [0, 0, 1, 1, 1, 1]
    assert both.means == pytest.approx([(1.0 + 0.5) / 2, (2.0 + 0.25) / 2])
    with pytest.raises(InputError, match="a seed that all 2 tasks have"):
        Runs.average([one, Runs.of_scores(np.ones((1, 2)), ["7"])])
    with pytest.raises(InputError, match="as many strata"):
        Runs(np.ones((1, 3)), np.ones(3), (0,), np.zeros(2))
