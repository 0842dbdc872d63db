"""Triton: a product that unpacks the weight's tiles in registers, so that no dense weight is written to memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.products.decoding import e2m1, e4m3

TILE = {"M": 64, "N": 128, "K": 64}
"""Our choice; more tokens a program than these 64 would unpack each tile less often."""


@triton.jit
def multiply_packed(
    x, codes, scales, g, bias, y, count, width, depth, blocks, x_step,
    BIAS: tl.constexpr, DOWN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y (count, width) = g·x·Uᵀ + b for U (width, depth); under DOWN g·x·U for U (depth, width); summed in float32.

    `blocks` are those of a row of U.
    """
    m = tl.program_id(0) * M + tl.arange(0, M)
    first = tl.program_id(1) * N
    n = first + tl.arange(0, N)
    here = tl.arange(0, 8)[None, None, :]
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, depth, K):
        k = start + tl.arange(0, K)
        left = tl.load(
            x + m.to(tl.int64)[:, None] * x_step + k[None, :],
            mask=(m < count)[:, None] & (k < depth)[None, :],
            other=0.0,
        )
        if DOWN:
            block = first // 16 + tl.arange(0, N // 16)
            place = k.to(tl.int64)[:, None] * blocks + block[None, :]
            inside = (k < depth)[:, None] & (block < blocks)[None, :]
        else:
            block = start // 16 + tl.arange(0, K // 16)
            place = n.to(tl.int64)[:, None] * blocks + block[None, :]
            inside = (n < width)[:, None] & (block < blocks)[None, :]
        s = e4m3(tl.load(scales + place, mask=inside, other=0))
        pair = tl.load(codes + (place * 8)[:, :, None] + here, mask=inside[:, :, None], other=0)
        if DOWN:
            code = tl.reshape(tl.join(pair & 15, pair >> 4), (K, N // 16, 16))
            right = tl.reshape(e2m1(code) * s[:, :, None], (K, N)).to(left.dtype)
        else:
            code = tl.reshape(tl.join(pair & 15, pair >> 4), (N, K // 16, 16))
            right = tl.trans(tl.reshape(e2m1(code) * s[:, :, None], (N, K)).to(left.dtype))
        total = tl.dot(left, right, total, input_precision="ieee")
    total = total * tl.load(g)
    if BIAS:
        total = total + tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    to = m.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(y + to, total.to(y.dtype.element_ty), mask=(m < count)[:, None] & (n < width)[None, :])


def multiply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    bias: torch.Tensor | None,
    width: int,
    *,
    down: bool,
) -> torch.Tensor:
    """g·x·Uᵀ + b, or under `down` g·x·U, (M, width) in the dtype of x.

    Args:
        x: (M, depth).
        codes: of U, uint8 (rows, 8·blocks).
        scales: E4M3 (rows, blocks).
        g: float32, one, read on the device.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (count, depth), y = x.shape, x.new_empty(x.shape[0], width)
    if not y.numel():
        return y
    grid = (triton.cdiv(count, TILE["M"]), triton.cdiv(width, TILE["N"]))
    with torch.cuda.device_of(x):
        multiply_packed[grid](
            x, codes, scales.view(torch.uint8), g, g if bias is None else bias, y,
            count, width, depth, scales.shape[1], x.stride(0),
            BIAS=bias is not None, DOWN=down, **TILE, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y
