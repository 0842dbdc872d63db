"""The choice of each arm's own value."""

import math
from types import SimpleNamespace

import pytest

from toolkit.records.trained import Scores
from toolkit.runs.finetuning.tuning import choose


def trial(value, loss, score=0.5, arm="top", finished=True):
    scores = {"": Scores(rows=8, loss=loss, metric="accuracy", score=score)}
    return SimpleNamespace(task="sums", arm=arm, value=value, finished=finished, scores=scores if finished else {})


@pytest.fixture
def tuned(declared):
    return declared(tune={"values": [0.001, 0.01, 0.1]})


def test_the_lowest_loss_of_the_held_out_rows_is_chosen_for_each_arm(tuned):
    trials = [trial(0.001, 3), trial(0.01, 1), trial(0.1, 2), trial(0.001, 1, arm="qlora"), trial(0.01, 2, arm="qlora")]
    chosen, labels = choose(tuned, trials)
    assert chosen == {("sums", "top"): 0.01, ("sums", "qlora"): 0.001}
    assert list(labels) == [("sums", "qlora")] and "lower edge of the grid" in labels["sums", "qlora"]


def test_the_upper_edge_and_trials_that_ended_early_are_said(tuned):
    chosen, labels = choose(tuned, [trial(0.001, 3), trial(0.01, 2), trial(0.1, 1)])
    assert chosen["sums", "top"] == 0.1 and "upper edge" in labels["sums", "top"]
    chosen, labels = choose(tuned, [trial(0.001, 3), trial(0.01, 2), trial(0.1, 0, finished=False)])
    assert chosen["sums", "top"] == 0.01 and labels["sums", "top"] == "1 of 3 trials ended early"
    assert choose(tuned, [trial(0.1, 0, finished=False)]) == ({}, {})


def test_by_score_where_the_score_is_the_outcome_and_by_loss_between_equal_ones(declared):
    study = declared(tune={"values": [0.001, 0.01, 0.1]}, analysis={"baseline": "qlora", "outcome": "score"})
    trials = [trial(0.001, 1, 0.5), trial(0.01, 3, 0.75), trial(0.1, 2, 0.75)]
    assert choose(study, trials)[0] == {("sums", "top"): 0.1}
    unmeasured = [trial(0.1, math.nan, 0.75), trial(0.01, math.nan, 0.75), trial(0.001, math.nan, 0.5)]
    assert choose(study, unmeasured)[0] == choose(study, unmeasured[::-1])[0] == {("sums", "top"): 0.01}
