"""The data flow `pact`: Stock's modules and adapters, NVFP4's arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit.registry import registry
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.stock import Stock

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.interfaces import Start
    from toolkit.records.plan import LayerPlan, Plan
    from toolkit.weights.layers import Layer


@dataclasses.dataclass(frozen=True)
class Pact(Settings, Stock):
    """PACT: frozen layers as NVFP4 products, activations kept in NVFP4, nonlinear operations fused with the rounding.

    Every layer that a plan keeps in `nvfp4` becomes a `PactLinear`; RMSNorm gives NVFP4 once to all that read it, and
    backward reconstructs from it; SiLU-multiply gives NVFP4 and keeps gate and up in it. Attention, RoPE and residuals
    stay the model's own in 16 bit, and adapters are PEFT's. Layers in another format, or with a compute dtype of their
    own, keep the stock data flow, and so do the norms that they read. Llama, Qwen2, Qwen3, Mistral and Phi-3 blocks are
    fused; in other models only the linear layers change. PACT, Table 7, Figures 2 and 3; the switches are `Settings`.
    """

    name = "pact"

    def check(self, plan: Plan) -> None:
        """Refuse what this data flow cannot compute.

        Raises:
            InputError: as Stock, or DoRA over an NVFP4 layer, or no layer that is planned in NVFP4.
        """
        super().check(plan)
        planned = [("default", plan.default), *plan.layers.items()]
        ours = [(name, layer) for name, layer in planned if _nvfp4(layer)]
        if not ours:
            raise InputError(
                f"data flow {self.name} computes layers in nvfp4, and the plan has none: its default is "
                f"{plan.default.quantizer}"
            )
        for name, layer in ours:
            if layer.adapter is not None and layer.adapter.dora:
                raise InputError(f"layer {name}: data flow {self.name} computes LoRA and not DoRA; leave out dora")

    def apply(
        self,
        model: nn.Module,
        layers: Mapping[str, LayerPlan],
        dtype: torch.dtype,
        seed: int = 0,
        starts: Callable[[str, torch.Tensor], Start | None] | None = None,
    ) -> nn.Module:
        """As Stock, then the blocks are fused.

        Raises:
            InputError: as Stock, or the execution cannot run on the model's device.
        """
        from toolkit.records.dataflow import Flow
        from toolkit_plugins.dataflows.pact.blocks import fuse
        from toolkit_plugins.dataflows.pact.choosing import choose
        from toolkit_plugins.dataflows.pact.weights import PactLinear

        device = next(model.parameters()).device
        execution, why = choose(self.execution, device, self._settings)
        model = super().apply(model, layers, dtype, seed, starts)
        ours = [module for module in model.modules() if isinstance(module, PactLinear)]
        for module in ours:
            module.execution = execution
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        adapted = any(plan.adapter is not None for plan in layers.values())
        fused, left = fuse(inner, execution, self._settings, dtype, adapted=adapted)
        reasons: dict[str, list[str]] = {}
        for each in left:
            reasons.setdefault(each.reason, []).append(each.name)
        also = "" if execution.weights is None else f"; {execution.weights}"
        model.dataflow = Flow(
            key=self.key,
            execution=execution.name,
            because=why,
            forward=f"Ŵ, in NVFP4 blocks along the input dimension{also}",
            backward=f"{_backward(self)}{also}",
            gap=round(sum(module.gap for module in ours) / max(len(ours), 1), 8),
            layers=len(ours),
            others=len(layers) - len(ours),
            fused=fused,
            left=reasons,
        )
        return model

    def adapter_layers(self) -> dict[type[nn.Module], type[nn.Module]]:
        """As Stock, and the fused one over a `PactLinear`."""
        from toolkit_plugins.dataflows.pact.lora import pact_lora
        from toolkit_plugins.dataflows.pact.weights import PactLinear

        return {PactLinear: pact_lora(), **super().adapter_layers()}

    def replacement(self, layer: Layer, plan: LayerPlan, dtype: torch.dtype, start: Start | None) -> nn.Module | None:
        """A `PactLinear` where the plan says `nvfp4` and no other compute dtype; else as Stock."""
        from toolkit_plugins.dataflows.pact.weights import PactLinear

        if not _nvfp4(plan) or plan.compute_dtype not in (None, str(dtype).removeprefix("torch.")) or plan.range_guard:
            return super().replacement(layer, plan, dtype, start)
        weight = layer.weight()
        try:
            packed = start.base if start is not None else registry.make("quantizer", plan.quantizer).quantize(weight)
        except InputError as error:
            raise InputError(f"layer {layer.name}: {error}") from None
        bias = getattr(layer.module, "bias", None)
        return PactLinear(packed, None if bias is None else bias.detach().clone(), dtype, self._settings, weight)

    @property
    def _settings(self) -> Settings:
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})


def _backward(settings: Settings) -> str:
    if settings.layouts == "shared":
        return "Ŵ, the same"
    of = "Ŵ" if settings.source == "calibrated" else "the original weight"
    return f"W̃, {of} in NVFP4 blocks along the output dimension"


def _nvfp4(plan: LayerPlan) -> bool:
    from toolkit_plugins.quantizers.nvfp4 import NVFP4

    return isinstance(registry.make("quantizer", plan.quantizer), NVFP4)
