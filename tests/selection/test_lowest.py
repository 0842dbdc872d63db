"""Subsets that hold one of some items at least, against enumeration."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.selection import lowest
from toolkit.selection.lowest import Holding
from toolkit.selection.subsets import TableTooLarge


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_enumeration(data):
    count = data.draw(st.integers(1, 8))
    sizes = data.draw(st.lists(st.sampled_from([2, 3, 6, 20]), min_size=count, max_size=count))
    low = data.draw(st.integers(0, 40))
    high = low + data.draw(st.integers(0, 15))
    first = sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=4)))
    labels, quotas = [], []
    if data.draw(st.booleans()):
        labels.append(data.draw(st.lists(st.sampled_from("ab"), min_size=count, max_size=count)))
        quotas.append(Counter({"a": data.draw(st.integers(0, 3)), "b": data.draw(st.integers(0, 3))}))
    expected = [
        tuple(i for i in range(count) if bits[i])
        for bits in itertools.product([0, 1], repeat=count)
        if low <= sum(s for s, b in zip(sizes, bits, strict=True) if b) <= high
        and any(bits[i] for i in first)
        and all(
            Counter(label for label, b in zip(labelling, bits, strict=True) if b) == +quota
            for labelling, quota in zip(labels, quotas, strict=True)
        )
    ]
    found = Holding(sizes, low, high, labels, quotas, first)
    assert found.count == len(expected)
    assert {found.unrank(i) for i in range(found.count)} == set(expected)
    for i in range(found.count):
        assert found.rank(found.unrank(i)) == i
    missing = set(itertools.combinations(range(count), 2)) - set(expected)
    assert all(found.rank(items) is None for items in missing)
    assert [found.holding[i] for i in range(count)] == [sum(i in s for s in expected) for i in range(count)]
    totals = [sum(sizes[i] for i in s) for s in expected]
    assert found.totals == ((min(totals), max(totals)) if totals else None)
    with pytest.raises(IndexError):
        found.unrank(found.count)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([2, 3, 7, 20]), min_size=1, max_size=7), st.integers(1, 40), st.data())
def test_the_nearest_total(sizes, target, data):
    first = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=3)))
    totals = {
        sum(sizes[i] for i in s)
        for k in range(1, len(sizes) + 1)
        for s in itertools.combinations(range(len(sizes)), k)
        if set(s) & set(first)
    }
    reachable = [t for t in totals if t <= 2 * target and t != target]
    expected = min(reachable, key=lambda t: (abs(t - target), t), default=None)
    assert Holding(sizes, 0, 2 * target, [], [], first).nearest(target) == expected


def test_the_limit_of_all_parts_together(monkeypatch):
    monkeypatch.setattr(lowest, "UNION_LIMIT", 50)
    with pytest.raises(TableTooLarge):
        Holding(list(range(1, 30)), 0, 200, [], [], range(10))
