"""The execution `fp8`: Exact, with products in E4M3 for tensor cores that have no E2M1 (Ada, Hopper)."""

from __future__ import annotations

import torch

from toolkit_plugins.dataflows.pact.exact import Exact
from toolkit_plugins.dataflows.pact.products import fp8
from toolkit_plugins.dataflows.pact.products.gradients import rounded
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.pact.weights import PactLinear
from toolkit_plugins.quantizers.nvfp4_rows import Rows


class FP8(Exact):
    """`fp8`: both operands of the frozen products are recast from NVFP4 to E4M3, which moves a product by about 2%.

    What is kept for backward, and every other operation, is `exact`'s. Results are rounded to bfloat16. Not the
    paper's numerics; see `products.recast` for what is lost.

    Attributes:
        weights: for the flow's record: the numbers that products read are not the packed ones.
    """

    name = "fp8"
    weights = "recast in each product to E4M3 under row scales of 1.5·2ᵏ"

    def product(
        self, rows: Rows, layer: PactLinear, dtype: torch.dtype, values: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x̂₈·Ŵ₈ᵀ + b, (M, out)."""
        return fp8.product(rows, layer, dtype)

    def input_gradient(
        self, gradient: torch.Tensor, layer: PactLinear, dtype: torch.dtype, how: str = "nearest"
    ) -> torch.Tensor:
        """ĝ₈·W̃₈, (M, in); a gradient that is not to be rounded (`16bit`) goes through `exact`'s product."""
        if how == "16bit":
            return super().input_gradient(gradient, layer, dtype, how)
        return fp8.input_gradient(rounded(self, gradient, how), layer, dtype)

    def departs(self, settings: Settings) -> str | None:
        """Where it computes otherwise than its name says, or None."""
        return "gradients=16bit: backward is exact's product" if settings.gradients == "16bit" else None
