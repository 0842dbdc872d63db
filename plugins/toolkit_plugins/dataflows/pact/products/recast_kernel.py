"""Triton: NVFP4 as E4M3 under row scales 1.5·2ᵏ (`recast`), rounded in integers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.products.decoding import e2m1, e4m3

CHUNK = 256
"""Blocks of 16 that a program holds at a time."""
TILE_ROWS, TILE_BLOCKS = 64, 8
"""A tile that is turned over."""


@triton.jit
def rounded(x):
    """The E4M3 byte of a float32 |x| ≤ 448 that is two thirds of a number of six bits, to within seven ulps.

    Such a number is a tie of E4M3 only if it is exact in a few bits, which are found by rounding the last four away.
    To nearest, ties to even; subnormal numbers by adding 2¹⁴, whose ulp is theirs.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 128
    bits = ((bits & 0x7FFFFFFF) + 8) & 0xFFFFFFF0
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    size = bits.to(tl.float32, bitcast=True)
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 15
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def power(k):
    """2ᵏ, float32."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def recast_rows(codes, scales, g, out, out_scales, blocks, g_step, CHUNK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, CHUNK)
    tops = tl.zeros([CHUNK], tl.int32)
    for start in range(0, blocks, CHUNK):
        inside = start + block < blocks
        tops = tl.maximum(tops, tl.load(scales + row * blocks + start + block, mask=inside, other=0).to(tl.int32))
    k = (((tl.max(tops, 0) & 127) + 1) >> 3) - 13
    tl.store(out_scales + row, tl.load(g + row * g_step) * (power(k) * 1.5))
    inverse = power(-k) * 0.6666666865348816
    for start in range(0, blocks, CHUNK):
        inside = start + block < blocks
        s = e4m3(tl.load(scales + row * blocks + start + block, mask=inside, other=0)) * inverse
        place = (start + block)[:, None] * 8 + tl.arange(0, 8)[None, :]
        pair = tl.load(codes + row * blocks * 8 + place, mask=inside[:, None], other=0)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (CHUNK, 16))
        to = (start + block)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out + row * blocks * 16 + to, rounded(e2m1(code) * s[:, None]), mask=inside[:, None])


@triton.jit
def recast_columns(
    codes, scales, g, tops, out, out_scales, rows, blocks, out_width, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    """A tile of rows × blocks a program, turned over; columns of `out` beyond `rows` are zero."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    k = (((tl.load(tops + block, mask=block < blocks, other=0).to(tl.int32) & 127) + 1) >> 3) - 13
    inside = (row < rows)[:, None] & (block < blocks)[None, :]
    place = row.to(tl.int64)[:, None] * blocks + block[None, :]
    s = e4m3(tl.load(scales + place, mask=inside, other=0)) * (power(-k) * 0.6666666865348816)[None, :]
    pair = tl.load(codes + (place * 8)[:, :, None] + tl.arange(0, 8)[None, None, :], mask=inside[:, :, None], other=0)
    code = tl.reshape(tl.join(pair & 15, pair >> 4), (ROWS, BLOCKS, 16))
    byte = tl.trans(tl.reshape(rounded(e2m1(code) * s[:, :, None]), (ROWS, BLOCKS * 16)))
    column = tl.program_id(1) * BLOCKS * 16 + tl.arange(0, BLOCKS * 16)
    to = column.to(tl.int64)[:, None] * out_width + row[None, :]
    tl.store(out + to, byte, mask=(column < blocks * 16)[:, None] & (row < out_width)[None, :])
    if tl.program_id(0) == 0:
        scale = tl.load(g) * (power(k) * 1.5)
        wide = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCKS, 16)), (BLOCKS * 16,))
        tl.store(out_scales + column, wide, mask=column < blocks * 16)


def recast_rows_into(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Into `out`, E4M3 (at least rows, 16·blocks), the rest zero under a scale of 1; gives the row scales, float32."""
    (rows, blocks), found = scales.shape, torch.empty(out.shape[0], dtype=torch.float32, device=out.device)
    bits = scales.view(torch.uint8)
    chunk = min(CHUNK, triton.next_power_of_2(blocks))
    step = int(g.numel() > 1)
    into = out.view(torch.uint8)
    if rows < out.shape[0]:
        into[rows:] = 0
        found[rows:] = 1
    if rows:
        with torch.cuda.device_of(out):
            recast_rows[(rows,)](codes, bits, g, into, found, blocks, step, CHUNK=chunk, num_warps=4)
    return found


def recast_columns_into(
    out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, g: torch.Tensor, tops: torch.Tensor
) -> torch.Tensor:
    """Into `out`, E4M3 (16·blocks, at least rows); gives its row scales, float32."""
    (rows, blocks), found = scales.shape, torch.empty(out.shape[0], dtype=torch.float32, device=out.device)
    grid = (triton.cdiv(out.shape[1], TILE_ROWS), triton.cdiv(blocks, TILE_BLOCKS))
    bits = scales.view(torch.uint8)
    with torch.cuda.device_of(out):
        recast_columns[grid](
            codes, bits, g, tops, out.view(torch.uint8), found, rows, blocks, out.shape[1],
            ROWS=TILE_ROWS, BLOCKS=TILE_BLOCKS, num_warps=4,
        )  # fmt: skip
    return found
