"""Layers in random order up to the target: against the procedure written out plainly, and against enumeration."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from decimal import Decimal
from random import Random

import pytest
import scipy.stats
from toolkit_plugins.selectors import random_shuffle_matched as module
from toolkit_plugins.selectors.random_shuffle_matched import Shuffle

import toolkit as tk
from toolkit.selection.matching import controls

SMOLLM = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}


def plain(order, sizes, target, low, high):
    """The three steps for one whole order, word by word; None where the order is given up."""
    taken = []
    for item in order:
        total = sum(sizes[i] for i in taken)
        if abs(total + sizes[item] - target) >= abs(total - target):
            break
        taken.append(item)
    place = {item: at for at, item in enumerate(order)}
    while not low <= sum(sizes[i] for i in taken) <= high:
        total = sum(sizes[i] for i in taken)
        best = None
        for gone in taken:
            for come in set(order) - set(taken):
                reached = total - sizes[gone] + sizes[come]
                key = (abs(reached - target), -place[gone], reached, place[come])
                if abs(reached - target) < abs(total - target) and (best is None or key < best[0]):
                    best = (key, gone, come)
        if best is None:
            return None
        taken = [i for i in taken if i != best[1]] + [best[2]]
    return frozenset(taken)


@pytest.mark.parametrize(
    ("sizes", "target", "slack"),
    [
        ((1, 1, 3, 3, 8, 8), 11, 0),
        ((2, 2, 3, 5, 5, 7), 12, 1),
        ((3, 4, 12, 50, 7, 9), 19, 2),
        ((1, 3, 3, 3, 8, 8), 9, 0),
        ((5, 5, 5, 5, 5), 10, 0),
    ],
)
def test_the_law_is_that_of_the_plain_procedure_over_all_orders(sizes, target, slack):
    window = (target - slack, target + slack)
    expected = Counter(plain(order, sizes, target, *window) for order in itertools.permutations(range(len(sizes))))
    expected.pop(None, 0)  # orders that are given up
    orders = sum(expected.values())
    assert orders
    shuffle, rng = Shuffle(sizes, target, *window), Random(1)
    seen = Counter(frozenset(shuffle.draw(rng)) for _ in range(3000))
    assert set(seen) == set(expected)
    names = list(expected)
    if len(names) > 1:
        wanted = [3000 * expected[s] / orders for s in names]
        assert scipy.stats.chisquare([seen[s] for s in names], wanted).pvalue > 1e-3


def test_the_order_is_looked_at_lazily_and_uniform():
    seen = Counter()
    for seed in range(1200):
        order = module._Order(4, Random(f"o{seed}"))
        seen[tuple(order[at] for at in (2, 0, 3, 1))] += 1
    assert len(seen) == 24 and scipy.stats.chisquare(list(seen.values())).pvalue > 1e-3


def test_real_draws(profile_of):
    profile = profile_of(30, SMOLLM)
    like = tk.select("top-error", profile, "layers=0.10")
    tk.select("random-shuffle-matched", profile, like=like)  # the inclusion is simulated once
    begun = time.process_time()
    found = tk.draws("random-shuffle-matched", profile, like=like, count=500)
    assert time.process_time() - begun < 1  # 500 a second at least
    assert len({tuple(s.layers) for s in found}) == 500 and like.layers not in [s.layers for s in found]
    law = controls(profile, like)
    first = found[0]
    assert first.feasible_subsets == law.count and first.single_total is None
    assert all(abs(s.parameters - like.parameters) * 1000 <= like.parameters for s in found)
    # small layers are not preferred, as they are by the uniform law
    size = {layer.name: layer.parameters for layer in profile.layers}
    shares = {size[n]: p for n, p in zip(profile.names, first.inclusion, strict=True)}
    uniform = {size[n]: p for n, p in zip(profile.names, law.inclusion, strict=True)}
    small, large = min(shares), max(shares)
    assert shares[small] / shares[large] < 1.15 < 5 < uniform[small] / uniform[large]
    assert first.inclusion_draws == 1000
    # the simulated shares are those of the draws: pooled binomial errors
    held = Counter(size[n] for s in found for n in s.layers)
    for s, share in shares.items():
        n = sum(v == s for v in size.values())
        assert held[s] / (500 * n) == pytest.approx(share, abs=4 * (share / (500 * n) + share / (1000 * n)) ** 0.5)


def test_inclusion_is_the_same_whatever_is_drawn(tiny):
    like = tk.select("top-error", tiny, "layers=0.5")
    one, two = (tk.select("random-shuffle-matched(within=0.2)", tiny, like=like, seed=s) for s in (0, 1))
    assert one.inclusion == two.inclusion and one.layers != two.layers
    found = tk.draws("random-shuffle-matched(within=0.2)", tiny, like=like, count=8)
    assert found[:3] == tk.draws("random-shuffle-matched(within=0.2)", tiny, like=like, count=3)
    assert found[0] == one


def test_where_few_sets_exist(profile_of):
    profile = profile_of(3, {"a": (2, 3)})
    like = tk.select("top-error", profile, "layers=0.3")
    found = tk.draws("random-shuffle-matched", profile, like=like, count=50)
    assert sorted(s.layers for s in found) == sorted([n] for n in profile.names if n not in like.layers)
    with pytest.raises(tk.InputError, match="no other set holds 18 parameters"):
        tk.select("random-shuffle-matched", profile, like=tk.select("all", profile))


def test_a_total_that_no_order_meets(profile_of, monkeypatch):
    # 10 = 4 + 6 alone; the orders come to 10 only through these two
    monkeypatch.setattr(module, "ORDERS", 20)
    with pytest.raises(tk.InputError, match=r"20 random orders came to no total from 7 to 7; the nearest was \d"):
        Shuffle((2, 4, 6), 7, 7, 7).draw(Random(0))


def test_a_table_too_large_states_no_count(profile_of, monkeypatch):
    from toolkit.selection import matching, subsets

    profile = profile_of(40, [{"q": (1009 + 2 * b * b, 997), "up": (3001 + 14 * b, 1013 + b)} for b in range(40)])
    like = tk.select("top-error", profile, "layers=0.3")
    monkeypatch.setattr(subsets, "TABLE_LIMIT", 1000)
    matching._law.cache_clear()
    selection = tk.select("random-shuffle-matched(within=0.01)", profile, like=like)
    assert selection.feasible_subsets is None and selection.single_total is None
    assert abs(selection.mismatch) <= 0.01
    matching._law.cache_clear()


def test_what_it_is():
    law = tk.selector("random-shuffle-matched")
    assert (law.holds, law.shared, law.nests) == ((), False, False)
    assert [w.key for w in law.standard()] == ["random-shuffle-matched"]
    assert tk.selector("random-shuffle-matched(within=0.0010)").within == Decimal("0.001")
    with pytest.raises(tk.InputError, match="within"):
        tk.selector("random-shuffle-matched(within=1)")
