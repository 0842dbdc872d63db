"""RMSNorm that gives NVFP4, and is differentiated from what it gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from toolkit_plugins.dataflows.pact.carried import carry
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.quantizers.nvfp4_rows import Rows


class PactNorm(nn.Module):
    """ŷ = NVFP4(w ∘ x·rstd), which carries its rows; backward reconstructs x·rstd from them (PACT, Table 7).

    Kept for backward: the rows (or y in 16 bit) and rstd, one float32 a token. The rounding is passed straight through.

    Args:
        weight: w, frozen.
        eps: of rstd.
        dtype: of ŷ.
    """

    def __init__(
        self, weight: nn.Parameter, eps: float, dtype: torch.dtype, execution: Execution, settings: Settings
    ) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps
        self.dtype, self.execution, self.settings = dtype, execution, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, codes, scales, g = _Norm.apply(x, self)
        return carry(y, Rows(codes, scales, g, x.shape[-1]), exact=self.settings.norm == "nvfp4")

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, gives {self.settings.norm}"


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: PactNorm) -> tuple[torch.Tensor, ...]:
        run, rounded = norm.execution, norm.settings.norm == "nvfp4"
        flat = x.reshape(-1, x.shape[-1])
        if norm.settings.nonlinear == "nvfp4":
            flat = run.values(run.quantize(flat), norm.dtype)
        y, rows, rstd = run.norm(flat, norm.weight, norm.variance_epsilon, norm.dtype, rounded=rounded)
        ctx.norm, ctx.dtype = norm, x.dtype
        ctx.save_for_backward(rstd, *((rows.codes, rows.scales, rows.g) if rounded else (y,)))
        kept = (rows.codes, rows.scales, rows.g)
        ctx.mark_non_differentiable(*kept)
        return y.view(x.shape), *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        norm: PactNorm = ctx.norm
        rstd, *kept = ctx.saved_tensors
        width = gradient.shape[-1]
        y = Rows(*kept, width) if len(kept) > 1 else kept[0].reshape(-1, width)
        with torch.autocast(gradient.device.type, enabled=False):
            dx = norm.execution.norm_gradient(gradient.reshape(-1, width), y, norm.weight, rstd)
        return dx.view(gradient.shape).to(ctx.dtype), None
