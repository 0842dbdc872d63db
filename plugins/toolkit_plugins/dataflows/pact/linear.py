"""The frozen product and its LoRA branch as one operation of autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from toolkit_plugins.dataflows.pact.carried import carried
from toolkit_plugins.quantizers.nvfp4_rows import Rows

if TYPE_CHECKING:
    from toolkit_plugins.dataflows.pact.weights import PactLinear


def multiply(
    x: torch.Tensor,
    layer: PactLinear,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    scaling: float = 1.0,
) -> torch.Tensor:
    """y = x̂Ŵᵀ + bias + s·(x̃Aᵀ)Bᵀ (…, out), in the dtype of x; straight through the rounding of x in backward.

    x̂ is what x carries, or NVFP4 of its rows. x̃ = x̂, kept in NVFP4; where the tensor carries a rounding that it is not
    (`norm=16bit`), x̃ = x, kept as it is. The LoRA branch is computed in the layer's compute dtype. PACT, Table 7.

    Args:
        a, b: (rank, in) and (out, rank), or None without an adapter.
    """
    with torch.autocast(x.device.type, enabled=False):
        return _Multiply.apply(x, a, b, layer, scaling, carried(x))


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, a: Any, b: Any, layer: PactLinear, scaling: float, known: Any) -> torch.Tensor:
        run, dtype = layer.execution, layer.compute_dtype
        flat = x.reshape(-1, layer.in_features)
        if known is None:
            rows, flat = run.rounded(flat, dtype)
        else:
            rows = known.rows
        ctx.dense = known is not None and not known.exact
        y = run.product(rows, layer, dtype, None if ctx.dense else flat)
        ctx.layer, ctx.scaling, ctx.dtype, ctx.width = layer, scaling, x.dtype, rows.width
        if a is not None:
            flat = flat.to(dtype)
            low = flat @ a.to(dtype).mT
            y.addmm_(low, b.to(dtype).mT, alpha=scaling)
            kept = (flat,) if ctx.dense else (rows.codes, rows.scales, rows.g)
            if not layer.settings.reuse:
                kept = tuple(each.clone() for each in kept)
            ctx.save_for_backward(a, b, low, *kept)
        return y.view(*x.shape[:-1], layer.out_features).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        with torch.autocast(gradient.device.type, enabled=False):
            return _Multiply._backward(ctx, gradient)

    @staticmethod
    def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        layer: PactLinear = ctx.layer
        run, dtype, s = layer.execution, layer.compute_dtype, ctx.scaling
        flat = gradient.reshape(-1, layer.out_features).to(dtype)
        dx = da = db = None
        if ctx.needs_input_grad[0]:
            dx = run.input_gradient(flat, layer, dtype, layer.settings.gradients)
        held = ctx.saved_tensors  # once: checkpointing gives them out once
        if held:
            a, b, low, *kept = held
            back = s * (flat @ b.to(dtype))
            if ctx.needs_input_grad[1]:
                x = kept[0] if ctx.dense else run.values(Rows(*kept, ctx.width), dtype)
                da = (back.mT @ x).to(a.dtype)
            if ctx.needs_input_grad[2]:
                db = (s * (flat.mT @ low)).to(b.dtype)
            if dx is not None:
                dx.addmm_(back, a.to(dtype))
        if dx is not None:
            dx = dx.view(*gradient.shape[:-1], layer.in_features).to(ctx.dtype)
        return dx, da, db, None, None, None
