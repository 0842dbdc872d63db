"""The execution `exact`: Triton kernels for what is elementwise, library products of unpacked NVFP4 values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.quantizers.nvfp4_rows import Rows

if TYPE_CHECKING:
    from toolkit_plugins.dataflows.pact.weights import PactLinear


class Exact(Execution):
    """`exact`: `reference`'s numerics on NVIDIA GPUs from compute capability 8.0 on; needs Triton.

    Codes, scales and g of given float32 values are `reference`'s bit for bit. What differs is what float32 leaves
    open: the order of sums (the mean of squares, products) and the last places of the sigmoid, so that a value that
    lies within 2⁻¹⁸ of itself from a midpoint of two codes may take the other one. Stochastic rounding draws its noise
    in the kernel, from a seed of the device's generator. Kernels are imported where they are used: this module can be
    imported without Triton.
    """

    name = "exact"

    def quantize(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> Rows:
        """As `reference`, in one pass over x."""
        from toolkit_plugins.dataflows.pact.kernels.quantize import quantize

        return quantize(x, noise=noise)[0]

    def values(self, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        """As `reference`."""
        from toolkit_plugins.dataflows.pact.kernels.unpack import unpack

        return unpack(rows, dtype)

    def rounded(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[Rows, torch.Tensor]:
        """As `reference`, in one pass over x."""
        from toolkit_plugins.dataflows.pact.kernels.quantize import quantize

        rows, values = quantize(x, dtype=dtype)
        assert rows is not None and values is not None
        return rows, values

    def product(
        self, rows: Rows, layer: PactLinear, dtype: torch.dtype, values: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x̂·Ŵᵀ + b, (M, out), of x̂ in `dtype` and a weight unpacked to it."""
        from toolkit_plugins.dataflows.pact.products.unpacked import product

        return product(self.values(rows, dtype) if values is None else values.to(dtype), layer, dtype)

    def input_gradient(
        self, gradient: torch.Tensor, layer: PactLinear, dtype: torch.dtype, how: str = "nearest"
    ) -> torch.Tensor:
        """ĝ·W̃, (M, in); ĝ is made without its codes."""
        from toolkit_plugins.dataflows.pact.kernels.quantize import quantize
        from toolkit_plugins.dataflows.pact.products.unpacked import input_gradient

        if how == "16bit":
            return input_gradient(gradient.to(dtype), layer, dtype)
        seed = torch.randint(2**31 - 1, (1,), device=gradient.device) if how == "stochastic" else None
        return input_gradient(quantize(gradient, seed=seed, codes=False, dtype=dtype)[1], layer, dtype)

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, *, rounded: bool
    ) -> tuple[torch.Tensor, Rows, torch.Tensor]:
        """As `reference`, in one pass over x."""
        from toolkit_plugins.dataflows.pact.kernels.norm import norm

        return norm(x, weight, eps, dtype, rounded=rounded)

    def norm_gradient(
        self, gradient: torch.Tensor, y: Rows | torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
    ) -> torch.Tensor:
        """As `reference`, in one pass over ∂y and y."""
        from toolkit_plugins.dataflows.pact.kernels.norm import norm_gradient

        return norm_gradient(gradient, y, weight, rstd)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Rows]:
        """As `reference`, in one pass over gate and up."""
        return self.gated_and_kept(gate, up, dtype, keep=False, round_first=False)[:2]

    def gated_and_kept(
        self, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype, *, keep: bool, round_first: bool
    ) -> tuple[torch.Tensor, Rows, Rows | None, Rows | None]:
        """As `reference`, in one pass over gate and up."""
        from toolkit_plugins.dataflows.pact.kernels.gated import gated

        return gated(gate, up, dtype, keep=keep, round_first=round_first)

    def gated_gradient(
        self, gradient: torch.Tensor, gate: Rows | torch.Tensor, up: Rows | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reference`, in one pass."""
        from toolkit_plugins.dataflows.pact.kernels.gated import gated_gradient

        return gated_gradient(gradient, gate, up)
