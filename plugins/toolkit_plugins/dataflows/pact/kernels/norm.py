"""RMSNorm with its rounding, and its gradient from what it gave."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.kernels.launching import Shape, empty_rows, lying, parts, rows_of
from toolkit_plugins.dataflows.pact.kernels.tiles import (
    load,
    load_rows,
    load_weight,
    place,
    place_words,
    round_tile,
    store_rows,
    values_of,
)
from toolkit_plugins.quantizers.nvfp4_rows import Rows

GRADIENT_TILE = 8192
"""Values a program of the gradient: its rows share the weight's reciprocals."""


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, codes_ptr, scales_ptr, g_ptr, rstd_ptr, y_ptr,
    count, width, stride, eps,
    ROUNDED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """y = w ∘ x·rstd: its NVFP4 rows, rstd, and ŷ or y."""
    row, column, there = place(count, width, ROWS, BLOCKS)
    x = load(x_ptr, stride, 0.0, count, width, ROWS, BLOCKS)
    weight = load_weight(weight_ptr, width, BLOCKS)
    mean = tl.sum(tl.sum(x * x, axis=2), axis=1) / width
    rstd = tl.rsqrt(mean + eps)
    y = x * rstd[:, None, None] * weight
    codes, levels, step, scale, g = round_tile(y, y, False, False)
    store_rows(codes_ptr, scales_ptr, g_ptr, codes, y, scale, g, count, width, ROWS, BLOCKS)
    lines = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(rstd_ptr + lines, rstd, mask=lines < count)
    if ROUNDED:
        y = values_of(levels, y, step)
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def norm_gradient_kernel(
    gradient_ptr, codes_ptr, scales_ptr, g_ptr, y_ptr, weight_ptr, rstd_ptr, dx_ptr,
    count, width, stride, y_stride,
    PACKED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """∂x = rstd·(h − n·mean(h ∘ n)), n = y/w, h = ∂y ∘ w."""
    row, column, there = place_words(count, width, ROWS, WORDS)
    gradient = tl.load(gradient_ptr + row * stride + column, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    lines = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rstd = tl.load(rstd_ptr + lines, mask=lines < count, other=0.0)
    if PACKED:
        y = load_rows(codes_ptr, scales_ptr, g_ptr, count, width, ROWS, WORDS)
    else:
        y = tl.load(y_ptr + row * y_stride + column, mask=there, other=0.0).to(tl.float32)
    inverse = tl.where(weight == 0, 0.0, 1.0 / weight)
    mean = tl.sum(tl.sum(gradient * y, axis=2), axis=1) / width  # h ∘ n = ∂y ∘ y, as y is 0 where w is
    dx = rstd[:, None, None] * (gradient * weight - y * inverse * mean[:, None, None])
    tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=there)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, *, rounded: bool
) -> tuple[torch.Tensor, Rows, torch.Tensor]:
    """(ŷ or y, ŷ's rows, rstd) of RMSNorm over x (M, K); `Execution.norm`."""
    x = lying(x)
    shape = Shape(*x.shape)
    made = empty_rows(shape, x.device)
    rstd = torch.empty(shape.count, dtype=torch.float32, device=x.device)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        with torch.cuda.device_of(x):
            norm_kernel[shape.grid](
                x, weight.contiguous(), *made, rstd, y, shape.count, shape.width, x.stride(0), eps,
                ROUNDED=rounded, ROWS=shape.rows, BLOCKS=shape.blocks, num_warps=shape.warps(),
            )  # fmt: skip
    return y, rows_of(made, shape.width), rstd


def norm_gradient(
    gradient: torch.Tensor, y: Rows | torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> torch.Tensor:
    """∂x (M, K) of `norm` from its output; `Execution.norm_gradient`."""
    gradient = lying(gradient)
    shape = Shape(*gradient.shape, tile=GRADIENT_TILE)
    dx = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    packed = isinstance(y, Rows)
    kept = (*parts(y), None) if packed else (None, None, None, lying(y))
    if dx.numel():
        with torch.cuda.device_of(dx):
            norm_gradient_kernel[shape.grid](
                gradient, *kept, weight.contiguous(), rstd, dx,
                shape.count, shape.width, gradient.stride(0), 0 if packed else kept[-1].stride(0),
                PACKED=packed, ROWS=shape.rows, WORDS=2 * shape.blocks, num_warps=shape.warps(),
            )  # fmt: skip
    return dx
