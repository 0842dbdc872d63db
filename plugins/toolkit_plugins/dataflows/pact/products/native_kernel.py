"""Triton: a product of two NVFP4 matrices by the block-scaled matrix instruction of Blackwell GPUs.

For compute capabilities 10.x and 12.x; Triton computes it in bfloat16 on other GPUs, or refuses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = {"M": 128, "N": 128, "K": 256}
"""Our choice: the instruction of capability 10.x takes 128 rows."""


@triton.jit
def multiply_blocks(
    left, left_scales, left_g, right, right_scales, right_g, bias, y, count, width, blocks,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y (count, width) = g_left·g_right·Σ (s·code)(s·code) + b over rows of `blocks` blocks of 16; float32 sums."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    byte = tl.arange(0, K // 2)
    block = tl.arange(0, K // 16)
    left_row, right_row = m.to(tl.int64) * blocks, n.to(tl.int64) * blocks
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, blocks, K // 16):
        there, whole = start * 8 + byte < blocks * 8, start + block < blocks
        a = tl.load(
            left + (left_row * 8 + start * 8)[:, None] + byte[None, :],
            mask=(m < count)[:, None] & there[None, :],
            other=0,
        )
        b = tl.load(
            right + (right_row * 8 + start * 8)[None, :] + byte[:, None],
            mask=(n < width)[None, :] & there[:, None],
            other=0,
        )
        a_scales = tl.load(
            left_scales + (left_row + start)[:, None] + block[None, :],
            mask=(m < count)[:, None] & whole[None, :],
            other=0,
        ).to(tl.float8e4nv, bitcast=True)
        b_scales = tl.load(
            right_scales + (right_row + start)[:, None] + block[None, :],
            mask=(n < width)[:, None] & whole[None, :],
            other=0,
        ).to(tl.float8e4nv, bitcast=True)
        total = tl.dot_scaled(a, a_scales, "e2m1", b, b_scales, "e2m1", total)
    g = tl.load(left_g + m, mask=m < count, other=0.0)
    total = (total * tl.load(right_g)) * g[:, None]
    if BIAS:
        total = total + tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    to = m.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(y + to, total.to(y.dtype.element_ty), mask=(m < count)[:, None] & (n < width)[None, :])


def multiply(
    left: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    right: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    width: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(M, width) in `dtype`.

    Args:
        left: codes uint8 (M, 8·blocks), E4M3 scales (M, blocks), g float32 (M,).
        right: codes (width, 8·blocks), scales (width, blocks), g float32, one.
        bias: (width,) of any dtype.
    """
    (codes, scales, g), (their_codes, their_scales, their_g) = left, right
    count, blocks = scales.shape
    y = torch.empty(count, width, dtype=dtype, device=codes.device)
    if not y.numel():
        return y
    grid = (triton.cdiv(count, TILE["M"]), triton.cdiv(width, TILE["N"]))
    with torch.cuda.device_of(y):
        multiply_blocks[grid](
            codes, scales.view(torch.uint8), g, their_codes, their_scales.view(torch.uint8), their_g,
            their_g if bias is None else bias, y, count, width, blocks,
            BIAS=bias is not None, **TILE, num_warps=8, num_stages=3,
        )  # fmt: skip
    return y
