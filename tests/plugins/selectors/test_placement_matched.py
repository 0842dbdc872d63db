"""The control of which layers get an adapter: what is matched, and the lowest block."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
import scipy.stats

import toolkit as tk
from toolkit.interfaces import Law
from toolkit.registry import registry


def test_four_laws_are_standard():
    laws = [law for cls, _ in registry.of_kind("selector").values() if issubclass(cls, Law) for law in cls.standard()]
    assert sorted(law.key for law in laws) == [
        "random-matched",
        "random-matched(thirds=true,roles=true)",
        "random-permuted",
        "random-shuffle-matched",
    ]
    assert {law.key: law.holds for law in laws} == {
        "random-matched": (),
        "random-matched(thirds=true,roles=true)": ("roles", "thirds"),
        "random-permuted": ("roles", "sizes"),
        "random-shuffle-matched": (),
    }


def test_the_lowest_block_is_that_of_the_matched_selection(qwen_7b):
    like = tk.select("depth", qwen_7b, "layers=0.3")
    block = {layer.name: layer.block for layer in qwen_7b.layers}
    lowest = min(block[n] for n in like.layers)
    free = tk.draws("placement-matched", qwen_7b, like=like, count=30)
    assert {min(block[n] for n in s.layers) for s in free} != {lowest}
    held = tk.draws("placement-matched(lowest_block=true)", qwen_7b, like=like, count=30)
    assert {min(block[n] for n in s.layers) for s in held} == {lowest}
    assert held[0].feasible_subsets < free[0].feasible_subsets
    shares = dict(zip(qwen_7b.names, held[0].inclusion, strict=True))
    assert all(shares[n] == 0 for n in qwen_7b.names if block[n] < lowest)
    adapter = {layer.name: sum(layer.shape) for layer in qwen_7b.layers}
    target = sum(adapter[n] for n in like.layers)
    mean = sum(p * adapter[n] for n, p in shares.items())
    assert mean == pytest.approx(target, rel=1e-3)


def test_uniform_over_the_sets_that_begin_there(profile_of):
    profile = profile_of(3, {"a": (2, 3), "b": (3, 2)})
    like = tk.select("depth", profile, "layers=0.4")  # b of block 1 and both of block 2
    every = tk.draws("placement-matched(lowest_block=true)", profile, like=like, count=100)
    names = profile.names
    sets = {frozenset(c) for c in combinations(names[2:], 3) if set(c) & set(names[2:4]) and list(c) != like.layers}
    assert {frozenset(s.layers) for s in every} == sets and len(every) == every[0].feasible_subsets
    seen = Counter(
        frozenset(tk.select("placement-matched(lowest_block=true)", profile, like=like, seed=s).layers)
        for s in range(300)
    )
    assert scipy.stats.chisquare([seen[s] for s in sets]).pvalue > 1e-3


def test_layers_outside_the_blocks_are_above_them(profile_of):
    profile = profile_of(2, {"a": (2, 3), "b": (3, 2)})
    rows = [*profile.layers[:-1], profile.layers[-1].model_copy(update={"block": None})]
    profile = profile.model_copy(update={"layers": rows})
    like = tk.select("top-error", profile, "layers=0.25").model_copy(update={"layers": [profile.names[2]]})
    with pytest.raises(tk.InputError, match=r"under lowest_block.*leave out lowest_block"):
        tk.select("placement-matched(lowest_block=true)", profile, like=like)
    outside = like.model_copy(update={"layers": [profile.names[1], profile.names[3]]})
    found = tk.draws("placement-matched(lowest_block=true)", profile, like=outside, count=50)
    assert all(set(s.layers) & set(profile.names[:2]) for s in found)
    assert any(profile.names[3] in s.layers for s in found)


def test_its_key_and_constraints():
    law = tk.selector("placement-matched(lowest_block=true,roles=true)")
    assert law.holds == ("roles", "lowest_block") and not law.nests and law.match == "adapter-parameters"
    assert tk.selector("placement-matched").nests and tk.selector("placement-matched").standard() == []


@pytest.mark.parametrize("law", ["random-count", "depth-matched"])
def test_advice_names_options_that_the_law_has(tiny, law):
    with pytest.raises(tk.InputError, match=r"no other set holds 16 layers.*: match another selection") as error:
        tk.select(law, tiny, like=tk.select("all", tiny))
    assert "leave out" not in str(error.value) and "within=" not in str(error.value)
