"""Counting, numbering and shares against enumeration of every subset."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from toolkit.selection import subsets as module
from toolkit.selection import tables
from toolkit.selection.combinations import rank_combination, unrank_combination
from toolkit.selection.subsets import Subsets, TableTooLarge


def enumerate_subsets(sizes, low, high, labels=(), quotas=()):
    """Every subset as the definition has it."""
    found = []
    for bits in itertools.product([0, 1], repeat=len(sizes)):
        items = tuple(i for i, bit in enumerate(bits) if bit)
        if not low <= sum(sizes[i] for i in items) <= high:
            continue
        counts = [Counter(labelling[i] for i in items) for labelling in labels]
        if all(count == Counter(quota) for count, quota in zip(counts, quotas, strict=True)):
            found.append(items)
    return found


@st.composite
def problems(draw):
    kinds = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    unit = draw(st.sampled_from([1, 1, 7, 4096]))
    sizes = [unit * size for size in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=10))]
    inside = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    target = sum(size for size, here in zip(sizes, inside, strict=True) if here)
    slack = draw(st.sampled_from([0, 0.02, 0.2, 0.6, 1]))
    labels, quotas = [], []
    for letters in ("ab", "xyz"):
        if draw(st.booleans()):
            labels.append(draw(st.lists(st.sampled_from(letters), min_size=len(sizes), max_size=len(sizes))))
            quotas.append(Counter(mark for mark, here in zip(labels[-1], inside, strict=True) if here))
    return sizes, math.ceil(target * (1 - slack)), math.floor(target * (1 + slack)), labels, quotas


def check(problem):
    subsets, expected = Subsets(*problem), enumerate_subsets(*problem)
    sizes = problem[0]
    numbered = [subsets.unrank(number) for number in range(subsets.count)]
    assert subsets.count == len(expected)
    assert sorted(numbered) == sorted(expected)
    assert [subsets.rank(items) for items in numbered] == list(range(subsets.count))
    holding = Counter(item for items in expected for item in items)
    if expected:
        assert {i: subsets.holding[i] for i in range(len(sizes))} == {i: holding[i] for i in range(len(sizes))}
    totals = [sum(sizes[i] for i in items) for items in expected]
    assert subsets.totals == ((min(totals), max(totals)) if totals else None)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_equals_enumeration(problem):
    check(problem)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(["series", "steps"]))
def test_both_ways_of_building_a_table_equal_enumeration(problem, way):
    sizes, low, high, _, _ = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables.Side, "_series_cost", lambda self: -1 if way == "series" else 1 << 62)
        check((sizes, low, high, [], []))


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_what_is_not_feasible_has_no_number(problem, data):
    sizes, low, high, labels, quotas = problem
    items = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    feasible = tuple(sorted(items)) in enumerate_subsets(sizes, low, high, labels, quotas)
    assert (Subsets(*problem).rank(sorted(items)) is not None) == feasible


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_nearest_total(problem):
    sizes, _, _, labels, quotas = problem
    target = (problem[1] + problem[2]) // 2
    assume(target > 0)
    totals = {sum(sizes[i] for i in s) for s in enumerate_subsets(sizes, 1, 2 * target, labels, quotas)} - {target}
    nearest = Subsets(sizes, 0, 2 * target, labels, quotas).nearest(target)
    assert nearest == min(totals, key=lambda total: (abs(total - target), total), default=None)


@pytest.mark.parametrize("n", range(1, 9))
def test_combinations_in_lexicographic_order(n):
    for k in range(n + 1):
        expected = [list(c) for c in itertools.combinations(range(n), k)]
        assert [unrank_combination(n, k, i) for i in range(math.comb(n, k))] == expected
        assert [rank_combination(n, c) for c in expected] == list(range(math.comb(n, k)))


def test_large_combinations_are_a_bijection():
    rng = random.Random(5)
    for n, k in ((400, 137), (3000, 20), (512, 511)):
        number = rng.randrange(math.comb(n, k))
        chosen = unrank_combination(n, k, number)
        assert len(set(chosen)) == k and chosen == sorted(chosen) and chosen[0] >= 0 and chosen[-1] < n
        assert rank_combination(n, chosen) == number


def test_one_size_is_a_binomial_coefficient_of_any_length():
    subsets = Subsets([1] * 5000, 2500, 2500)
    assert subsets.count == math.comb(5000, 2500)
    assert subsets.holding[0] == math.comb(4999, 2499)


def test_no_number_below_zero_or_past_the_last():
    subsets = Subsets([1, 1, 2], 2, 2)
    assert subsets.count == 2
    for number in (-1, 2):
        with pytest.raises(IndexError):
            subsets.unrank(number)


def test_past_the_table_limit():
    rng = random.Random(1)
    sizes = [rng.randrange(10**6, 10**7) for _ in range(200)]
    total = sum(sizes)
    with pytest.raises(TableTooLarge) as caught:
        Subsets(sizes, total // 2, total // 2 + total // 1000)
    assert caught.value.needed > module.TABLE_LIMIT
