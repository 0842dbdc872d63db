"""The law of a matched control against enumeration of every set, and on the layer lists of real models."""

from __future__ import annotations

import itertools
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from random import Random

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk
from toolkit.selection import matching, subsets
from toolkit.selection.matching import controls, counted, distinct

CONSTRAINTS = [
    dict(zip(("thirds", "roles", "disjoint", "lowest_block"), flags, strict=True))
    for flags in [*itertools.product([0, 1], [0, 1], [0, 1], [0]), (0, 0, 0, 1), (0, 1, 0, 1), (1, 0, 1, 1)]
]


def thirds_of(profile):
    return [3 * layer.block // profile.blocks for layer in profile.layers]


def enumerate_controls(
    profile, like, *, within, match="parameters", thirds=False, roles=False, disjoint=False, lowest_block=False
):
    """Every set of the law, from its definition, in exact fractions."""
    matched = frozenset(like.layers)
    layers = profile.layers
    sizes = [getattr(layer, match) for layer in layers]
    target = sum(size for size, layer in zip(sizes, layers, strict=True) if layer.name in matched)
    third = thirds_of(profile)
    found = []
    for bits in itertools.product([False, True], repeat=len(layers)):
        chosen = [i for i, bit in enumerate(bits) if bit]
        names = frozenset(layers[i].name for i in chosen)
        own = [i for i, layer in enumerate(layers) if layer.name in matched]
        if abs(sum(sizes[i] for i in chosen) - target) > Fraction(str(within)) * target or names == matched:
            continue
        if thirds and Counter(third[i] for i in chosen) != Counter(third[i] for i in own):
            continue
        if roles and Counter(layers[i].role for i in chosen) != Counter(layers[i].role for i in own):
            continue
        if disjoint and names & matched:
            continue
        if lowest_block and min((layers[i].block for i in chosen), default=None) != min(layers[i].block for i in own):
            continue
        found.append(names)
    return found


@pytest.fixture
def small(profile_of):
    """Six blocks of two layers, five sizes."""
    shapes = [{"q": (4, 5 + block % 2), "up": (7 + 3 * (block // 3), 4)} for block in range(6)]
    return profile_of(6, shapes)


@pytest.fixture
def like(small):
    """Four layers over all thirds, two of each role."""
    return tk.select("listed", small, file=_listed(small, [0, 3, 6, 11]))


def _listed(profile, indexes):
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write("\n".join(profile.names[i] for i in indexes))
    return file.name


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
def test_uniform_over_the_enumerated_law(small, like, constraint):
    within = "0.12"
    expected = enumerate_controls(small, like, within=within, **constraint)
    law = controls(small, like, within=Decimal(within), **constraint)
    assert law.count == len(expected) > 2
    assert {frozenset(law.pick(i).layers) for i in range(law.count)} == set(expected)

    holding = Counter(name for names in expected for name in names)
    assert law.inclusion == [holding[name] / len(expected) for name in small.names]  # exactly

    draws = 12 * len(expected)
    for place in (0, 1):  # a second draw, without replacement, is uniform too
        seen = Counter(frozenset(law.draws(Random(f"{i}"), 2)[place].layers) for i in range(draws))
        assert set(seen) <= set(expected)
        assert scipy.stats.chisquare([seen[names] for names in expected]).pvalue > 1e-3


def test_the_selector_itself_is_uniform_over_seeds(small, like):
    expected = enumerate_controls(small, like, within="0.05", thirds=True)
    assert len(expected) > 2
    seen = Counter(
        frozenset(tk.select("random-matched", small, like=like, seed=s, within="0.05", thirds=True).layers)
        for s in range(30 * len(expected))
    )
    assert scipy.stats.chisquare([seen[names] for names in expected]).pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_law_equals_enumeration(data):
    from toolkit.records.profile import LayerProfile, Profile, Reference

    blocks = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(2, 9))
    rows = []
    for i in range(count):
        parameters = data.draw(st.sampled_from([3, 4, 12, 50]))
        rows.append(
            LayerProfile(
                name=f"m.{i}",
                tensor="t",
                role=data.draw(st.sampled_from("qk")),
                block=min(blocks - 1, i * blocks // count),
                shape=(1, parameters),
                parameters=parameters,
                bytes=2 * parameters,
                norm=1.0,
                density=1.0,
            )
        )
    profile = Profile(
        model="m", fingerprint="f", reference=Reference(dtype="float16", note=""), blocks=blocks, layers=rows
    )
    chosen = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    like = tk.Selection(
        selector="x",
        model="m",
        fingerprint="f",
        layers=[f"m.{i}" for i in sorted(chosen)],
        parameters=sum(rows[i].parameters for i in chosen),
        bytes=sum(rows[i].bytes for i in chosen),
        of={},
    )
    constraint = data.draw(st.sampled_from(CONSTRAINTS))
    within = data.draw(st.sampled_from(["0", "0.001", "0.25", "0.9"]))
    match = data.draw(st.sampled_from(["parameters", "bytes"]))
    expected = enumerate_controls(profile, like, within=within, match=match, **constraint)
    try:
        law = controls(profile, like, within=Decimal(within), match=match, **constraint)
    except tk.InputError:
        assert expected == []
        return
    assert sorted(map(sorted, expected)) == sorted(sorted(law.pick(i).layers) for i in range(law.count))
    size = {layer.name: layer.parameters for layer in profile.layers}
    target = sum(size[name] for name in like.layers)
    totals = {sum(size[name] for name in names) for names in expected}
    assert law.single_total == (totals == {target} and not constraint["disjoint"])
    for i in range(law.count):
        pick = law.pick(i)
        assert pick.mismatch == (sum(size[n] for n in pick.layers) - target) / target


def test_the_edges_of_the_window_are_in_it(profile_of):
    # 1000 ± 0.1% is 999 … 1001 exactly; binary floats would lose an edge: 0.007 · 1000 = 7.000000000000001
    shapes = [{"q": (1, size)} for size in (1000, 1001, 999, 1002, 998, 1007, 1008)]
    profile = profile_of(7, shapes)
    like = tk.select("listed", profile, file=_listed(profile, [0]))
    for within, reached in (("0.001", {999, 1001}), ("0.002", {998, 999, 1001, 1002}), ("0.0009999", None)):
        if reached is None:
            with pytest.raises(tk.InputError, match="nearest reachable total is 999"):
                controls(profile, like, within=Decimal(within))
            continue
        law = controls(profile, like, within=Decimal(within))
        assert {profile.row(law.pick(i).layers[0]).parameters for i in range(law.count)} == reached
    assert controls(profile, like, within=Decimal("0.007")).count == 5


def test_draws_are_distinct_stable_and_exhaust_a_small_law(small, like):
    expected = enumerate_controls(small, like, within="0.12")
    every = tk.draws("random-matched", small, like=like, within="0.12", count=10**6, seed=3)
    assert len(every) == len(expected) and {frozenset(s.layers) for s in every} == set(expected)
    assert frozenset(like.layers) not in {frozenset(s.layers) for s in every}
    few = tk.draws("random-matched", small, like=like, within="0.12", count=7, seed=3)
    assert few == every[:7]
    assert few[0] == tk.select("random-matched", small, like=like, within="0.12", seed=3)
    assert few != tk.draws("random-matched", small, like=like, within="0.12", count=7, seed=4)
    assert few[0].feasible_subsets == len(expected)


@given(st.integers(0, 60), st.integers(0, 60), st.integers())
def test_distinct_numbers(below, count, seed):
    numbers = distinct(Random(seed), below, count)
    assert len(numbers) == len(set(numbers)) == min(below, count)
    assert all(0 <= n < below for n in numbers)
    longer = distinct(Random(seed), below, count + 5)
    assert longer[: len(numbers)] == numbers


def test_distinct_numbers_of_any_length():
    below = 10**400
    numbers = distinct(Random(0), below, 500)
    assert len(set(numbers)) == 500 and max(numbers) > below // 2 > min(numbers)


def test_every_order_of_distinct_numbers_is_as_likely():
    seen = Counter(tuple(distinct(Random(f"o{i}"), 4, 3)) for i in range(2400))
    assert set(seen) == set(itertools.permutations(range(4), 3))
    assert scipy.stats.chisquare(list(seen.values())).pvalue > 1e-3


@pytest.mark.parametrize("constraint", [{}, {"roles": True}, {"disjoint": True}], ids=str)
def test_real_layer_lists(real, constraint):
    like = tk.select("top-error", real, "parameters=0.05" if len(real) > 1000 else "layers=0.1")
    found = tk.draws("random-matched", real, like=like, count=5, **constraint)
    assert len({tuple(s.layers) for s in found}) == 5
    target = Counter(real.row(name).role for name in like.layers)
    rows = {layer.name: layer for layer in real.layers}
    for selection in found:
        total = sum(rows[name].parameters for name in selection.layers)
        assert total == selection.parameters
        assert abs(Fraction(total - like.parameters, like.parameters)) <= Fraction(1, 1000)
        assert selection.matched_to.hash == like.layers_hash and selection.layers != like.layers
        if "roles" in constraint:
            assert Counter(rows[name].role for name in selection.layers) == target
        if "disjoint" in constraint:
            assert not set(selection.layers) & set(like.layers)
    # the shares' mean total is within the tolerance as well: Σ πᵢ·sizeᵢ = E[total]
    mean = sum(p * layer.parameters for p, layer in zip(found[0].inclusion, real.layers, strict=True))
    assert mean == pytest.approx(like.parameters, rel=1e-3)


@pytest.mark.parametrize("constraint", [{"thirds": True}, {"thirds": True, "roles": True}], ids=str)
def test_thirds_of_a_real_layer_list(qwen_7b, constraint):
    like = tk.select("top-error", qwen_7b, "layers=0.2")
    third = dict(zip(qwen_7b.names, thirds_of(qwen_7b), strict=True))
    for selection in tk.draws("random-matched", qwen_7b, like=like, count=20, **constraint):
        assert Counter(third[n] for n in selection.layers) == Counter(third[n] for n in like.layers)
        assert abs(selection.mismatch) <= 1e-3


def test_a_count_of_thousands_of_digits_goes_through_a_file(tmp_path, profile_of):
    block = {"attn.q_proj": (64, 32)} | {f"mlp.experts.up_proj[{i}]": (48, 32) for i in range(128)}
    profile = profile_of(48, block)
    like = tk.select("random-count", profile, "layers=0.2")
    selection = tk.select("random-matched", profile, like=like, seed=1)
    assert selection.feasible_subsets > 10**1300
    selection.save(tmp_path / "s.json")
    assert tk.Selection.load(tmp_path / "s.json") == selection


def test_a_count_too_long_for_a_file_is_refused(profile_of):
    profile = profile_of(100, {f"e[{i}]": (2, 2) for i in range(150)})
    like = tk.select("random-count", profile, "layers=0.5")
    with pytest.raises(tk.InputError, match=r"10\^4300"):
        controls(profile, like)


def test_unreachable_names_the_nearest_exactly(profile_of):
    profile = profile_of(3, [{"a": (1, 100)}, {"a": (1, 103)}, {"a": (1, 64)}])
    like = tk.select("listed", profile, file=_listed(profile, [0]))
    with pytest.raises(tk.InputError, match=r"nearest reachable total is 103, a mismatch of 0\.03 \(3/100\)") as error:
        tk.select("random-matched", profile, like=like)
    assert "within=0.03 " in str(error.value)
    assert tk.select("random-matched", profile, like=like, within="0.03").parameters == 103
    with pytest.raises(tk.InputError, match=r"no other set .* disjoint.*leave out disjoint"):
        everything = tk.select("all", profile)
        tk.select("random-matched", profile, like=everything, disjoint=True)


def test_the_suggested_tolerance_is_enough(profile_of):
    profile = profile_of(2, [{"a": (1, 700)}, {"a": (1, 699)}])
    like = tk.select("listed", profile, file=_listed(profile, [0]))
    with pytest.raises(tk.InputError) as error:
        controls(profile, like, within=Decimal(0))
    suggested = str(error.value).partition("within=")[2].partition(" ")[0]
    assert Fraction(suggested) >= Fraction(1, 700) > Fraction(suggested) * Fraction(99, 100)
    assert controls(profile, like, within=Decimal(suggested)).count == 1


def test_constraints_that_exclude_each_other(tiny):
    like = tk.select("listed", tiny, file=_listed(tiny, [0, 4, 8]))  # three of the four attn.q
    with pytest.raises(tk.InputError, match="3 layers of role 'q' and leaves 1; leave out roles or disjoint"):
        controls(tiny, like, roles=True, disjoint=True)


def test_past_the_table_limit_says_what_to_relax(profile_of, monkeypatch):
    monkeypatch.setattr(subsets, "TABLE_LIMIT", 200_000)
    monkeypatch.setattr(matching, "TABLE_LIMIT", 200_000)
    shapes = [{"q": (1009 + 2 * b * b, 997), "up": (3001 + 14 * b, 1013 + b)} for b in range(90)]
    profile = profile_of(90, shapes)
    like = tk.select("random-count", profile, "layers=0.5")
    with pytest.raises(tk.InputError, match=r"limit is 200,000: add roles"):
        controls(profile, like)
    with pytest.raises(tk.InputError, match="leave out thirds"):
        controls(profile, like, thirds=True)


def test_one_tolerance_has_one_key_and_one_stream(tiny):
    like = tk.select("top-error", tiny, "layers=0.5")
    found = [tk.select(f"random-matched(within={within})", tiny, like=like) for within in ("0.2", "0.200", "2e-1")]
    assert {s.selector for s in found} == {"random-matched(within=0.2)"} and found[0] == found[1] == found[2]
    assert tk.selector("random-matched(within=0.0010)").key == "random-matched"


@pytest.mark.parametrize("within", ["-0.1", "1", "nan", "inf"])
def test_a_tolerance_outside_its_range(tiny, within):
    with pytest.raises(tk.InputError, match="within"):
        tk.select("random-matched", tiny, like=tk.select("top-error", tiny, "layers=0.5"), within=within)
    with pytest.raises(tk.InputError, match="within"):
        controls(tiny, tk.select("top-error", tiny, "layers=0.5"), within=Decimal(within))


def test_a_single_total(qwen_7b, tiny):
    like = tk.select("top-error", qwen_7b, "layers=0.2")
    assert tk.select("random-matched", qwen_7b, like=like).single_total
    assert not tk.select("random-matched", qwen_7b, like=like, within="0.2").single_total
    assert tk.select("random-matched", tiny, like=tk.select("top-error", tiny, "layers=0.5"), roles=True).single_total


def test_ranks_are_exact_only_where_the_matched_set_meets_the_law_itself(profile_of):
    # One layer of six makes the difference. Where every other pair is drawn, p ≤ a has at most the share a of all
    # pairs; against disjoint pairs the 5 of 15 with that layer all have the smallest p, 1/7.
    profile = profile_of(3, {"a": (2, 3), "b": (3, 2)})
    known = {"selector": "x", "model": profile.model, "fingerprint": profile.fingerprint, "of": {}}
    best = profile.names[0]
    for disjoint, smallest in ((False, 5 / 15), (True, 1 / 7)):
        found = []
        for pair in itertools.combinations(profile.names, 2):
            like = tk.Selection(**known, layers=list(pair), parameters=12, bytes=24)
            draws = tk.draws("random-matched", profile, like=like, count=100, disjoint=disjoint)
            at_least = sum((best in draw.layers) >= (best in pair) for draw in draws)
            found.append((1 + at_least) / (1 + len(draws)))
            assert draws[0].single_total is not disjoint
        assert min(found) == pytest.approx(smallest) and found.count(min(found)) == 5


def test_counted_is_the_binomial_law(tiny):
    law = counted(tiny, 5)
    assert law.count == 4368  # C(16, 5)
    assert law.inclusion == [5 / 16] * 16
