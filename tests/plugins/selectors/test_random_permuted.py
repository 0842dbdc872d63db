"""Scores shuffled among layers of one class: against full enumeration, and what one permutation keeps together."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random

import pytest
import scipy.stats

import toolkit as tk
from toolkit.interfaces import RankingSelector


def by_hand(profile, indexes):
    return tk.Selection(
        selector="by-hand",
        model=profile.model,
        fingerprint=profile.fingerprint,
        layers=[profile.names[i] for i in sorted(indexes)],
        parameters=sum(profile.layers[i].parameters for i in indexes),
        bytes=sum(profile.layers[i].bytes for i in indexes),
        of={},
    )


@pytest.mark.parametrize(
    ("key", "classes"),
    [
        ("random-permuted", [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),  # a and b are of one size and two roles
        ("random-permuted(among=size)", [[0, 1, 3, 4, 6, 7], [2, 5, 8]]),
    ],
)
def test_every_set_of_the_classes_is_as_likely(profile_of, key, classes):
    profile = profile_of(3, {"a": (2, 3), "b": (3, 2), "c": (5, 2)})
    like = by_hand(profile, [0, 3, 4, 8])
    ways = [itertools.combinations(items, len({0, 3, 4, 8} & set(items))) for items in classes]
    expected = {frozenset(itertools.chain(*parts)) for parts in itertools.product(*ways)}
    found = tk.draws(key, profile, like=like, count=25 * len(expected))
    assert found[0].feasible_subsets == len(expected) and found[0].single_total and found[0].mismatch == 0
    place = {name: i for i, name in enumerate(profile.names)}
    seen = Counter(frozenset(place[n] for n in s.layers) for s in found)
    assert set(seen) == expected  # M itself too
    assert scipy.stats.chisquare(list(seen.values())).pvalue > 1e-3
    share = [sum(i in s for s in expected) / len(expected) for i in range(9)]
    assert found[0].inclusion == pytest.approx(share, rel=1e-15)


def test_a_role_of_two_sizes_is_two_classes(profile_of):
    profile = profile_of(4, [{"q": (2, 3 + block % 2)} for block in range(4)])
    like = by_hand(profile, [0])
    assert {tuple(s.layers) for s in tk.draws("random-permuted", profile, like=like, count=60)} == {
        (profile.names[0],),
        (profile.names[2],),
    }


def test_it_is_the_ranking_with_its_scores_shuffled(tiny):
    """The layers' scores, moved by one permutation within roles: top-K of them is the draw."""

    class Shuffled(RankingSelector):
        name = "test-shuffled"

        def __init__(self, scores):
            self.scores, self.rounding = scores, "ceil"

        def score(self, profile):
            return self.scores

    like = tk.select("top-error", tiny, "layers=0.4")
    errors = tiny.errors("nf4")
    for draw in tk.draws("random-permuted", tiny, like=like, count=20):
        scores = [0.0] * len(tiny)
        for role in {layer.role for layer in tiny.layers}:
            layers = [i for i, layer in enumerate(tiny.layers) if layer.role == role]
            ranked = sorted(layers, key=lambda i: -errors[i])
            target = sorted(layers, key=lambda i: (tiny.names[i] not in draw.layers, i))
            for source, to in zip(ranked, target, strict=True):
                scores[to] = errors[source]
        assert tk.select(Shuffled(scores), tiny, "layers=0.4").layers == draw.layers


@pytest.mark.parametrize("seed", range(25))
def test_one_permutation_moves_all_selections(profile_of, seed):
    profile = profile_of(3, {"a": (2, 3), "b": (3, 2), "c": (4, 1)})
    rng = Random(seed)
    sets = [set(rng.sample(range(9), rng.randint(1, 8))) for _ in range(3)]
    sets.append(sets[0] | sets[1])
    likes = [by_hand(profile, s) for s in sets]
    if any(s == {i for i in range(9) if {i % 3, i % 3 + 3, i % 3 + 6} <= s} for s in sets):
        with pytest.raises(tk.InputError, match="all layers or none"):
            tk.chains("random-permuted", profile, likes=likes, count=6)
        return
    families = tk.chains("random-permuted", profile, likes=likes, count=6, seed=seed)
    for at, like in enumerate(likes):  # draw i is the same by itself and with others, in whatever order
        alone = tk.draws("random-permuted", profile, like=like, count=6, seed=seed)
        assert [family[at].layers for family in families] == [s.layers for s in alone]
        assert [s.draw for s in alone] == list(range(6))
    for family in families:  # intersections and inclusions are kept
        drawn = [set(s.layers) for s in family]
        for a, b in itertools.combinations(range(len(sets)), 2):
            assert len(drawn[a] & drawn[b]) == len(sets[a] & sets[b])
            assert (drawn[a] <= drawn[b]) == (sets[a] <= sets[b])


def test_the_joint_law_of_families_is_uniform_over_permutations(profile_of):
    profile = profile_of(4, {"a": (2, 3)})
    likes = [by_hand(profile, [0]), by_hand(profile, [0, 2])]
    seen = Counter(
        tuple(tuple(s.layers) for s in family)
        for family in tk.chains("random-permuted", profile, likes=likes, count=600)
    )
    assert len(seen) == 12 and scipy.stats.chisquare(list(seen.values())).pvalue > 1e-3


def test_repeats_are_allowed_and_a_shorter_list_begins_a_longer_one(profile_of):
    profile = profile_of(2, {"a": (2, 3)})
    like = by_hand(profile, [1])
    found = tk.draws("random-permuted", profile, like=like, count=50)
    assert len(found) == 50 and len({tuple(s.layers) for s in found}) == 2
    assert found[:9] == tk.draws("random-permuted", profile, like=like, count=9)
    assert found[0] == tk.select("random-permuted", profile, like=like)
    assert found != tk.draws("random-permuted", profile, like=like, count=50, seed=1)


def test_the_rank_has_its_level_with_repeats(profile_of):
    """P(p ≤ a) ≤ a when M is itself a uniform draw, exactly so that (1 + b)/(n + 1) counts repeats and M."""
    profile = profile_of(4, {"a": (2, 3)})
    value = {name: float(i) for i, name in enumerate(profile.names)}
    small = 0
    for seed in range(400):
        like = tk.select("random-count", profile, "layers=0.5", seed=seed)
        found = tk.draws("random-permuted", profile, like=like, count=19, seed=seed)
        own = sum(value[n] for n in like.layers)
        small += 1 + sum(sum(value[n] for n in s.layers) <= own for s in found) <= 4  # p ≤ .2
    assert scipy.stats.binomtest(small, 400, 0.2, alternative="greater").pvalue > 1e-3


def test_what_it_holds(qwen_7b):
    like = tk.select("top-error", qwen_7b, "layers=0.2")
    role = {layer.name: layer.role for layer in qwen_7b.layers}
    target = Counter(role[n] for n in like.layers)
    found = tk.draws("random-permuted", qwen_7b, like=like, count=10)
    assert all(Counter(role[n] for n in s.layers) == target and s.parameters == like.parameters for s in found)
    assert found[0].feasible_subsets == math.prod(math.comb(28, target[r]) for r in set(role.values()))
    law = tk.selector("random-permuted")
    assert law.shared and law.nests and law.holds == ("roles", "sizes")
    assert tk.selector("random-permuted(among=size)").holds == ("sizes",)


def test_a_selection_that_no_permutation_moves(profile_of):
    profile = profile_of(2, {"a": (2, 3), "b": (3, 2)})
    with pytest.raises(tk.InputError, match=r"all layers or none of each role.*among=size"):
        tk.draws("random-permuted", profile, like=by_hand(profile, [0, 2]), count=3)
    assert tk.draws("random-permuted(among=size)", profile, like=by_hand(profile, [0, 2]), count=3)
    with pytest.raises(tk.InputError, match="each size"):
        tk.draws("random-permuted(among=size)", profile, like=tk.select("all", profile), count=3)
