"""What every kernel does with its rows: where they lie, rounding them to NVFP4, storing and reading that."""

import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.kernels.e2m1 import (
    near_quotient,
    nearest,
    quotient,
    signed,
    stochastic,
    unpacked,
    words,
)
from toolkit_plugins.dataflows.pact.kernels.e4m3 import block_scale, row_scale, scale_value


@triton.jit
def place(count, width, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """(rows int64 (ROWS, 1, 1), columns (1, BLOCKS, 16), which of them are there) of this program's tile."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    column = tl.arange(0, BLOCKS)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    return row, column, (row < count) & (column < width)


@triton.jit
def load(pointer, stride, other, count, width, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """A tile (ROWS, BLOCKS, 16) in float32, the blocks' halves apart, so that one thread holds the whole of a block."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    column = tl.arange(0, BLOCKS)[None, :, None] * 16 + tl.arange(0, 8)[None, None, :]
    at, there = pointer + row * stride + column, row < count
    first = tl.load(at, mask=there & (column < width), other=other)
    second = tl.load(at + 8, mask=there & (column + 8 < width), other=other)
    return _whole(first, second, ROWS, BLOCKS)


@triton.jit
def load_weight(pointer, width, BLOCKS: tl.constexpr):
    """A vector as a tile (1, BLOCKS, 16) in float32, as `load` holds it."""
    column = tl.arange(0, BLOCKS)[None, :, None] * 16 + tl.arange(0, 8)[None, None, :]
    first = tl.load(pointer + column, mask=column < width, other=0.0)
    second = tl.load(pointer + column + 8, mask=column + 8 < width, other=0.0)
    return _whole(first, second, 1, BLOCKS)


@triton.jit
def _whole(first, second, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), (ROWS, BLOCKS, 16)).to(tl.float32)


@triton.jit
def round_tile(x, noise, STOCHASTIC: tl.constexpr, SHORT: tl.constexpr):
    """NVFP4 of float32 rows (R, B, 16): (codes, their sizes, s·g (R, B), E4M3 codes (R, B), g (R,)).

    Args:
        noise: as x, read where the rounding is stochastic.
        SHORT: whether x comes from a 16-bit format.
    """
    sizes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    blockmax = tl.max(sizes, axis=2)
    g, inverse = row_scale(tl.max(blockmax, axis=1))
    scale, s = block_scale(blockmax, inverse[:, None], STOCHASTIC)
    step = s * g[:, None]
    sizes, reciprocal = sizes.to(tl.float32, bitcast=True), (1.0 / step)[:, :, None]
    if SHORT and not STOCHASTIC:
        ratio = near_quotient(sizes, reciprocal)
    else:
        ratio = quotient(sizes, step[:, :, None], reciprocal)
    if STOCHASTIC:
        codes, levels = stochastic(ratio, noise)
    else:
        codes, levels = nearest(ratio)
    return codes, levels, step, scale, g


@triton.jit
def store_rows(
    codes_ptr, scales_ptr, g_ptr, codes, x, scale, g, count, width, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Write codes (as words), scales and g of this program's rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)[None, :]
    blocks = (width + 15) // 16
    there = (row[:, None] < count) & (block < blocks)
    at = row[:, None] * blocks + block
    two = tl.arange(0, 2)[None, None, :]
    tl.store(codes_ptr + at[:, :, None] * 2 + two, words(codes, x, ROWS, BLOCKS), mask=there[:, :, None])
    tl.store(scales_ptr + at, scale.to(tl.uint8), mask=there)
    tl.store(g_ptr + row, g, mask=row < count)


@triton.jit
def values_of(levels, x, step):
    """x̂ of a rounded tile in float32, exactly."""
    return signed(levels, x) * step[:, :, None]


@triton.jit
def load_rows(codes_ptr, scales_ptr, g_ptr, count, width, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """x̂ of this program's rows as float32 (ROWS, WORDS, 8)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)[None, :]
    blocks = (width + 15) // 16
    there = (row[:, None] < count) & (word < 2 * blocks)
    code = tl.load(codes_ptr + row[:, None] * (2 * blocks) + word, mask=there, other=0)
    scale = tl.load(scales_ptr + row[:, None] * blocks + word // 2, mask=there, other=0)
    g = tl.load(g_ptr + row, mask=row < count, other=1.0)
    return unpacked(code) * (scale_value(scale) * g[:, None])[:, :, None]


@triton.jit
def place_words(count, width, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """As `place`, of a tile (ROWS, WORDS, 8)."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    column = tl.arange(0, WORDS)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    return row, column, (row < count) & (column < width)
