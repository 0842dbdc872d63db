"""The execution `native`: Exact, with products by the FP4 matrix instruction of Blackwell GPUs."""

from __future__ import annotations

import torch

from toolkit_plugins.dataflows.pact.exact import Exact
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.products import native
from toolkit_plugins.dataflows.pact.products.gradients import rounded
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.pact.weights import PactLinear
from toolkit_plugins.quantizers.nvfp4 import NVFP4
from toolkit_plugins.quantizers.nvfp4_rows import Rows

OFF = 2.0**-7
"""Relative to the largest value: a rounding to bfloat16 on either side, and another order of float32 additions."""


class Native(Exact):
    """`native`: NVFP4 × NVFP4 as codes and scales, for compute capabilities 10.x and 12.x; `reference`'s numerics.

    The instruction's scales lie along the sum. Under `layouts=shared` backward sums across the blocks of the one
    weight, and is `exact`'s product of unpacked values; so is that of a gradient in 16 bit.
    """

    name = "native"

    def product(
        self, rows: Rows, layer: PactLinear, dtype: torch.dtype, values: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x̂·Ŵᵀ + b, (M, out)."""
        return native.product(rows, layer, dtype)

    def input_gradient(
        self, gradient: torch.Tensor, layer: PactLinear, dtype: torch.dtype, how: str = "nearest"
    ) -> torch.Tensor:
        """ĝ·W̃, (M, in)."""
        if how == "16bit" or layer.transposed is None:
            return super().input_gradient(gradient, layer, dtype, how)
        return native.input_gradient(rounded(self, gradient, how), layer, dtype)

    def departs(self, settings: Settings) -> str | None:
        """Where it computes otherwise than its name says, or None."""
        asked = {"layouts=shared": settings.layouts == "shared", "gradients=16bit": settings.gradients == "16bit"}
        reasons = " and ".join(name for name, so in asked.items() if so)
        return f"{reasons}: backward is exact's product" if reasons else None

    def trial(self, device: torch.device) -> str | None:
        """Why its products on a device are not to be trusted, or None: a small layer's, beside `reference`'s."""
        generator = torch.Generator().manual_seed(0)
        weight, x, gradient = (
            torch.randn(shape, generator=generator).to(device) for shape in ((176, 208), (33, 208), (33, 176))
        )
        layer = PactLinear(NVFP4().quantize(weight), None, torch.bfloat16, Settings(), weight).to(device)
        reference, dtype = Execution(), torch.bfloat16
        rows = reference.quantize(x)
        try:
            pairs = {
                "product": (self.product(rows, layer, dtype), reference.product(rows, layer, dtype)),
                "input gradient": (
                    native.input_gradient(reference.quantize(gradient), layer, dtype),
                    reference.input_gradient(gradient, layer, dtype),
                ),
            }
            for name, (found, expected) in pairs.items():
                largest = expected.float().abs().max().item()
                off = (found.float() - expected.float()).abs().max().item() / largest
                if not off <= OFF:
                    return f"a {name} is off by {off:.2g} of its largest value"
        except Exception as error:  # a library that refuses, a compiler that fails: whatever it is, it is told
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return None
