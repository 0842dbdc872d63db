"""bitsandbytes' own 4-bit float, which is not E2M1."""

from __future__ import annotations

import dataclasses

from toolkit_plugins.quantizers.bitsandbytes_4bit import BitsAndBytes4Bit

_MAGNITUDES = tuple(x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3))


@dataclasses.dataclass(frozen=True)
class FP4BitsAndBytes(BitsAndBytes4Bit):
    """bitsandbytes' FP4 in flat blocks, equal to it bit for bit; its levels are not those of E2M1.

    The magnitudes are {0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1}·absmax[block], sign in the code's high bit. Blocks,
    double quantization and bits a weight are as in NF4. A positive value that rounds to zero takes the code of
    minus zero, as in bitsandbytes' CPU code (its CUDA kernel keeps the sign); both decode to zero.

    Attributes:
        block: 32, 64, 128, 256, 512, 1024, 2048 or 4096 weights.
        double: quantize the blocks' maxima to 8 bits in groups of 256.

    Raises:
        InputError: a block size that bitsandbytes does not have.
    """

    name = "fp4-bnb"
    quant_type = "fp4"
    levels = (*_MAGNITUDES, *(0.0 - x for x in _MAGNITUDES))

    block: int = 64
    double: bool = True
