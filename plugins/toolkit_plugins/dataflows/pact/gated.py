"""SiLU-multiply that gives NVFP4, and is differentiated from compressed copies of gate and up."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from toolkit_plugins.dataflows.pact import integers
from toolkit_plugins.dataflows.pact.carried import carry
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.quantizers.nvfp4_rows import Rows


def gated(
    gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype, execution: Execution, settings: Settings
) -> torch.Tensor:
    """ĥ = NVFP4(silu(gate) ∘ up) (…, K), which carries its rows; the rounding is passed straight through.

    Forward reads gate and up as they are, or rounded (`nonlinear=nvfp4`). Backward reads what is kept of each by
    itself: NVFP4, 16 bit, or group-wise integers (`gates`). PACT, Table 7.
    """
    h, codes, scales, g = _Gated.apply(gate, up, dtype, execution, settings)
    return carry(h, Rows(codes, scales, g, gate.shape[-1]), exact=True)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype, run: Execution, settings: Settings
    ) -> tuple[torch.Tensor, ...]:
        width = gate.shape[-1]
        pair = [each.reshape(-1, width) for each in (gate, up)]
        keep, first = settings.gates == "nvfp4", settings.nonlinear == "nvfp4"
        h, rows, *rounded = run.gated_and_kept(*pair, dtype, keep=keep, round_first=first)
        ctx.run, ctx.gates, ctx.shape, ctx.dtypes = run, settings.gates, gate.shape, (gate.dtype, up.dtype)
        if keep:
            ctx.save_for_backward(*(t for each in rounded for t in (each.codes, each.scales, each.g)))
        elif settings.gates == "16bit":
            ctx.save_for_backward(*pair)
        else:
            bits = int(settings.gates.removeprefix("int"))
            ctx.save_for_backward(*(t for each in pair for t in integers.quantize(each, bits)))
        kept = (rows.codes, rows.scales, rows.g)
        ctx.mark_non_differentiable(*kept)
        return h.view(gate.shape), *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        width = ctx.shape[-1]
        kept = ctx.saved_tensors
        half = len(kept) // 2
        gate, up = (_kept(part, ctx.gates, width) for part in (kept[:half], kept[half:]))
        with torch.autocast(gradient.device.type, enabled=False):
            found = ctx.run.gated_gradient(gradient.reshape(-1, width), gate, up)
        dgate, dup = (each.view(ctx.shape).to(dtype) for each, dtype in zip(found, ctx.dtypes, strict=True))
        return dgate, dup, None, None, None


def _kept(part: tuple[torch.Tensor, ...], gates: str, width: int) -> Rows | torch.Tensor:
    if gates == "nvfp4":
        return Rows(*part, width)
    if gates == "16bit":
        return part[0]
    return integers.values(*part, bits=int(gates.removeprefix("int")), width=width)
