"""The stock data flow: Hugging Face layers, bitsandbytes where it has the format, PEFT adapters."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.interfaces import DataFlow, Quantizer, Start
from toolkit.registry import registry

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from torch import nn

    from toolkit.records.plan import Adapter, LayerPlan, Plan
    from toolkit.weights.layers import Layer

ADAPTER = "default"


class Stock(DataFlow):
    """Hugging Face + bitsandbytes + PEFT: each planned layer is replaced by its library's own.

    A layer becomes what its quantizer's `linear` gives (bitsandbytes' `Linear4bit` for its formats); where that
    gives nothing, a frozen layer that decodes the packed weight in forward and again in backward. A layer whose
    16-bit weight is kept bit for bit is left untouched. Experts stacked in one parameter stay stacked, each
    packed on its own. Adapters are PEFT's LoRA, y = Ŵx + s·BAx, with the plan's s at every layer. A layer with a start
    holds its packed base bit for bit, and its A and B; where that base is kept in 16 bit, its weight is replaced.
    """

    name = "stock"

    def check(self, plan: Plan) -> None:
        """Refuse what PEFT or the layers cannot compute.

        Raises:
            InputError: an adapter on a single expert; a scaling that is no number; DoRA on some adapters and not on
                others; a range guard where float16 is not what the layer computes in.
        """
        adapted = {}
        for name, layer in [("default", plan.default), *plan.layers.items()]:
            if layer.range_guard and layer.compute_dtype not in (None, "float16"):
                raise InputError(
                    f"layer {name}: range_guard keeps float16 products in range, and this one is computed in "
                    f"{layer.compute_dtype}; leave out one of the two"
                )
            if layer.adapter is None:
                continue
            adapted[name] = layer.adapter
            if name.endswith("]"):
                raise InputError(
                    f"layer {name}: data flow {self.name!r} puts no adapter on one expert of a stacked parameter, "
                    "because PEFT adapts whole modules; leave it out of the adapted layers"
                )
            if not math.isfinite(layer.adapter.scaling):
                raise InputError(f"layer {name}: the adapter's scaling is {layer.adapter.scaling}")
        if len({adapter.dora for adapter in adapted.values()}) > 1:
            some = next(name for name, adapter in adapted.items() if adapter.dora)
            other = next(name for name, adapter in adapted.items() if not adapter.dora)
            raise InputError(
                f"layer {some} has DoRA and layer {other} has not: PEFT's use_dora holds for all adapters of a model; "
                "give it to all of them or to none"
            )

    def apply(
        self,
        model: nn.Module,
        layers: Mapping[str, LayerPlan],
        dtype: torch.dtype,
        seed: int = 0,
        starts: Callable[[str, torch.Tensor], Start | None] | None = None,
    ) -> nn.Module:
        """Replace the planned layers, then add the adapters; a model with adapters comes back as PEFT's model.

        Raises:
            InputError: a layer that cannot be quantized, or an adapter on an expert (named).
        """
        from toolkit.weights.layers import head_of, layers_of

        stacks: dict[tuple[int, str], list[Layer]] = {}
        factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
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
            start = starts(layer.name, layer.weight()) if starts is not None else None
            replacement = self.replacement(layer, layers[layer.name], dtype, start)
            if start is not None and start.A is not None and start.B is not None:
                factors[layer.name] = start.A, start.B
            del start
            if replacement is not None:
                _put(model, layer.path, replacement)
        for experts in stacks.values():
            self._stack(experts, layers, dtype, starts)
        adapted = {name: plan.adapter for name, plan in layers.items() if plan.adapter is not None}
        return _adapt(model, adapted, seed, factors, self.adapter_layers()) if adapted else model

    def adapter_layers(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Class of a frozen layer → PEFT's layer over it; the first that fits is taken."""
        from toolkit.runs.frozen import FrozenLinear

        return {FrozenLinear: frozen_lora()}

    def replacement(self, layer: Layer, plan: LayerPlan, dtype: torch.dtype, start: Start | None) -> nn.Module | None:
        """The module to put in the layer's place, or None to leave it, its weight replaced where the start says so."""
        import torch

        from toolkit.runs.frozen import FrozenLinear

        quantizer: Quantizer = registry.make("quantizer", plan.quantizer)
        compute = getattr(torch, plan.compute_dtype) if plan.compute_dtype else dtype
        guarded = plan.range_guard and compute == torch.float16  # bfloat16 and float32 have range enough
        weight = layer.weight()
        packed = None if start is None else start.base
        if quantizer.keeps(weight.dtype) and compute == dtype and not guarded:
            if packed is not None:
                _replace(layer, packed.dequantize(weight.dtype))
            return None
        try:
            if not guarded and not quantizer.keeps(weight.dtype):
                # a library that decodes to the weight's dtype must not round below the compute dtype
                dense = _dense(layer, torch.promote_types(weight.dtype, compute))
                native = quantizer.linear(dense, compute, packed)
                if native is not None:
                    return native
            bias = getattr(layer.module, "bias", None)
            bias = None if bias is None else bias.detach().clone()
            frozen = FrozenLinear(packed or quantizer.quantize(weight), bias, compute, guarded=guarded)
        except InputError as error:
            raise InputError(f"layer {layer.name}: {error}") from None
        if dtype == torch.float16 and compute == torch.float32:
            frozen.count_casts()
        return frozen

    def _stack(
        self,
        experts: list[Layer],
        layers: Mapping[str, LayerPlan],
        dtype: torch.dtype,
        starts: Callable[[str, torch.Tensor], Start | None] | None,
    ) -> None:
        from toolkit.runs.frozen import freeze_stack

        packed = {}
        for layer in experts:
            plan = layers[layer.name]
            if plan.compute_dtype is not None or plan.range_guard:
                planned = "a range guard" if plan.range_guard else f"compute_dtype {plan.compute_dtype}"
                raise InputError(
                    f"layer {layer.name}: experts of one stacked parameter compute in the model's dtype; "
                    f"{planned} is planned"
                )
            quantizer: Quantizer = registry.make("quantizer", plan.quantizer)
            weight = layer.weight()
            try:
                start = starts(layer.name, weight) if starts is not None else None
                if start is not None:
                    packed[layer.index] = start.base
                elif not quantizer.keeps(weight.dtype):
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


def _replace(layer: Layer, weight: torch.Tensor) -> None:
    """Another dense weight (out, in) in the layer's place; what was tied to it keeps the old one."""
    from torch import nn

    stored = weight.mT if layer.transposed else weight
    setattr(layer.module, layer.parameter, nn.Parameter(stored.contiguous(), requires_grad=False))


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _adapt(
    model: nn.Module,
    adapters: Mapping[str, Adapter],
    seed: int,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    over: dict[type[nn.Module], type[nn.Module]],
) -> nn.Module:
    """Put PEFT's LoRA or DoRA on exactly these layers, each with its rank and its s; A and B are ours to set.

    PEFT computes s = alpha/r, or alpha/√r under `use_rslora`. Where one of the two gives every s from the planned
    alphas, the saved adapter says it so; else alpha is recorded as s·r.
    """
    import torch
    from peft import get_peft_model

    config = _config(adapters)
    config.task_type = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    config.fan_in_fan_out = any(_is_transposed(model.get_submodule(name)) for name in adapters)
    config._register_custom_module(over)
    if any(hasattr(getattr(m, "weight", None), "quant_state") for m in model.modules()):
        model.is_loaded_in_4bit = True  # PEFT asks for this mark before it takes its own 4-bit adapter layer
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # PEFT draws an A of its own
        # PEFT reads an attribute that transformers renamed: for its authors, and not for who trains
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted = get_peft_model(model, config, adapter_name=ADAPTER)
    inner = adapted.get_base_model()
    for name, adapter in adapters.items():
        layer = inner.get_submodule(name)
        layer.scaling[ADAPTER] = adapter.scaling  # s·r/r may differ from s in its last bit
        _start(layer, name, adapter, seed, factors.get(name))
    return adapted


def _config(adapters: Mapping[str, Adapter]) -> LoraConfig:
    from peft import LoraConfig

    rooted = all(a.alpha / math.sqrt(a.rank) == a.scaling for a in adapters.values())
    plain = all(a.alpha / a.rank == a.scaling for a in adapters.values())
    use_rslora = rooted and not plain
    alphas = {name: a.alpha if plain or rooted else a.scaling * a.rank for name, a in adapters.items()}
    first = next(iter(adapters))
    rank, alpha = adapters[first].rank, alphas[first]

    def anchored(name: str) -> str:  # PEFT would also take a path that ends so
        return "^" + re.escape(name)

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        use_rslora=use_rslora,
        use_dora=adapters[first].dora,
        target_modules="|".join(map(re.escape, adapters)),
        rank_pattern={anchored(name): a.rank for name, a in adapters.items() if a.rank != rank},
        alpha_pattern={anchored(name): value for name, value in alphas.items() if value != alpha},
    )


def _start(
    layer: nn.Module, name: str, adapter: Adapter, seed: int, factors: tuple[torch.Tensor, torch.Tensor] | None
) -> None:
    """A and B as they are given, or A from (seed, name, rank, shape) and B = 0; float32.

    DoRA's m = ‖Ŵ + s·BA‖ by rows, of the base as it is held, so that what it computes is Ŵ + s·BA at the start.
    """
    import torch
    from peft.utils.integrations import dequantize_module_weight
    from torch import nn

    from toolkit.runs.adapters import initial

    a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    device, shape = a.weight.device, (layer.out_features, layer.in_features)
    if factors is None:
        factors = initial(seed, name, adapter.rank, shape), torch.zeros(shape[0], adapter.rank)
    a.weight, b.weight = (nn.Parameter(each.to(device, torch.float32, copy=True)) for each in factors)
    if adapter.dora:
        weight = dequantize_module_weight(layer.get_base_layer()).detach().float()
        if _is_transposed(layer.get_base_layer()):
            weight = weight.mT
        if bool(b.weight.any()):
            weight = weight + adapter.scaling * (b.weight.detach() @ a.weight.detach())
        # as PEFT computes it in forward, so that m/‖Ŵ + s·BA‖ is one to the last bit
        layer.lora_magnitude_vector[ADAPTER].weight = nn.Parameter(torch.linalg.norm(weight, dim=1))


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def frozen_lora() -> type[nn.Module]:
    """PEFT's LoRA layer for `FrozenLinear`; it refuses to merge into a packed weight."""
    from peft.tuners.lora import Linear

    class FrozenLora(Linear):
        """y = Ŵx + b + s·BAx over a packed Ŵ, or DoRA's form of it."""

        def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> None:
            config = copy.copy(config)
            config.fan_in_fan_out = False  # Ŵ is (out, in), whatever the layer was
            super().__init__(base_layer, adapter_name, config=config, **kwargs)

        def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
            return module.in_features, module.out_features

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise InputError("an adapter does not merge into a packed weight: rounding again would change the model")

        def unmerge(self) -> None:
            raise InputError("an adapter over a packed weight was never merged")

    return FrozenLora
