"""Second moments of inputs, against float64 sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.runs.starting import moments
from toolkit.runs.starting.moments import Gathered


def exact(rows: torch.Tensor) -> torch.Tensor:
    wide = rows.double()
    return wide.T @ wide / len(wide)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_token_counts_alike_whatever_its_batch(sizes, width, seed):
    """A batch of one token weighs a fifth of a batch of five; means of batches' means would not say so."""
    rows = torch.randn(sum(sizes), width, generator=torch.Generator().manual_seed(seed)) * 3 + 1
    gathered = Gathered()
    for part in rows.split(sizes):
        assert gathered.add(part)
    found = gathered.moments("nvfp4")
    assert found.tokens == sum(sizes) and found.activations == "nvfp4" and found.second.dtype == torch.float32
    assert torch.equal(found.second, found.second.T)
    assert (found.second.double() - exact(rows)).abs().max() <= 1e-6 * exact(rows).abs().max()


def test_inputs_of_one_two_and_three_dimensions_are_the_same_tokens():
    rows = torch.randn(12, 5, dtype=torch.bfloat16)
    shapes = [rows.view(3, 4, 5), rows, rows.view(2, 2, 3, 5)]
    found = []
    for inputs in [*([each] for each in shapes), list(rows)]:
        gathered = Gathered()
        assert all(gathered.add(each) for each in inputs)
        found.append(gathered.moments())
    assert all(each.tokens == 12 for each in found)
    assert all((each.second.double() - exact(rows)).abs().max() < 1e-6 for each in found)


def test_padding_is_never_counted():
    rows = torch.randn(2, 4, 5)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    rows[mask == 0] = float("nan")
    gathered = Gathered()
    assert gathered.add(rows, mask)
    found = gathered.moments()
    assert found.tokens == 6
    assert (found.second.double() - exact(rows[mask.bool()])).abs().max() < 1e-6


def test_wide_layers_sum_in_float32(monkeypatch):
    monkeypatch.setattr(moments, "WIDEST", 4)
    gathered, rows = Gathered(), torch.randn(40, 5)
    for row in rows:
        gathered.add(row)
    assert gathered._sum.dtype == torch.float32
    assert (gathered.moments().second.double() - exact(rows)).abs().max() < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_not_finite_is_told(bad):
    gathered, rows = Gathered(), torch.ones(3, 2)
    rows[1, 1] = bad
    assert not gathered.add(rows)


def test_nothing_seen():
    gathered = Gathered()
    assert gathered.moments() is None
    assert gathered.add(torch.zeros(0, 4)) and gathered.moments() is None
