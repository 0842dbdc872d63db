"""Headroom by hand, and when a study cannot rank selectors."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

from toolkit.analysis.reading.evidence import Room
from toolkit.analysis.statistics import bootstrap
from toolkit.analysis.statistics.headroom import CANNOT_RANK, headroom
from toolkit.errors import InputError
from toolkit.records.study import Headroom

SETTINGS = Headroom(block=1)


def room(windows=16, draws=99, oracle=-0.05, anti=0.05, arm=-0.01, noise=0.002, seed=0):
    """Windows of 511 tokens around 3 nats a token; effects in nats a token against chance."""
    rng = np.random.default_rng(seed)
    tokens = np.full(windows, 511)
    level = tokens * (3 + 0.3 * rng.normal(size=windows))

    def at(effect):
        return level + tokens * (effect + noise * rng.normal(size=windows))

    mean = float(level.sum() / tokens.sum())
    return Room(tokens, level, at(arm), at(oracle), at(anti), mean + 0.01 * rng.normal(size=draws))


def test_every_number_by_hand():
    given = room()
    found = headroom(given, 0.05, SETTINGS)
    loss = {name: getattr(given, name).sum() / given.tokens.sum() for name in ("chance", "arm", "oracle", "anti")}
    assert found["losses"] == pytest.approx(loss, rel=1e-12)
    share = (loss["chance"] - loss["arm"]) / (loss["chance"] - loss["oracle"])
    assert found["headroom"] == pytest.approx(share, rel=1e-9)
    oracle = bootstrap.ratio(given.chance - given.arm, given.chance - given.oracle)
    assert (found["low"], found["high"]) == (oracle.low, oracle.high)
    assert found["low"] < share < found["high"]
    assert found["sd_over_sets"] == pytest.approx(np.std(given.draws, ddof=1))
    assert found["se_over_text"] == pytest.approx(stats.sem(given.arm - given.chance) / 511)
    assert found["separated"] and found["oracle_test"]["p"] == 0.01 and found["anti_test"]["separated"]
    assert found["sentence"].startswith("it goes 2") and "of the way from chance to the oracle" in found["sentence"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_chance_is_0_the_oracle_1_and_the_anti_oracle_below():
    given = room()
    for name, share in (("chance", 0.0), ("oracle", 1.0)):
        at = headroom(dataclasses.replace(given, arm=getattr(given, name)), 0.05, SETTINGS)
        assert (at["headroom"], at["low"], at["high"]) == pytest.approx((share, share, share), abs=1e-9)
    assert headroom(dataclasses.replace(given, arm=given.anti), 0.05, SETTINGS)["high"] < 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"oracle": -0.0001}, "the oracle's p among the draws is"),
        ({"draws": 10}, "its draws give no p below 0.0909"),
        ({"oracle": -0.06, "noise": 0.15, "seed": 2}, "over windows, the interval of the oracle's gain includes 0"),
        ({"windows": 3}, "3 windows are too few for an interval"),
        ({"oracle": 0.05}, "the oracle's p among the draws is 1"),
    ],
)
def test_a_study_whose_oracle_is_not_separated_cannot_rank(changes, reason):
    found = headroom(room(**changes), 0.05, SETTINGS)
    assert not found["separated"] and reason in found["reason"]
    assert CANNOT_RANK == "this study cannot rank selectors" and found["sentence"].startswith(CANNOT_RANK)


def test_the_anti_oracle_is_tested_on_the_other_side():
    found = headroom(room(anti=-0.05), 0.05, SETTINGS)
    assert found["separated"] and not found["anti_test"]["separated"] and found["anti_test"]["p"] == 1.0


def test_equal_seeds_give_equal_numbers_and_blocks_are_used():
    given = room(windows=32, noise=0.02)
    again = headroom(given, 0.05, SETTINGS)
    assert again == headroom(given, 0.05, SETTINGS)
    blocked = headroom(given, 0.05, Headroom(block=4))
    assert blocked["block"] == 4 and blocked["low"] != again["low"] and blocked["headroom"] == again["headroom"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": np.ones(3)}, "windows do not fit each other: tokens 16, chance 16, arm 3"),
        ({"oracle": np.full(16, np.nan)}, "oracle: number 0 is nan"),
        ({"draws": np.array([])}, "draws: there is none"),
    ],
)
def test_bad_rooms_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        headroom(dataclasses.replace(room(), **changes), 0.05, SETTINGS, "top at layers=0.1 on a")
