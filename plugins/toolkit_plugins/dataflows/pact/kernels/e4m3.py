"""Scales in registers: a row's power of two, and E4M3 block scales rounded in integer arithmetic."""

import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.kernels.e2m1 import quotient

_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def row_scale(absmax):
    """(g, 1/g) of a row whose largest |x| has these bits: the least power of two not below max(amax/2688, 2⁻¹²⁰).

    Bits of |x| are ordered as the numbers are, with infinity and then NaN at the end; g is NaN from infinity on.
    """
    least = tl.maximum(quotient(absmax.to(tl.float32, bitcast=True), 2688.0, 1.0 / 2688.0), 7.52316384526264e-37)
    bits = (least.to(tl.int32, bitcast=True) + 0x7FFFFF) & _INFINITE
    bits = tl.where(absmax < _INFINITE, bits, 0x7FC00000)
    inverse = tl.where(absmax < _INFINITE, 0x7F000000 - bits, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def block_scale(absmax, inverse, COVERING: tl.constexpr):
    """(E4M3 code, s) of blocks whose largest |x| has these bits: amax/6/g between 2⁻⁶ and 448, to nearest even.

    Args:
        COVERING: the next number instead where 6·s·g lies below amax, so that nothing saturates.
    """
    largest = absmax.to(tl.float32, bitcast=True)
    wide = quotient(largest, 6.0, 1.0 / 6.0) * inverse
    finite = inverse == inverse
    bits = tl.minimum(tl.maximum(wide, 0.015625), 448.0).to(tl.int32, bitcast=True)
    short = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    if COVERING:
        s = (short << 20).to(tl.float32, bitcast=True)
        short += ((6.0 * s < largest * inverse) & (s < 448.0)).to(tl.int32)
    return tl.where(finite, short - 960, 0x7F), tl.where(finite, short << 20, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(code):
    """s of an E4M3 code of a number that is not negative; that of NaN gives 480, beside a g that is NaN."""
    return (code.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2¹²⁰
