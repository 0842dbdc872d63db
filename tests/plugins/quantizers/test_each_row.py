"""Activations rounded a row at a time: as if every row were a tensor of its own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import toolkit as tk
from toolkit.errors import InputError

KEYS = ["nvfp4", "mxfp4", "nf4", "fp4-e2m1"]


def rows(count: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose sizes differ by orders of magnitude, one of them zero where there are three."""
    made = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    made *= 10.0 ** torch.arange(count)[:, None].remainder(7).sub(3)
    if count > 2:
        made[2] = 0
    return made.to(dtype)


def alike(quantizer: tk.Quantizer, row: torch.Tensor) -> tk.Quantizer:
    """The quantizer whose tensor scale for this row is what a row has: for NVFP4 the next power of two, as 2688·g."""
    if quantizer.name != "nvfp4" or not row.any():
        return quantizer
    g = max(float(row.abs().max().float() / 2688), 2.0**-120)
    return tk.quantizer("nvfp4", amax=2688.0 * 2.0 ** math.ceil(math.log2(g)))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(count=st.integers(1, 9), columns=st.integers(1, 70), seed=st.integers(0, 1000))
def test_every_row_is_quantized_alone(key, dtype, count, columns, seed):
    """Bit for bit what quantizing the row by itself gives."""
    quantizer, x = tk.quantizer(key), rows(count, columns, seed, dtype)
    alone = torch.cat([alike(quantizer, row).quantize(row[None]).dequantize() for row in x])
    found = quantizer.each_row(x)
    assert found.dtype == dtype and torch.equal(found, alone)


@pytest.mark.parametrize("key", KEYS)
def test_no_row_sees_another(key):
    """The same token in another batch, of any number of dimensions, is rounded alike; a shared scale would not."""
    quantizer, x = tk.quantizer(key), rows(6, 48, 5, torch.float32)
    assert torch.equal(quantizer.each_row(x.view(2, 3, 48)).view(6, 48)[:2], quantizer.each_row(x[:2]))
    assert torch.equal(quantizer.each_row(x[1]), quantizer.each_row(x)[1])
    assert quantizer.each_row(x[:0]).shape == (0, 48)
    if key == "nvfp4":
        assert not torch.equal(quantizer.each_row(x), quantizer.quantize(x).dequantize())


def test_not_finite():
    with pytest.raises(InputError, match="NaN or infinity"):
        tk.quantizer("nvfp4").each_row(torch.tensor([[1.0, float("nan")]]))
