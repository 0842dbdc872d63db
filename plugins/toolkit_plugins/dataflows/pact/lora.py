"""PEFT's LoRA layer over a `PactLinear`: the same parameters, one operation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from toolkit_plugins.dataflows.stock import frozen_lora


@functools.cache
def pact_lora() -> type[nn.Module]:
    """The class; made when it is asked for, because PEFT is imported with it."""
    from toolkit_plugins.dataflows.pact.linear import multiply

    class PactLora(frozen_lora()):
        """y = x̂Ŵᵀ + b + s·(x̂Aᵀ)Bᵀ as one operation; what that cannot say, PEFT says over the frozen product."""

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args or kwargs or self.disable_adapters or self.merged or len(self.active_adapters) != 1:
                return super().forward(x, *args, **kwargs)
            (name,) = self.active_adapters
            dropout = self.lora_dropout[name] if name in self.lora_A else None
            drops = self.training and isinstance(dropout, nn.Dropout) and dropout.p > 0
            if dropout is None or drops or name in self.lora_variant:
                return super().forward(x)
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            return multiply(x, self.base_layer, a, b, self.scaling[name])

    return PactLora
