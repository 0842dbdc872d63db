"""E2M1 in registers: division by a short number, rounding, packing into words, and back."""

import triton
import triton.language as tl

_OCTAVE = tl.constexpr(0x7F800000)
_MAGIC = tl.constexpr((22 << 23) + 0x400002)
_CUT = tl.constexpr(-32)


@triton.jit
def quotient(x, by, reciprocal):
    """x/by, rounded once as IEEE division is, of float32 numbers where `by` has at most five significant bits.

    A first quotient is cut to 19 bits, so that its product with `by` and the remainder are exact, fused or not. What
    is added then is right to 2⁻⁴⁰ of the quotient, while x/by lies at least 2⁻³⁰ of itself from any number halfway
    between two floats (a 24-bit integer over one below 32). x must be 0 or at least 2⁻¹⁰², `reciprocal` right to 2⁻²⁰.
    """
    first = ((x * reciprocal).to(tl.int32, bitcast=True) & _CUT).to(tl.float32, bitcast=True)
    return first + (x - first * by) * reciprocal


@triton.jit
def near_quotient(x, reciprocal):
    """A number on the same side of every midpoint of E2M1's levels as x/by, or the midpoint itself where that is.

    Of x with at most eleven significant bits (float16, bfloat16) and `by` with four, x/by is a midpoint or at least
    2⁻¹¹ of itself away. Enlarged by 2⁻²⁰, which outweighs the reciprocal's error of up to 2⁻²¹, and cut to 19 bits, a
    midpoint comes out as itself, and nothing else crosses it.
    """
    grown = x * (reciprocal * 1.00000095367431640625)
    return (grown.to(tl.int32, bitcast=True) & _CUT).to(tl.float32, bitcast=True)


@triton.jit
def nearest(size):
    """(code, level) of sizes in 0 … 7, ties to the even code; the last three bits alone are the code's.

    Levels of the octave p = max(1, 2^⌊log₂ size⌋) are p/2 apart, as floats are at 1.5·2²²·p: adding that rounds, and
    leaves the number of steps in the sum's last bits. An octave above the first starts two codes later: twice its
    exponent, of which 2·127 + 2 is 0 in three bits; those last 2 are steps that the number added has more.
    """
    octave = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & _OCTAVE
    magic = (octave + _MAGIC).to(tl.float32, bitcast=True)
    moved = size + magic
    return moved.to(tl.int32, bitcast=True) + (octave >> 22), moved - magic


@triton.jit
def stochastic(size, noise):
    """As `nearest`, of sizes of 0 or more, which saturate at 6: up where noise < the distance from the level below.

    The distance is in units of the gap to the next level, and noise is uniform in [0, 1).
    """
    size = tl.minimum(size, 6.0)
    octave = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & _OCTAVE
    steps = size * (0x7F800000 - octave).to(tl.float32, bitcast=True)  # 2/p: exponents 2·127 + 1 − e
    below = steps.to(tl.int32)
    above = below + (noise < steps - below.to(tl.float32)).to(tl.int32)
    level = above.to(tl.float32) * (octave - 0x800000).to(tl.float32, bitcast=True)
    return above + (octave >> 22) + 2, level


@triton.jit
def signed(level, x):
    """The level with the sign of x, also where it is zero."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def words(codes, x, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Codes (ROWS, BLOCKS, 16) with the signs of x as int32 (ROWS, BLOCKS, 2): eight a word, the first lowest."""
    signs = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32, bitcast=True)
    nibbles = (codes & 7) | (signs & ~7)
    eights = tl.reshape(nibbles, (ROWS, BLOCKS, 2, 8))
    return tl.sum(eights << (4 * tl.arange(0, 8))[None, None, None, :], axis=3)


@triton.jit
def unpacked(word):
    """The eight E2M1 values of every word (A, B) as float32 (A, B, 8)."""
    nibbles = word[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]
    bits = ((nibbles & 7) << 22) | ((nibbles & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0  # 2¹²⁶: 1 is code 2, 2²³·2⁻¹⁴⁹
