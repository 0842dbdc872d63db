from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import toolkit as tk
from toolkit.selection.similarity import average_ranks, jaccard, spearman


def test_jaccard(tiny):
    top = tk.select("top-error", tiny, "layers=0.5")
    bottom = tk.select("bottom-error", tiny, "layers=0.5")
    every, none = tk.select("all", tiny), tk.select("none", tiny)
    found = jaccard([top, bottom, every, none])
    expected = [[1, 0, 0.5, 0], [0, 1, 0.5, 0], [0.5, 0.5, 1, 0], [0, 0, 0, 1]]
    assert found.dtype == np.float64 and found.tolist() == expected
    assert jaccard([]).shape == (0, 0)


def test_selections_of_two_models_are_not_compared(tiny, profile_of):
    other = profile_of(4, {"attn.q": (4, 4)}, model="other")
    with pytest.raises(tk.InputError, match="tiny and other"):
        jaccard([tk.select("all", tiny), tk.select("all", other)])


@given(st.lists(st.tuples(*[st.integers(-3, 3)] * 3), min_size=3, max_size=30))
def test_spearman_equals_scipy_with_ties(rows):
    columns = {f"s{i}": [row[i] for row in rows] for i in range(3)}
    found = spearman(columns)
    for i in range(3):
        assert np.array_equal(average_ranks(np.array(columns[f"s{i}"])), scipy.stats.rankdata(columns[f"s{i}"]))
        for j in range(3):
            a, b = columns[f"s{i}"], columns[f"s{j}"]
            if len(set(a)) == 1 or len(set(b)) == 1:
                assert np.isnan(found[i, j])
            else:
                assert found[i, j] == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-12)


@pytest.mark.parametrize("bad", [[1.0, 2.0], [1.0], [1.0, float("nan"), 2.0]])
def test_scores_that_cannot_be_ranked(bad):
    with pytest.raises(tk.InputError, match="'b'"):
        spearman({"a": [1.0, 2.0, 3.0], "b": bad})
