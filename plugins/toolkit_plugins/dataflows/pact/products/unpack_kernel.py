"""Triton: an NVFP4 weight without its tensor scale, s·e2m1(code)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.products.decoding import e2m1, e4m3

BLOCKS = 256
"""Blocks of 16 a program."""


@triton.jit
def unpack_whole(codes, scales, out, total, BLOCKS: tl.constexpr):
    """Rows are whole blocks, so that the weight is one run of `total` blocks."""
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    inside = start + block < total
    s = e4m3(tl.load(scales + start + block, mask=inside, other=0))
    place = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    pair = tl.load(codes + start * 8 + place, mask=inside[:, None], other=0)
    code = tl.reshape(tl.join(pair & 15, pair >> 4), (BLOCKS, 16))
    values = (e2m1(code) * s[:, None]).to(out.dtype.element_ty)
    to = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + start * 16 + to, values, mask=inside[:, None])


@triton.jit
def unpack_short(codes, scales, out, total, columns, blocks, BLOCKS: tl.constexpr):
    """Rows end in a short block: `columns` values in `blocks` blocks; codes run on from row to row."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    s = e4m3(tl.load(scales + block, mask=block < total, other=0))
    row, first = block // blocks, (block % blocks) * 16
    column = first[:, None] + tl.arange(0, 16)[None, :]
    place = row[:, None] * columns + column
    inside = (block < total)[:, None] & (column < columns)
    pair = tl.load(codes + place // 2, mask=inside, other=0)
    code = tl.where(place % 2 == 1, pair >> 4, pair & 15)
    tl.store(out + place, (e2m1(code) * s[:, None]).to(out.dtype.element_ty), mask=inside)


def unpack_into(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """s·e2m1(code) into `out` (rows, columns), contiguous, which is given back.

    Args:
        codes: uint8, two a byte in row-major order, the first in the low half.
        scales: float8_e4m3fn (rows, ⌈columns/16⌉).
    """
    columns, total = out.shape[1], scales.numel()
    grid, bits = (triton.cdiv(total, BLOCKS),), scales.view(torch.uint8)
    with torch.cuda.device_of(out):
        if columns % 16 == 0:
            unpack_whole[grid](codes, bits, out, total, BLOCKS=BLOCKS, num_warps=4)
        else:
            unpack_short[grid](codes, bits, out, total, columns, scales.shape[1], BLOCKS=BLOCKS, num_warps=4)
    return out
