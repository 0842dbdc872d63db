from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit import Budget, InputError
from toolkit.selection.ranking import top


def test_top_k_best_first_and_ties_by_layer_order(tiny):
    scores = [0.0] * 16
    scores[9], scores[3], scores[5] = 2.0, 1.0, 1.0
    assert top(tiny, scores, Budget(layers="0.25"), selector="s") == [tiny.names[i] for i in (9, 3, 5, 0)]


@pytest.mark.parametrize(
    ("fraction", "rounding", "count"),
    [(".55", "ceil", 11), (".55", "floor", 11), (".56", "ceil", 12), (".56", "floor", 11), ("1", "ceil", 20)],
)
def test_the_count_is_exact_in_decimals(profile_of, fraction, rounding, count):
    profile = profile_of(5, {"a": (2, 3), "b": (5, 2), "c": (1, 1), "d": (3, 3)})
    assert len(top(profile, range(20), Budget(layers=fraction), rounding=rounding, selector="s")) == count


def test_a_float_ceiling_would_be_wrong(profile_of):
    profile = profile_of(25, {"a": (2, 3), "b": (5, 2), "c": (1, 1), "d": (3, 3)})
    assert math.ceil(0.55 * 100) == 56  # the mistake
    assert len(top(profile, range(100), Budget(layers=0.55), selector="s")) == 55


def test_the_prefix_stops_at_the_first_layer_that_does_not_fit(tiny):
    order = [2, 6, 1, 10, 0]  # 48 + 48 + 8 parameters, then 48 does not fit into 150 and 16 would
    scores = np.zeros(16)
    scores[order] = [5, 4, 3, 2, 1]
    assert tiny.parameters == 480
    assert top(tiny, scores, Budget(bytes=300), selector="s") == [tiny.names[i] for i in (2, 6, 1)]
    assert top(tiny, scores, Budget(parameters="0.3125"), selector="s") == [tiny.names[i] for i in (2, 6, 1)]


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
    st.integers(16, 1200),
)
def test_the_longest_prefix_that_never_exceeds(scores, budget):
    from toolkit.records.profile import Profile

    profile = _small()
    assert isinstance(profile, Profile)
    order = sorted(range(16), key=lambda i: (-scores[i], i))
    costs = [profile.layers[i].bytes for i in order]
    expected = max(k for k in range(17) if sum(costs[:k]) <= budget)
    if expected == 0:
        with pytest.raises(InputError, match="selects nothing"):
            top(profile, scores, Budget(bytes=budget), selector="s")
    else:
        chosen = top(profile, scores, Budget(bytes=budget), selector="s")
        assert chosen == [profile.names[i] for i in order[:expected]]


def _small():
    from toolkit.records.profile import LayerProfile, Profile, Reference

    rows = [
        LayerProfile(
            name=f"l{i}", tensor="t", role="r", block=i // 4, shape=(i + 4, 2), parameters=2 * i + 8, bytes=4 * i + 16,
            norm=1.0, density=1.0,
        )
        for i in range(16)
    ]  # fmt: skip
    return Profile(model="m", fingerprint="f", reference=Reference(dtype="float16", note="n"), blocks=4, layers=rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "much", None])
def test_a_score_that_is_no_finite_number_names_the_layer(tiny, bad):
    scores = [1.0] * 16
    scores[7] = bad
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.down .*no finite number"):
        top(tiny, scores, Budget(layers=0.5), selector="mine")


@pytest.mark.parametrize("scores", [[1.0] * 15, [], 3.0])
def test_scores_of_the_wrong_length(tiny, scores):
    with pytest.raises(InputError, match="16"):
        top(tiny, scores, Budget(layers=0.5), selector="mine")


def test_a_budget_that_selects_nothing_says_what_the_smallest_costs(tiny):
    with pytest.raises(InputError, match=r"model\.layers\.0\.attn\.k, costs 16 bytes"):
        top(tiny, range(16), Budget(bytes=15), selector="s")
    with pytest.raises(InputError, match=r"first layer, model\.layers\.3\.mlp\.down, costs 48 parameters"):
        top(tiny, range(16), Budget(parameters="0.05"), selector="s")
    with pytest.raises(InputError, match=r"one of 16 layers is layers=0\.0625"):
        top(tiny, range(16), Budget(layers="0.06"), rounding="floor", selector="s")
