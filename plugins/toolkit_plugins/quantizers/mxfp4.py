"""MXFP4: E2M1 with power-of-two block scales (OCP microscaling)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from toolkit.interfaces import Layout
from toolkit_plugins.quantizers.e2m1 import E2M1

BIAS = 127
LARGEST_EXPONENT = 2
"""⌊log₂ 6⌋, the exponent of E2M1's largest magnitude."""


@dataclasses.dataclass(frozen=True)
class MXFP4(E2M1):
    """MXFP4: E2M1 in blocks of 32 along the input dimension, a power-of-two scale (E8M0) a block.

    s = 2^(⌊log₂ amax₃₂⌋ − 2), code = RNE(x/s), x̂ = s·e2m1(code): the rule of the OCP Microscaling Formats
    specification 1.0, §6.3, and torchao's default ("floor"). amax/s lies in [4, 8), so that weights above 6·s
    saturate to it: an error of up to a quarter of the weight, part of the format. Exponents stop at −127: a
    block of zeros has that scale and stays zero. 4 + 8/32 = 4.25 bits a weight.
    """

    name = "mxfp4"
    by_row = True

    @property
    def block_size(self) -> int:
        """Weights a block."""
        return 32

    def pack_scales(self, absmax: torch.Tensor, partial: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """`scales`, uint8, (rows, ⌈K/32⌉): the exponent of s plus 127."""
        exponent = (absmax.view(torch.int32) >> 23) - BIAS - LARGEST_EXPONENT
        kept = {"scales": (exponent.clamp(min=-BIAS) + BIAS).to(torch.uint8)}
        return kept, self.unpack_scales(kept)

    def scale_candidates(
        self, kept: Mapping[str, torch.Tensor], blocks: torch.Tensor, entries: torch.Tensor
    ) -> torch.Tensor:
        """The exponent, one below and one above: at amax/s above 6 the next octave saves the largest weight."""
        steps = torch.tensor((0, -1, 1), device=entries.device)[:, None]
        return (entries.int() + steps).clamp(0, 2 * BIAS).to(torch.uint8)

    def each_row(self, values: torch.Tensor) -> torch.Tensor:
        """As the interface says; no scale is shared by two rows."""
        return self.quantize(values).dequantize() if values.numel() else values

    def layout(self, form: str) -> Layout | None:
        """compressed-tensors' `mxfp4-pack-quantized`."""
        from toolkit_plugins.quantizers.layouts import MXFP4Layout

        return MXFP4Layout(self) if form == "compressed-tensors" else None

    def unpack_scales(self, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """2^(byte − 127) in float32, exactly; byte 0 is a subnormal float."""
        byte = kept["scales"].int()
        return torch.where(byte > 0, byte << 23, 1 << 22).view(torch.float32)
