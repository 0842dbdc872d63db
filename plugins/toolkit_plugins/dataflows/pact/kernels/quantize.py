"""Rows rounded to NVFP4, to nearest or stochastically, as codes, as values, or both, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.kernels.launching import Shape, empty_rows, lying, rows_of
from toolkit_plugins.dataflows.pact.kernels.tiles import load, place, round_tile, store_rows, values_of
from toolkit_plugins.quantizers.nvfp4_rows import Rows

NEAREST, GIVEN, DRAWN = 0, 1, 2
"""Where the noise comes from."""
_GIVEN = tl.constexpr(GIVEN)
_DRAWN = tl.constexpr(DRAWN)


@triton.jit
def _uniform(seed, row, width, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Numbers in [0, 1) (ROWS, BLOCKS, 16), a function of seed, row and column alone; four a draw of Philox."""
    four = tl.arange(0, BLOCKS)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    a, b, c, d = tl.randint4x(seed, row * (4 * ((width + 15) // 16)) + four)
    drawn = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS, BLOCKS, 16))
    return (drawn.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2⁻²⁴


@triton.jit
def quantize_kernel(
    x_ptr, noise_ptr, codes_ptr, scales_ptr, g_ptr, values_ptr,
    count, width, stride, noise_stride,
    MODE: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """NVFP4 of x's rows; `noise_ptr` points to noise or, where it is drawn, to the seed."""
    row, column, there = place(count, width, ROWS, BLOCKS)
    x = load(x_ptr, stride, 0.0, count, width, ROWS, BLOCKS)
    if MODE == _GIVEN:
        noise = load(noise_ptr, noise_stride, 1.0, count, width, ROWS, BLOCKS)
    elif MODE == _DRAWN:
        noise = _uniform(tl.load(noise_ptr), row, width, BLOCKS, ROWS)
    else:
        noise = x
    short: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    codes, levels, step, scale, g = round_tile(x, noise, MODE != 0, short)
    if CODES:
        store_rows(codes_ptr, scales_ptr, g_ptr, codes, x, scale, g, count, width, ROWS, BLOCKS)
    if VALUES:
        values = values_of(levels, x, step).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row * width + column, values, mask=there)


def quantize(
    x: torch.Tensor,
    *,
    noise: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    codes: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Rows | None, torch.Tensor | None]:
    """(NVFP4 of each row of x (M, K), x̂ (M, K)), each where it is asked for.

    Args:
        x: float32, float16 or bfloat16; rows may lie apart.
        noise: (M, K) in [0, 1) for stochastic rounding, as in `quantize_rows`.
        seed: an integer on the device, that such noise is drawn from in the kernel.
        codes: give the rows.
        dtype: give x̂ in it.
    """
    x = lying(x)
    shape = Shape(*x.shape)
    made = empty_rows(shape, x.device) if codes else (None, None, None)
    values = None if dtype is None else torch.empty(x.shape, dtype=dtype, device=x.device)
    mode = GIVEN if noise is not None else DRAWN if seed is not None else NEAREST
    noise = lying(noise) if noise is not None else seed
    if x.numel():
        with torch.cuda.device_of(x):
            quantize_kernel[shape.grid](
                x, noise, *made, values,
                shape.count, shape.width, x.stride(0), noise.stride(0) if mode == GIVEN else 0,
                MODE=mode, CODES=codes, VALUES=values is not None,
                ROWS=shape.rows, BLOCKS=shape.blocks, num_warps=shape.warps(),
            )  # fmt: skip
    return (rows_of(made, shape.width) if codes else None), values
