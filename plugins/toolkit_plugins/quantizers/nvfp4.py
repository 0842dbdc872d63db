"""NVFP4: E2M1 with E4M3 block scales and one float32 scale a tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from toolkit.errors import InputError
from toolkit.interfaces import Layout
from toolkit_plugins.quantizers.e2m1 import E2M1, LARGEST, divide

E4M3_LARGEST = 448.0
E4M3_FLOOR = 2.0**-6
GLOBAL_FLOOR = 2.0**-120
STEPS = (0, *range(-5, 0), *range(1, 7))
"""In E4M3 codes, about a block's own scale, where scales are searched (our choice)."""
CODES = (0x08, 0x7E)
"""Those of the floor and of 448."""


@dataclasses.dataclass(frozen=True)
class NVFP4(E2M1):
    """NVFP4: E2M1 in blocks of 16 along the input dimension, an E4M3 scale a block, a float32 scale a tensor.

    g = amax/(6·448), s = E4M3(amax₁₆/6/g) clamped to 448, code = RNE(x/(s·g)), x̂ = (s·g)·e2m1(code), all in
    float32; PACT, Table 6. 4 + 8/16 = 4.5 bits a weight, and 32 bits a tensor.

    Floors, so that no scale is ever NaN or zero: s ≥ 2⁻⁶, the smallest normal E4M3 number (torchao's floor too;
    it acts on blocks whose maximum is below amax/28672), and g ≥ 2⁻¹²⁰, so that s·g is a normal number. A tensor
    of zeros stays zero. A 3-D weight has one g.

    Attributes:
        amax: that g is made from, for weights that share one g because an engine computes them as one product; 0: the
            weight's own. Values beyond it saturate.

    Raises:
        InputError: `amax` is no number of 0 or more.
    """

    name = "nvfp4"
    by_row = True

    amax: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.amax) and self.amax >= 0):
            raise InputError(f"{self.name} has no amax of {self.amax}: the largest |w| is asked for, or 0")

    @property
    def block_size(self) -> int:
        """Weights a block."""
        return 16

    def pack_scales(self, absmax: torch.Tensor, partial: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """`scales`, float8_e4m3fn, (rows, ⌈K/16⌉), and `global_scale`, float32, one number."""
        global_scale = _global_scale(absmax.new_tensor(self.amax) if self.amax else absmax.amax())
        kept = {"scales": block_scale(absmax, global_scale), "global_scale": global_scale}
        return kept, self.unpack_scales(kept)

    def scale_entries(
        self, kept: Mapping[str, torch.Tensor], blocks: torch.Tensor, absmax: torch.Tensor
    ) -> torch.Tensor:
        """s under the tensor scale g as it is."""
        return block_scale(absmax, kept["global_scale"])

    def scale_candidates(
        self, kept: Mapping[str, torch.Tensor], blocks: torch.Tensor, entries: torch.Tensor
    ) -> torch.Tensor:
        """The neighbouring E4M3 numbers: at eight an octave, from 0.65·s to 1.6·s."""
        steps = torch.tensor(STEPS, dtype=torch.int16, device=entries.device)[:, None]
        codes = (entries.view(torch.uint8).to(torch.int16) + steps).clamp(*CODES)
        return codes.to(torch.uint8).view(torch.float8_e4m3fn)

    def each_row(self, values: torch.Tensor) -> torch.Tensor:
        """As the interface says, every row's g a power of two (`nvfp4_rows.quantize_rows`)."""
        from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows

        if not values.numel():
            return values
        valid = self.valid(values)
        return quantize_rows(valid.reshape(-1, valid.shape[-1])).values(values.dtype).reshape(values.shape)

    def layout(self, form: str) -> Layout | None:
        """compressed-tensors' `nvfp4-pack-quantized`."""
        from toolkit_plugins.quantizers.layouts import NVFP4Layout

        return NVFP4Layout(self) if form == "compressed-tensors" else None

    def unpack_scales(self, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """s·g in float32."""
        return kept["scales"].float() * kept["global_scale"]


def _global_scale(absmax: torch.Tensor) -> torch.Tensor:
    return divide(absmax, LARGEST * E4M3_LARGEST).clamp(min=GLOBAL_FLOOR)


def block_scale(absmax: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """s = E4M3(amax/(6·g)), between the floor and 448."""
    # The clamp comes before the cast: some releases of PyTorch turn 480 into NaN.
    return (divide(absmax, LARGEST) / global_scale).clamp(E4M3_FLOOR, E4M3_LARGEST).to(torch.float8_e4m3fn)
