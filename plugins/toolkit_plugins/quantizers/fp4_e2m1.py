"""E2M1 with one float32 scale a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from toolkit_plugins.quantizers.e2m1 import E2M1, LARGEST, divide

TINY = torch.finfo(torch.float32).tiny


@dataclasses.dataclass(frozen=True)
class FP4E2M1(E2M1):
    """E2M1 with a float32 scale, absmax/6, in flat blocks of 64.

    x̂ = s·e2m1(x/s), s = max(absmax/6, 2⁻¹²⁶), rounded to nearest, ties to even. The floor keeps s a normal number:
    a block of zeros stays zero. Blocks run through the weight in row-major order, as in NF4, which is our choice.
    4 + 32/64 = 4.5 bits a weight.
    """

    name = "fp4-e2m1"
    by_row = False

    @property
    def block_size(self) -> int:
        """Weights a block."""
        return 64

    def pack_scales(self, absmax: torch.Tensor, partial: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """`scales`, float32, one a block."""
        scale = divide(absmax, LARGEST).clamp(min=TINY)
        return {"scales": scale.view(-1)}, scale

    def unpack_scales(self, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The scales as kept."""
        return kept["scales"]
