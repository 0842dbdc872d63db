"""The random selectors that match a count; `random-matched` is tested with its law."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import scipy.stats

import toolkit as tk


def test_count_is_uniform_over_subsets(profile_of):
    profile = profile_of(3, {"a": (2, 3), "b": (5, 2)})
    found = [tk.select("random-count", profile, "layers=0.5", seed=s) for s in range(800)]
    seen = Counter(tuple(s.layers) for s in found)
    assert len(seen) == math.comb(6, 3) and scipy.stats.chisquare(list(seen.values())).pvalue > 1e-3
    assert found[0].feasible_subsets == 20 and found[0].inclusion == [0.5] * 6 and found[0].mismatch is None


def test_count_of_another_selection_without_itself(profile_of):
    profile = profile_of(3, {"a": (2, 3), "b": (5, 2)})
    like = tk.select("top-error", profile, "layers=0.3")
    every = tk.draws("random-count", profile, like=like, count=100)
    assert len(every) == math.comb(6, 2) - 1 == every[0].feasible_subsets
    assert like.layers not in [s.layers for s in every] and {len(s.layers) for s in every} == {2}
    for selection in every:
        assert selection.mismatch == (selection.parameters - like.parameters) / like.parameters
        assert selection.single_total is None
    assert len({s.mismatch for s in every}) > 1  # the artifact


@pytest.mark.parametrize("rounding", ["ceil", "floor"])
def test_count_rounds_as_rankings_do(phi_1_5, rounding):
    assert len(tk.select("random-count", phi_1_5, "layers=0.7", rounding=rounding).layers) == 100 + (rounding == "ceil")


@pytest.mark.parametrize("budget", ["parameters=0.3", "bytes=300MB"])
def test_a_random_prefix_never_exceeds(qwen_7b, budget):
    limit = tk.Budget.parse(budget)
    for selection in tk.draws("random-count", qwen_7b, budget, count=10):
        assert getattr(selection, limit.unit) <= limit.of(getattr(qwen_7b, limit.unit), "floor")
        assert selection.feasible_subsets is None and selection.inclusion is None


def test_nothing_to_draw(phi_1_5):
    with pytest.raises(tk.InputError, match="selects nothing"):
        tk.select("random-count", phi_1_5, "layers=0.001", rounding="floor")


def test_depth_matched_keeps_the_thirds_and_nothing_else(qwen_7b):
    like = tk.select("depth", qwen_7b, "layers=0.5")
    third = {layer.name: 3 * layer.block // 28 for layer in qwen_7b.layers}
    target = Counter(third[n] for n in like.layers)
    assert set(target) == {1, 2}
    found = tk.draws("depth-matched", qwen_7b, like=like, count=30)
    assert all(Counter(third[n] for n in s.layers) == target for s in found)
    sizes = Counter(third.values())
    ways = math.prod(math.comb(sizes[t], target[t]) for t in range(3)) - 1
    assert found[0].feasible_subsets == ways
    for share, name in zip(found[0].inclusion, qwen_7b.names, strict=True):
        n, k = sizes[third[name]], target[third[name]]
        rest = math.prod(math.comb(sizes[t], target[t]) for t in range(3) if t != third[name])
        holding = math.comb(n - 1, k - 1) * rest if k else 0
        assert share == (holding - (name in like.layers)) / ways
    assert len({s.parameters for s in found}) > 1


def test_depth_matched_is_uniform(profile_of):
    profile = profile_of(3, {"a": (2, 3), "b": (5, 2), "c": (1, 2)})
    like = tk.select("depth", profile, "layers=0.55")  # two of block 1 and three of block 2
    seen = Counter(tuple(tk.select("depth-matched", profile, like=like, seed=s).layers) for s in range(200))
    assert len(seen) == 2 and tuple(like.layers) not in seen
    assert scipy.stats.binomtest(next(iter(seen.values())), 200).pvalue > 1e-3
