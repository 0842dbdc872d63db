"""Nested families against the enumeration of all of them, and on the layer lists of real models."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from random import Random

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk
from toolkit.selection import chains
from toolkit.selection.chains import families

LLAMA_8B = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
SMOLLM = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}


def chosen(profile, indexes):
    """A selection of the layers at these places."""
    return tk.Selection(
        selector="by-hand",
        model=profile.model,
        fingerprint=profile.fingerprint,
        layers=[profile.names[i] for i in sorted(indexes)],
        parameters=sum(profile.layers[i].parameters for i in indexes),
        bytes=sum(profile.layers[i].bytes for i in indexes),
        of={"layers": len(profile), "parameters": profile.parameters, "bytes": profile.bytes},
    )


def enumerated(profile, likes, within, size, roles=False, thirds=False):
    """Every family of the definition, in the order of `likes`, as tuples of frozen sets of names."""
    layers = profile.layers
    third = {layer.name: 3 * layer.block // profile.blocks for layer in layers}

    def fits(names, like):
        total, target = sum(size(r) for r in layers if r.name in names), sum(size(profile.row(n)) for n in like.layers)
        same = abs(total - target) <= Fraction(str(within)) * target
        if roles:
            same &= Counter(profile.row(n).role for n in names) == Counter(profile.row(n).role for n in like.layers)
        if thirds:
            same &= Counter(third[n] for n in names) == Counter(third[n] for n in like.layers)
        return same

    every = [
        frozenset(layer.name for layer, bit in zip(layers, bits, strict=True) if bit)
        for bits in itertools.product([False, True], repeat=len(layers))
    ]
    order = sorted(range(len(likes)), key=lambda i: (sum(size(profile.row(n)) for n in likes[i].layers), i))
    sets = [[names for names in every if fits(names, likes[i])] for i in order]
    found = [(names,) for names in sets[0]]
    for level in sets[1:]:
        found = [(*family, names) for family in found for names in level if family[-1] <= names]
    own = tuple(frozenset(likes[i].layers) for i in order)
    place = [order.index(i) for i in range(len(likes))]
    return [tuple(family[at] for at in place) for family in found if family != own]


def sets_of(law):
    return [tuple(frozenset(pick.layers) for pick in law.pick(number)) for number in range(law.count)]


@pytest.fixture
def small(profile_of):
    """Five blocks of two layers, three sizes, awkward shapes."""
    return profile_of(5, [{"q": (4, 5), "up": (7 + 3 * (block // 3), 4)} for block in range(5)])


@pytest.mark.parametrize(
    "constraint", [{}, {"roles": True}, {"thirds": True}, {"roles": True, "thirds": True}], ids=str
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_uniform_over_all_nested_families(small, constraint, order):
    nested = [chosen(small, s) for s in ([1], [1, 2, 4], [1, 2, 4, 5, 7])]
    likes = [nested[i] for i in order]
    law = families(small, likes, within=Decimal("0.2"), **constraint)
    expected = enumerated(small, likes, "0.2", lambda r: r.parameters, **constraint)
    assert law.count == len(expected) > 4
    assert sorted(sets_of(law), key=str) == sorted(set(expected), key=str)  # a bijection: each number, another family
    for at in range(3):  # exact inclusion at each budget, in the order of the selections
        holding = Counter(name for family in expected for name in family[at])
        assert law.pick(0)[at].inclusion == [holding[name] / len(expected) for name in small.names]
    if law.count < 400:
        for place in (0, 1):  # the second draw, without replacement, is uniform too
            seen = Counter(
                tuple(frozenset(p.layers) for p in law.draws(Random(f"{i}"), 2)[place]) for i in range(12 * law.count)
            )
            assert set(seen) <= set(expected)
            assert scipy.stats.chisquare([seen[family] for family in expected]).pvalue > 1e-3


def test_the_public_draws_are_uniform_over_seeds(profile_of):
    profile = profile_of(3, {"a": (2, 3), "b": (3, 2)})
    likes = [chosen(profile, [0]), chosen(profile, [0, 3])]
    expected = enumerated(profile, likes, 0, lambda r: r.parameters)
    seen = Counter(
        tuple(
            frozenset(s.layers) for s in tk.chains("random-matched(within=0)", profile, likes=likes, count=1, seed=s)[0]
        )
        for s in range(20 * len(expected))
    )
    assert len(expected) == 29 == len(seen)
    assert scipy.stats.chisquare([seen[family] for family in expected]).pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_families_equal_enumeration(data):
    from toolkit.records.profile import LayerProfile, Profile, Reference

    count = data.draw(st.integers(1, 7))
    blocks = data.draw(st.integers(1, 3))
    rows = []
    for i in range(count):
        shape = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 4), (5, 10)]))
        rows.append(
            LayerProfile(
                name=f"m.{i}",
                tensor="t",
                role=data.draw(st.sampled_from("qk")),
                block=min(blocks - 1, i * blocks // count),
                shape=shape,
                parameters=shape[0] * shape[1],
                bytes=2 * shape[0] * shape[1],
                norm=1.0,
                density=1.0,
            )
        )
    reference = Reference(dtype="float16", note="")
    profile = Profile(model="m", fingerprint="f", reference=reference, blocks=blocks, layers=rows)
    sets = data.draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1), min_size=1, max_size=3))
    if data.draw(st.booleans()):  # nested, else targets only
        sets = [set().union(*sets[: at + 1]) for at in range(len(sets))]
    likes = data.draw(st.permutations([chosen(profile, s) for s in sets]))
    within = data.draw(st.sampled_from(["0", "0.1", "0.5"]))
    options = {"roles": data.draw(st.booleans()), "thirds": data.draw(st.booleans())}
    match, size = data.draw(
        st.sampled_from(
            [
                ("parameters", lambda r: r.parameters),
                ("bytes", lambda r: r.bytes),
                ("layers", lambda r: 1),
                ("adapter-parameters", lambda r: sum(r.shape)),
            ]
        )
    )
    totals = [sum(size(profile.row(n)) for n in like.layers) for like in likes]
    if len(set(totals)) < len(totals):
        return  # equal totals have their own test: their order is by number of layers
    expected = enumerated(profile, likes, within, size, **options)
    try:
        law = families(profile, likes, within=Decimal(within), match=match, **options)
    except tk.InputError:
        assert expected == []
        return
    assert Counter(sets_of(law)) == Counter(expected)
    order = sorted(range(len(likes)), key=lambda i: totals[i])
    nested = all(set(likes[a].layers) <= set(likes[b].layers) for a, b in itertools.pairwise(order))
    reached = {tuple(sum(size(profile.row(n)) for n in names) for names in family) for family in expected}
    assert law.single_total == (nested and reached == {tuple(totals)})


def test_equal_totals_may_hold_the_same_set(profile_of):
    profile = profile_of(3, {"a": (2, 3)})
    likes = [chosen(profile, [0]), chosen(profile, [0])]
    found = tk.chains("random-matched", profile, likes=likes, count=9)
    assert sorted([s.layers for s in family] for family in found) == [[[n]] * 2 for n in profile.names[1:]]


@pytest.mark.parametrize(("blocks", "shapes"), [(30, SMOLLM), (32, LLAMA_8B)], ids=["demo", "Llama-8B"])
def test_real_models(profile_of, blocks, shapes):
    profile = profile_of(blocks, shapes)
    likes = [tk.select("top-error", profile, f"layers={share}") for share in ("0.05", "0.10", "0.20")]
    begun = time.process_time()
    found = tk.chains("random-matched", profile, likes=likes, count=499, seed=3)
    assert time.process_time() - begun < 2
    assert len({tuple(tuple(s.layers) for s in family) for family in found}) == 499
    for family in found:
        assert all(set(a.layers) < set(b.layers) for a, b in itertools.pairwise(family))
        assert all(s.parameters == like.parameters for s, like in zip(family, likes, strict=True))
    first = found[0]
    assert first[0].single_total and first[0].feasible_subsets == first[2].feasible_subsets > 10**70
    # Σ πᵢ·sizeᵢ is the total at each budget, as all sets hold it; and layers that are alike are drawn alike
    for at, like in enumerate(likes):
        mean = sum(p * layer.parameters for p, layer in zip(first[at].inclusion, profile.layers, strict=True))
        assert mean == pytest.approx(like.parameters, rel=1e-12)
        observed = Counter(profile.row(n).parameters for family in found for n in family[at].layers)
        for size, seen in observed.items():
            share = sum(
                p for p, layer in zip(first[at].inclusion, profile.layers, strict=True) if layer.parameters == size
            )
            assert seen / 499 == pytest.approx(share, rel=0.1)


def test_what_a_family_records(small):
    likes = [chosen(small, [1]), chosen(small, [1, 2, 4])]
    found = tk.chains("random-matched", small, likes=likes, count=5, within="0.2", seed=7)
    assert [[s.draw for s in family] for family in found] == [[i, i] for i in range(5)]
    assert len({s.chain for family in found for s in family}) == 1 and found[0][0].chain
    assert [s.matched_to.hash for s in found[2]] == [like.layers_hash for like in likes]
    assert found[0][0].seed == 7 and found[0][0].selector == "random-matched(within=0.2)"
    assert tk.chains("random-matched", small, likes=likes, count=3, within="0.2", seed=7) == found[:3]
    assert tk.chains("random-matched", small, likes=likes, count=3, within="0.2", seed=8) != found[:3]
    other = tk.chains("random-matched", small, likes=likes[::-1], count=1, within="0.2", seed=7)
    assert other[0][0].chain != found[0][0].chain
    every = tk.chains("random-matched", small, likes=likes, count=10**6, within="0.2")
    assert len(every) == every[0][0].feasible_subsets


def test_selections_that_are_not_nested_are_targets(small):
    likes = [chosen(small, [0]), chosen(small, [1, 2, 4])]
    found = tk.chains("random-matched", small, likes=likes, count=10**6, within="0.2")
    assert all(set(a.layers) <= set(b.layers) for a, b in found) and not found[0][0].single_total
    assert len(found) == len(enumerated(small, likes, "0.2", lambda r: r.parameters))


@pytest.mark.parametrize("law", ["random-count", "depth-matched", "placement-matched(within=0.2)"])
def test_other_laws_draw_families(small, law):
    likes = [chosen(small, [1]), chosen(small, [1, 2, 4])]
    found = tk.chains(law, small, likes=likes, count=20)
    assert all(set(a.layers) <= set(b.layers) for a, b in found)
    if "placement" not in law:
        assert all([len(a.layers), len(b.layers)] == [1, 3] for a, b in found)
        assert all(a.mismatch == (a.parameters - 28) / 28 and a.single_total is None for a, _ in found)


@pytest.mark.parametrize(
    ("law", "likes", "message"),
    [
        ("top-error", 1, "top-error matches nothing"),
        ("random-shuffle-matched", 1, "draws no nested families; laws that can: .*random-matched.*random-permuted"),
        ("random-matched(disjoint=true)", 1, "draws no nested families"),
        ("placement-matched(lowest_block=true)", 1, "draws no nested families"),
        ("random-matched", 0, "likes is empty"),
        ("random-matched(within=0)", 10, "no other nested family holds parameters within 0 of by-hand.*widen"),
        ("random-matched(within=0,roles=true)", 10, "leave out roles"),
    ],
)
def test_refused(small, law, likes, message):
    with pytest.raises(tk.InputError, match=message):
        tk.chains(law, small, likes=[chosen(small, range(likes))] if likes else [], count=3)


def test_one_selection_in_place_of_a_list(small):
    with pytest.raises(tk.InputError, match="a list of selections"):
        tk.chains("random-matched", small, likes=chosen(small, [1]), count=3)
    with pytest.raises(tk.InputError, match="at least 1"):
        tk.chains("random-matched", small, likes=[chosen(small, [1])], count=0)


@pytest.mark.parametrize("limit", ["PAIR_LIMIT", "STEP_LIMIT"])
def test_past_the_limit_says_what_to_do(small, monkeypatch, limit):
    monkeypatch.setattr(chains, limit, 5)
    chains._families.cache_clear()
    likes = [chosen(small, [1]), chosen(small, [1, 2, 4])]
    with pytest.raises(tk.InputError, match=r"more than 5 steps: match fewer budgets.*permutes"):
        families(small, likes, within=Decimal("0.3"))
