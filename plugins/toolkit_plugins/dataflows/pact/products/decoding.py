"""Triton: what an E2M1 code and an E4M3 byte stand for, in float32, on any GPU.

Both are floats whose bits, moved to float16's exponent and mantissa, give the value times a power of two; subnormal
numbers too. Hardware conversions of E4M3 begin at compute capability 8.9.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1(code):
    """The value of a code in the low four bits of a uint8, float32: ±{0, ½, 1, 1½, 2, 3, 4, 6}."""
    wide = code.to(tl.uint16)
    return (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e4m3(byte):
    """The value of an E4M3 byte that is no NaN, float32."""
    wide = byte.to(tl.uint16)
    return (((wide & 127) << 7) | ((wide & 128) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
