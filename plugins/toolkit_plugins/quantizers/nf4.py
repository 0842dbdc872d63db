"""NF4, the 4-bit NormalFloat of QLoRA, as bitsandbytes stores it."""

from __future__ import annotations

import dataclasses

from toolkit_plugins.quantizers.bitsandbytes_4bit import BitsAndBytes4Bit


@dataclasses.dataclass(frozen=True)
class NF4(BitsAndBytes4Bit):
    """NF4 in flat blocks, equal to bitsandbytes bit for bit; double quantization of the scales by default.

    x̂ = absmax[block]·level[code], the 16 levels being quantiles of N(0, 1) scaled to [−1, 1] with an exact zero
    (Dettmers et al., 2023, §3). Blocks of `block` weights run through the weight in row-major order. Bits a
    weight at block 64: 4 + 32/64 = 4.5; with double quantization 4 + 8/64 + 32/(64·256) = 4.127, and 32 bits
    of offset a tensor.

    Attributes:
        block: 32, 64, 128, 256, 512, 1024, 2048 or 4096 weights.
        double: quantize the blocks' maxima to 8 bits in groups of 256.

    Raises:
        InputError: a block size that bitsandbytes does not have.
    """

    name = "nf4"
    quant_type = "nf4"
    levels = (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    )

    block: int = 64
    double: bool = True
