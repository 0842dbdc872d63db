"""NVFP4: E2M1 with E4M3 block scales and one float32 scale a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from toolkit_plugins.quantizers.e2m1 import E2M1, LARGEST, divide

E4M3_LARGEST = 448.0
E4M3_FLOOR = 2.0**-6
GLOBAL_FLOOR = 2.0**-120


@dataclasses.dataclass(frozen=True)
class NVFP4(E2M1):
    """NVFP4: E2M1 in blocks of 16 along the input dimension, an E4M3 scale a block, a float32 scale a tensor.

    g = amax/(6·448), s = E4M3(amax₁₆/6/g) clamped to 448, code = RNE(x/(s·g)), x̂ = (s·g)·e2m1(code), all in
    float32; PACT, Table 6. 4 + 8/16 = 4.5 bits a weight, and 32 bits a tensor.

    Floors, so that no scale is ever NaN or zero: s ≥ 2⁻⁶, the smallest normal E4M3 number (torchao's floor too;
    it acts on blocks whose maximum is below amax/28672), and g ≥ 2⁻¹²⁰, so that s·g is a normal number. A tensor
    of zeros stays zero. A 3-D weight has one g.
    """

    name = "nvfp4"
    by_row = True

    @property
    def block_size(self) -> int:
        """Weights a block."""
        return 16

    def pack_scales(self, absmax: torch.Tensor, partial: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """`scales`, float8_e4m3fn, (rows, ⌈K/16⌉), and `global_scale`, float32, one number."""
        global_scale = divide(absmax.amax(), LARGEST * E4M3_LARGEST).clamp(min=GLOBAL_FLOOR)
        # The clamp comes before the cast: some releases of PyTorch turn 480 into NaN.
        scale = (divide(absmax, LARGEST) / global_scale).clamp(E4M3_FLOOR, E4M3_LARGEST).to(torch.float8_e4m3fn)
        kept = {"scales": scale, "global_scale": global_scale}
        return kept, self.unpack_scales(kept)

    def unpack_scales(self, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """s·g in float32."""
        return kept["scales"].float() * kept["global_scale"]
