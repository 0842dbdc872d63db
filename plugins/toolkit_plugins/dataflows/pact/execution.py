"""Who computes the operations of the data flow; all executions give the same results from the same codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit_plugins.quantizers.nvfp4_rows import Rows, quantize_rows

if TYPE_CHECKING:
    from toolkit_plugins.dataflows.pact.settings import Settings
    from toolkit_plugins.dataflows.pact.weights import PactLinear


class Execution:
    """`reference`: every operation in plain tensor operations, on any device; the oracle of the others.

    Matrices are (rows, columns), rows being tokens. Arithmetic is float32 and each result is rounded once to `dtype`.
    """

    name = "reference"
    weights: str | None = None
    """What products read where it is not the packed numbers; for the flow's record."""

    def departs(self, settings: Settings) -> str | None:
        """Where it computes otherwise than its name says, or None."""
        return None

    def trial(self, device: torch.device) -> str | None:
        """Why its results on a device are not to be trusted, or None."""
        return None

    def quantize(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> Rows:
        """NVFP4 of each row (`quantize_rows`)."""
        return quantize_rows(x, noise)

    def values(self, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        """x̂ (M, K)."""
        return rows.values(dtype)

    def rounded(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[Rows, torch.Tensor]:
        """NVFP4 of each row to nearest, and x̂ (M, K)."""
        rows = self.quantize(x)
        return rows, self.values(rows, dtype)

    def product(
        self, rows: Rows, layer: PactLinear, dtype: torch.dtype, values: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x̂·Ŵᵀ + b, (M, out).

        Args:
            values: x̂ as a matrix, where it is at hand.
        """
        y = _exactly(rows.values(), layer.packed.dequantize(torch.float32).mT)
        return (y if layer.bias is None else y + layer.bias.float()).to(dtype)

    def input_gradient(
        self, gradient: torch.Tensor, layer: PactLinear, dtype: torch.dtype, how: str = "nearest"
    ) -> torch.Tensor:
        """ĝ·W̃, (M, in), of an output gradient (M, out).

        Args:
            how: `nearest` and `stochastic` round it to NVFP4, with noise from the device's generator; `16bit` does not.
        """
        if how == "16bit":
            wide = gradient.float()
        else:
            noise = torch.rand(gradient.shape, device=gradient.device) if how == "stochastic" else None
            wide = self.quantize(gradient, noise).values()
        return _exactly(wide, self._backward_weight(layer)).to(dtype)

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, *, rounded: bool
    ) -> tuple[torch.Tensor, Rows, torch.Tensor]:
        """(y or ŷ, ŷ's rows, rstd) of y = w ∘ x·rstd, rstd = (mean x² + ε)^−½ in float32, (M,).

        Args:
            rounded: give ŷ, else y rounded to `dtype`.
        """
        wide = x.float()
        rstd = (wide.square().mean(-1) + eps).rsqrt()
        y = wide * rstd[:, None] * weight.float()
        rows = self.quantize(y)
        return (self.values(rows, dtype) if rounded else y.to(dtype)), rows, rstd

    def norm_gradient(
        self, gradient: torch.Tensor, y: Rows | torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
    ) -> torch.Tensor:
        """∂x of `norm` in the gradient's dtype, from its output: n = y/w, ∂x = rstd·(h − n·mean(h ∘ n)), h = ∂y ∘ w.

        Where w is zero, y tells nothing of n, which is then taken as 0.
        """
        w = weight.float()
        kept = y.values() if isinstance(y, Rows) else y.float()
        n = torch.where(w == 0, 0.0, kept / w)
        h = gradient.float() * w
        return (rstd[:, None] * (h - n * (h * n).mean(-1, keepdim=True))).to(gradient.dtype)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Rows]:
        """(ĥ, its rows) of h = silu(gate) ∘ up in float32."""
        wide = gate.float()
        rows = self.quantize(wide * wide.sigmoid() * up.float())
        return self.values(rows, dtype), rows

    def gated_and_kept(
        self, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype, *, keep: bool, round_first: bool
    ) -> tuple[torch.Tensor, Rows, Rows | None, Rows | None]:
        """(ĥ, its rows, gate's rows, up's rows), as the settings ask; one method, so that one kernel can make them all.

        Args:
            keep: give the rows of gate and up.
            round_first: compute h from the rounded gate and up, in `dtype`.
        """
        pair, rounded = (gate, up), (None, None)
        if keep or round_first:
            rounded = (self.quantize(gate), self.quantize(up))
        if round_first:
            pair = tuple(self.values(each, dtype) for each in rounded)
        return *self.gated(*pair, dtype), *(rounded if keep else (None, None))

    def gated_gradient(
        self, gradient: torch.Tensor, gate: Rows | torch.Tensor, up: Rows | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(∂gate, ∂up) in the gradient's dtype: ∂h ∘ up ∘ σ(1 + gate·(1 − σ)) and ∂h ∘ gate ∘ σ, σ = σ(gate)."""
        g, u = ((kept.values() if isinstance(kept, Rows) else kept.float()) for kept in (gate, up))
        wide, share = gradient.float(), g.sigmoid()
        return (
            (wide * u * share * (1 + g * (1 - share))).to(gradient.dtype),
            (wide * g * share).to(gradient.dtype),
        )

    @staticmethod
    def _backward_weight(layer: PactLinear) -> torch.Tensor:
        if layer.transposed is None:
            return layer.packed.dequantize(torch.float32)
        return layer.transposed.packed.dequantize(torch.float32).mT


def _exactly(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product in float32 without TF32, whatever the session allows."""
    if left.device.type != "cuda":
        return left @ right
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        return left @ right
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
