"""The stock data flow: Hugging Face layers, bitsandbytes where it has the format, PEFT adapters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.interfaces import DataFlow, Quantizer
from toolkit.registry import registry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.records.plan import LayerPlan, Plan
    from toolkit.weights.layers import Layer

ADAPTER = "default"


class Stock(DataFlow):
    """Hugging Face + bitsandbytes + PEFT: each planned layer is replaced by its library's own.

    A layer becomes what its quantizer's `linear` gives (bitsandbytes' `Linear4bit` for its formats); where that
    gives nothing, a frozen layer that decodes the packed weight in forward and again in backward. A layer whose
    16-bit weight is kept bit for bit is left untouched. Experts stacked in one parameter stay stacked, each
    packed on its own. Adapters are PEFT's LoRA, y = Ŵx + s·BAx, with the plan's s at every layer.
    """

    name = "stock"

    def check(self, plan: Plan) -> None:
        """Refuse adapters on single experts, which PEFT cannot place, and scalings that are no numbers."""
        for name, layer in [("default", plan.default), *plan.layers.items()]:
            if layer.adapter is None:
                continue
            if name.endswith("]"):
                raise InputError(
                    f"layer {name}: data flow {self.name!r} puts no adapter on one expert of a stacked parameter, "
                    "because PEFT adapts whole modules; leave it out of the adapted layers"
                )
            if not math.isfinite(layer.adapter.scaling):
                raise InputError(f"layer {name}: the adapter's scaling is {layer.adapter.scaling}")

    def apply(self, model: nn.Module, layers: Mapping[str, LayerPlan], dtype: torch.dtype) -> nn.Module:
        """Replace the planned layers, then add the adapters; a model with adapters comes back as PEFT's model.

        Raises:
            InputError: a layer that cannot be quantized, or an adapter on an expert (named).
        """
        from toolkit.weights.layers import head_of, layers_of

        stacks: dict[tuple[int, str], list[Layer]] = {}
        for layer in layers_of(model, include_head=head_of(model) in layers):
            if layer.name not in layers:
                continue
            if layer.index is not None:
                if layers[layer.name].adapter is not None:
                    raise InputError(
                        f"layer {layer.name}: data flow {self.name!r} puts no adapter on one expert of a stacked "
                        "parameter; name the layers to adapt"
                    )
                stacks.setdefault((id(layer.module), layer.parameter), []).append(layer)
                continue
            replacement = self._replacement(layer, layers[layer.name], dtype)
            if replacement is not None:
                _put(model, layer.path, replacement)
        for experts in stacks.values():
            self._stack(experts, layers, dtype)
        adapted = {name: plan.adapter for name, plan in layers.items() if plan.adapter is not None}
        return _adapt(model, adapted) if adapted else model

    def _replacement(self, layer: Layer, plan: LayerPlan, dtype: torch.dtype) -> nn.Module | None:
        """The module to put in the layer's place, or None to leave it."""
        import torch

        from toolkit.runs.frozen import FrozenLinear

        quantizer: Quantizer = registry.make("quantizer", plan.quantizer)
        compute = getattr(torch, plan.compute_dtype) if plan.compute_dtype else dtype
        weight = layer.weight()
        if quantizer.keeps(weight.dtype) and compute == dtype:
            return None
        # a library that decodes to the weight's dtype must not round below the compute dtype
        dense = _dense(layer, torch.promote_types(weight.dtype, compute))
        try:
            native = None if quantizer.keeps(weight.dtype) else quantizer.linear(dense, compute)
            if native is not None:
                return native
            bias = None if dense.bias is None else layer.module.bias.detach().clone()
            return FrozenLinear(quantizer.quantize(weight), bias, compute)
        except InputError as error:
            raise InputError(f"layer {layer.name}: {error}") from None

    def _stack(self, experts: list[Layer], layers: Mapping[str, LayerPlan], dtype: torch.dtype) -> None:
        from toolkit.runs.frozen import freeze_stack

        packed = {}
        for layer in experts:
            plan = layers[layer.name]
            if plan.compute_dtype is not None:
                raise InputError(
                    f"layer {layer.name}: experts of one stacked parameter compute in the model's dtype; "
                    f"compute_dtype {plan.compute_dtype} is planned"
                )
            quantizer: Quantizer = registry.make("quantizer", plan.quantizer)
            weight = layer.weight()
            try:
                if not quantizer.keeps(weight.dtype):
                    packed[layer.index] = quantizer.quantize(weight)
            except InputError as error:
                raise InputError(f"layer {layer.name}: {error}") from None
        if packed:
            freeze_stack(experts, packed, dtype)


def _dense(layer: Layer, dtype: torch.dtype) -> nn.Linear:
    """The layer as an `nn.Linear` (out, in) that shares its memory where dtype and order allow."""
    from torch import nn

    weight = layer.weight().to(dtype)
    dense = nn.Linear(layer.shape[1], layer.shape[0], bias=False, device="meta")
    dense.weight = nn.Parameter(weight, requires_grad=False)
    own = getattr(layer.module, "bias", None)
    if own is not None:
        dense.bias = nn.Parameter(own.detach().to(dtype), requires_grad=False)
    return dense.train(layer.module.training)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _adapt(model: nn.Module, adapters: Mapping[str, Any]) -> nn.Module:
    """Put PEFT's LoRA on exactly these layers, each with its rank, its alpha s·r, and its s."""
    from peft import LoraConfig, get_peft_model

    from toolkit.runs.frozen import FrozenLinear

    first = next(iter(adapters.values()))
    config = LoraConfig(
        r=first.rank,
        lora_alpha=first.scaling * first.rank,
        target_modules="|".join(re.escape(name) for name in adapters),
        rank_pattern={re.escape(name): a.rank for name, a in adapters.items()},
        alpha_pattern={re.escape(name): a.scaling * a.rank for name, a in adapters.items()},
        fan_in_fan_out=any(_is_transposed(model.get_submodule(name)) for name in adapters),
    )
    config._register_custom_module({FrozenLinear: _frozen_lora()})
    if any(hasattr(getattr(m, "weight", None), "quant_state") for m in model.modules()):
        model.is_loaded_in_4bit = True  # PEFT asks for this mark before it takes its own 4-bit adapter layer
    adapted = get_peft_model(model, config, adapter_name=ADAPTER)
    inner = adapted.get_base_model()
    for name, adapter in adapters.items():  # s·r/r may differ from s in its last bit
        inner.get_submodule(name).scaling[ADAPTER] = adapter.scaling
    return adapted


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _frozen_lora() -> type[nn.Module]:
    """PEFT's LoRA layer for `FrozenLinear`; it refuses to merge into a packed weight."""
    from peft.tuners.lora import Linear

    class FrozenLora(Linear):
        """y = Ŵx + b + s·BAx over a packed Ŵ."""

        def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
            return module.in_features, module.out_features

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise InputError("an adapter does not merge into a packed weight: rounding again would change the model")

        def unmerge(self) -> None:
            raise InputError("an adapter over a packed weight was never merged")

    return FrozenLora
