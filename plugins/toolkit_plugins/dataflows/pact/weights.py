"""A frozen NVFP4 weight in the layouts that the two products read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.interfaces import Packed
from toolkit.runs.frozen import FrozenLinear, Holder
from toolkit_plugins.quantizers.nvfp4 import NVFP4

if TYPE_CHECKING:
    from toolkit_plugins.dataflows.pact.execution import Execution
    from toolkit_plugins.dataflows.pact.settings import Settings


class Transposed(Holder):
    """W̃ᵀ (in, out) in NVFP4, whose blocks lie along the output dimension; beside the layer's own tensors, not of them.

    Args:
        packed: W̃ᵀ.
    """

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self._keys, self._shape, self._dtype = list(packed.tensors), packed.shape, packed.dtype
        self.hold("packed_", packed)

    @property
    def packed(self) -> Packed:
        """As it is stored now."""
        return Packed(NVFP4(), self.held("packed_", self._keys), self._shape, self._dtype)


class PactLinear(FrozenLinear):
    """A frozen linear layer whose products are NVFP4 × NVFP4 in both directions.

        y = x̂·Ŵᵀ + b,   ∂x = ĝ·W̃        x̂, ĝ: NVFP4 of each row of x and ∂y

    Ŵ (out, in) has its blocks along the input dimension. W̃ is Ŵ itself (`shared`), or NVFP4 with blocks along the
    output dimension, made from Ŵ or from the original weight (`cached`): then the two directions see weights that
    differ by a second rounding. PACT, Table 7 and Figure 3.

    Args:
        packed: Ŵ.
        bias: added in float32 before the one rounding of y, or None.
        compute_dtype: of y and ∂x.
        settings: the switches.
        original: the weight that Ŵ was made from; read under `source=original` alone.

    Attributes:
        gap: ‖W̃ − Ŵ‖_F/‖Ŵ‖_F; 0 for weights of zeros.
    """

    def __init__(
        self,
        packed: Packed,
        bias: torch.Tensor | None,
        compute_dtype: torch.dtype,
        settings: Settings,
        original: torch.Tensor,
    ) -> None:
        super().__init__(packed, bias, compute_dtype)
        self.settings = settings
        self.execution: Execution | None = None  # the data flow's, once the device is known
        self.transposed: Transposed | None = None
        self.gap = 0.0
        if settings.layouts == "cached":
            forward = packed.dequantize(torch.float32)
            source = original if settings.source == "original" else forward
            again = NVFP4().quantize(source.detach().mT.contiguous())
            self.transposed = Transposed(again)
            self.gap = float((again.dequantize(torch.float32).mT - forward).norm() / forward.norm().clamp(min=1e-30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from toolkit_plugins.dataflows.pact.linear import multiply

        return multiply(x, self)
