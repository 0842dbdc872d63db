"""The best set against full enumeration; the ridge regression against normal equations and leaving each draw out."""

from __future__ import annotations

import random
import time
from decimal import Decimal
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk
from toolkit.selection.effects import ALPHAS, best, reference_selection, ridge


def enumerated(values, sizes, low, high):
    """Every set in the window: the largest exact sum, and of those the set that comes first item by item."""
    found = []
    for k in range(len(sizes) + 1):
        for chosen in combinations(range(len(sizes)), k):
            if low <= sum(sizes[i] for i in chosen) <= high:
                marks = tuple(i in chosen for i in range(len(sizes)))
                found.append((sum((Fraction(values[i]) for i in chosen), Fraction(0)), marks, list(chosen)))
    return max(found)[2] if found else None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 3, 4, 8, 30]), st.sampled_from([-1.0, -0.1, 0.0, 0.1, 0.3, 1e-9, 2.5])),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, 60),
    st.integers(0, 12),
    st.sampled_from([1, 7, 4096]),
)
def test_best_is_the_best_of_all_sets(items, low, span, unit):
    sizes, values = [s * unit for s, _ in items], [v for _, v in items]
    expected = enumerated(values, sizes, low * unit, (low + span) * unit)
    if expected is None:
        with pytest.raises(tk.InputError, match="no set of"):
            best(values, sizes, low * unit, (low + span) * unit)
    else:
        assert best(values, sizes, low * unit, (low + span) * unit) == expected


def test_no_rounding_decides():
    # In float64, 0.1 + 0.2 > 0.3; exactly, 0.1 + 0.2 is larger too, and 1e16 + 1 − 1e16 is not lost.
    assert best([0.1, 0.2, 0.3], [1, 1, 2], 2, 2) == [0, 1]
    assert best([1e16, 1.0, 1e16], [1, 1, 2], 2, 2) == [0, 1]
    assert best([1.0, 1.0, 1.0], [5, 5, 5], 5, 9) == [0]  # ties by order


@pytest.mark.parametrize("layers", [210, 800])
def test_best_is_fast(layers):
    rng = random.Random(layers)
    sizes = [rng.choice([1, 3, 8, 8]) * 110_592 for _ in range(layers)]
    values = [rng.gauss(0, 1) for _ in sizes]
    target = sum(sizes) // 10
    begun = time.perf_counter()
    chosen = best(values, sizes, target - target // 100, target + target // 100)
    assert time.perf_counter() - begun < 5
    assert abs(sum(sizes[i] for i in chosen) - target) <= target // 100
    # A bound from linear programming: the densest layers fill the window's upper end, the last one in part.
    bound, room = 0.0, target + target // 100
    for i in sorted(range(layers), key=lambda i: -values[i] / sizes[i]):
        part = min(1.0, room / sizes[i])
        if values[i] <= 0 or part <= 0:
            break
        bound, room = bound + part * values[i], room - part * sizes[i]
    reached = sum(values[i] for i in chosen)
    assert bound - 2.5 * max(values) / 8 <= reached <= bound + 1e-9


@pytest.mark.parametrize(
    ("values", "sizes", "message"),
    [
        ([1.0, float("nan")], [1, 1], "item 1 is nan"),
        ([1.0], [1, 1], "1 values and 2 sizes"),
        ([1.0, 2.0], [1, 0], "item 1 has size 0"),
        ([1.0, 2.0], [3, 3], "no set of 2 layers has a total from 1 to 2"),
    ],
)
def test_bad_input(values, sizes, message):
    with pytest.raises(tk.InputError, match=message):
        best(values, sizes, 1, 2)


def test_the_reference_selection_holds_the_same_memory(tiny):
    like = tk.select("top-error", tiny, "layers=0.5")
    values = np.random.default_rng(0).normal(size=len(tiny))
    within = Decimal("0.1")
    good = reference_selection(tiny, values, like, within, "oracle-additive")
    bad = reference_selection(tiny, -values, like, within, "anti-oracle")
    at = {name: i for i, name in enumerate(tiny.names)}
    sizes = [row.parameters for row in tiny.layers]
    t = like.parameters
    expected = enumerated([float(v) for v in values], sizes, t - t // 10, t + t // 10)
    assert [at[n] for n in good.layers] == expected
    assert sum(values[at[n]] for n in bad.layers) < sum(values[at[n]] for n in good.layers)
    assert good.selector == "oracle-additive" and good.matched_to.hash == like.layers_hash
    assert good.parameters == sum(sizes[at[n]] for n in good.layers) and good.bytes == 2 * good.parameters
    assert good.mismatch == (good.parameters - t) / t and good.seed is None


def problem(draws, layers, seed):
    rng = np.random.default_rng(seed)
    x = (rng.random((draws, layers)) < 0.3).astype(float)
    gains = rng.normal(size=layers)
    return x, 5 - x @ gains + rng.normal(scale=0.3, size=draws), gains


@pytest.mark.parametrize(("draws", "layers"), [(40, 7), (15, 30)])
def test_ridge_is_the_normal_equations_at_the_penalty_that_leaving_one_out_chooses(draws, layers):
    x, y, _ = problem(draws, layers, 1)

    def solve(x, y, alpha):  # [1 x] with the intercept unpenalized, by the normal equations
        design = np.column_stack([np.ones(len(y)), x])
        penalty = alpha * np.eye(layers + 1)
        penalty[0, 0] = 0
        return np.linalg.solve(design.T @ design + penalty, design.T @ y)

    def left_out(alpha):
        total = 0.0
        for i in range(draws):
            rest = np.arange(draws) != i
            beta = solve(x[rest], y[rest], alpha)
            total += (y[i] - beta[0] - x[i] @ beta[1:]) ** 2
        return total

    alpha = min(ALPHAS, key=left_out)
    np.testing.assert_allclose(ridge(x, y), -solve(x, y, alpha)[1:], rtol=1e-7, atol=1e-9)


def test_ridge_finds_the_gains():
    x, y, gains = problem(800, 12, 2)
    np.testing.assert_allclose(ridge(x, y), gains, atol=0.1)


def test_ridge_with_layers_that_no_draw_or_every_draw_holds():
    x, y, _ = problem(30, 6, 3)
    x[:, 2], x[:, 4] = 0, 1
    found = ridge(x, y)
    assert found[2] == pytest.approx(0, abs=1e-12) and found[4] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("x", "y", "alphas", "message"),
    [
        (np.ones((2, 3)), np.ones(2), [1.0], "at least 3"),
        (np.ones((4, 3)), np.ones(3), [1.0], "shape"),
        (np.ones((4, 3)), np.array([1, 2, 3, np.nan]), [1.0], "finite"),
        (np.ones((4, 3)), np.ones(4), [0.0], "above 0"),
    ],
)
def test_ridge_refuses(x, y, alphas, message):
    with pytest.raises(tk.InputError, match=message):
        ridge(x, y, alphas)
