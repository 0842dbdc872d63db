"""Rows in NVFP4 back to values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.kernels.launching import Shape, parts
from toolkit_plugins.dataflows.pact.kernels.tiles import load_rows, place_words
from toolkit_plugins.quantizers.nvfp4_rows import Rows


@triton.jit
def unpack_kernel(
    codes_ptr, scales_ptr, g_ptr, values_ptr, count, width, ROWS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """x̂ of rows."""
    row, column, there = place_words(count, width, ROWS, WORDS)
    values = load_rows(codes_ptr, scales_ptr, g_ptr, count, width, ROWS, WORDS)
    tl.store(values_ptr + row * width + column, values.to(values_ptr.dtype.element_ty), mask=there)


def unpack(rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """x̂ (M, K) of rows, rounded to `dtype` where it cannot hold it."""
    shape = Shape(len(rows.g), rows.width)
    values = torch.empty(shape.count, shape.width, dtype=dtype, device=rows.g.device)
    if values.numel():
        with torch.cuda.device_of(values):
            unpack_kernel[shape.grid](
                *parts(rows), values, shape.count, shape.width,
                ROWS=shape.rows, WORDS=2 * shape.blocks, num_warps=shape.warps(),
            )  # fmt: skip
    return values
