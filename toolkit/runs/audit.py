"""The audit: after building, each layer's planned and actual storage, adapter and scaling are compared.

What counts is the tensors that a layer holds, their dtypes and their bytes, never a class name: layers labelled
4-bit have been found holding 16-bit weights. What the plan should cost is found by packing zeros of the same
shape with the planned quantizer, so a format whose size depends on the values cannot be audited this way.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import RunError
from toolkit.interfaces import Quantizer
from toolkit.records.plan import LayerPlan
from toolkit.registry import registry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.weights.layers import Layer

TABLES = 2048
"""Bytes of look-up tables that a library may keep beside a layer's own tensors."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """What a layer holds beside its bias: dtype and bytes of each tensor, largest first."""

    tensors: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return sum(size for _, size in self.tensors)

    @property
    def dtype(self) -> str:
        """Dtype of the largest tensor."""
        return self.tensors[0][0]

    def __str__(self) -> str:
        shown = ", ".join(f"{size} bytes of {dtype}" for dtype, size in self.tensors[:4])
        return shown + (f" and {len(self.tensors) - 4} tensors more" if len(self.tensors) > 4 else "")


@dataclasses.dataclass(frozen=True)
class Audited:
    """One layer of a built model.

    Attributes:
        rank, scaling: of its adapter; None where it has none.
        dora: whether its adapter trains a magnitude.
        guarded: whether its products are under the range guard.
    """

    name: str
    storage: Storage
    rank: int | None
    scaling: float | None
    dora: bool
    guarded: bool


def audit(model: nn.Module, layers: Mapping[str, LayerPlan], dtype: torch.dtype) -> list[Audited]:
    """Compare every layer of a built model with its plan.

    Args:
        layers: name → decision, for every layer of the model.
        dtype: the compute dtype, in which unquantized layers may be held.

    Raises:
        RunError: a layer is missing, or differs in storage, dtype, adapter or scaling; the first five are named.
    """
    found = {layer.name: layer for layer in built_layers(model)}
    sizes: dict[Any, Storage] = {}
    results, differing = [], []
    for name, planned in layers.items():
        if name not in found:
            differing.append(f"{name}: it is not in the built model")
            continue
        layer = found[name]
        actual = storage_of(layer)
        results.append(Audited(name, actual, *_adapter(model, layer)))
        key = (planned.quantizer, layer.shape)
        if key not in sizes:
            sizes[key] = _expected(planned.quantizer, layer.shape, dtype)
        differing += [f"{name}: {text}" for text in _compare(planned, sizes[key], results[-1], layer, dtype)]
    if differing:
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise RunError(f"the built model is not what was planned: {'; '.join(differing[:5])}{more}")
    return results


def _compare(planned: LayerPlan, expected: Storage, actual: Audited, layer: Layer, dtype: torch.dtype) -> Iterator[str]:
    held, numbers = actual.storage, layer.parameters
    if (
        len(expected.tensors) == 1 and "float" in expected.dtype and expected.bytes == 2 * numbers
    ):  # no more than 16 bit
        right = {expected.dtype: 2, "float16": 2, "bfloat16": 2, _plain(dtype): dtype.itemsize}
        if len(held.tensors) != 1 or held.dtype not in right or held.bytes != right[held.dtype] * numbers:
            yield f"planned in 16 bit ({planned.quantizer}), found {held}"
    else:
        missing = Counter(expected.tensors) - Counter(held.tensors)
        if missing or held.bytes > expected.bytes + TABLES:
            yield f"planned {planned.quantizer} ({expected}), found {held}"
    adapter = planned.adapter
    if (adapter is None) != (actual.rank is None):
        yield f"an adapter is {'planned and missing' if adapter else 'there and not planned'}"
    elif adapter is not None:
        if actual.rank != adapter.rank:
            yield f"an adapter of rank {adapter.rank} is planned, found {actual.rank}"
        if actual.scaling != adapter.scaling:
            yield f"the adapter's scaling is planned as {adapter.scaling!r}, found {actual.scaling!r}"
        if actual.dora != adapter.dora:
            yield f"the adapter is planned {'with' if adapter.dora else 'without'} DoRA, found the opposite"
    if actual.guarded != (planned.range_guard and _plain(dtype) == "float16"):
        yield f"the range guard is {'there and not planned' if actual.guarded else 'planned and missing'}"
    compute = planned.compute_dtype or _plain(dtype)
    found = getattr(layer.module, "compute_dtype", None)  # dense layers have none: they compute in what they hold
    if found is not None and _plain(found) != compute:
        yield f"it is planned to compute in {compute}, found {_plain(found)}"


def _expected(key: str, shape: tuple[int, int], dtype: torch.dtype) -> Storage:
    import torch

    quantizer: Quantizer = registry.make("quantizer", key)
    packed = quantizer.quantize(torch.zeros(shape, dtype=dtype))
    return _storage(list(packed.tensors.values()))


def built_layers(model: nn.Module) -> list[Layer]:
    """The layers of a built model, the head included: also experts whose parameter was packed."""
    from toolkit.runs.frozen import FrozenStack
    from toolkit.weights.layers import Layer, head_of, layers_of

    found = list(layers_of(model, include_head=head_of(model) is not None)) if _has_layers(model) else []
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for path, module in inner.named_modules():
        for name, parametrization in getattr(module, "parametrizations", {}).items():
            stack = parametrization[0]
            if isinstance(stack, FrozenStack):
                for index in range(stack.count):
                    full = f"{path}.{name}".lstrip(".")
                    found.append(
                        Layer(f"{full}[{index}]", name, None, stack.shape, path, module, name, stack.transposed, index)
                    )
    return found


def _has_layers(model: nn.Module) -> bool:
    from torch import nn

    return any(isinstance(m, nn.Linear) or hasattr(m, "in_features") for m in model.modules())


def storage_of(layer: Layer) -> Storage:
    """What a layer holds: parameters, buffers, and tensors that its weight carries along; the bias apart."""
    from toolkit.runs.frozen import stack_of

    if layer.index is not None:
        stack = stack_of(layer.module, layer.parameter)
        if stack is None:
            return _storage([layer.weight()])
        packed = stack.expert(layer.index)
        return _storage(list(packed.tensors.values()) if packed else [stack.dense[str(layer.index)]])
    module = layer.module
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name != "bias":
            _collect(tensor, tensors)
    return _storage(list(tensors.values()))


def _collect(item: Any, tensors: dict[int, torch.Tensor], depth: int = 0) -> None:
    """Tensors reachable from a tensor's own attributes, such as the scales that a packed parameter carries."""
    import torch

    if isinstance(item, torch.Tensor):
        if id(item) in tensors:
            return
        tensors[id(item)] = item
    elif isinstance(item, torch.nn.Module) or depth == 0:
        return
    if depth < 4 and hasattr(item, "__dict__"):
        for value in vars(item).values():
            if isinstance(value, torch.Tensor) or hasattr(value, "__dict__"):
                _collect(value, tensors, depth + 1)


def _storage(tensors: list[torch.Tensor]) -> Storage:
    sizes = [(_plain(t.dtype), t.numel() * t.element_size()) for t in tensors]
    return Storage(tuple(sorted(sizes, key=lambda each: (-each[1], each[0]))))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _adapter(model: nn.Module, layer: Layer) -> tuple[int | None, float | None, bool, bool]:
    """Rank, scaling and DoRA of the adapter around a layer, read from its parts; whether the layer is guarded."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    guarded = getattr(layer.module, "guard", None) is not None
    wrapper = None if layer.index is not None else inner.get_submodule(layer.path)
    matrices = getattr(wrapper, "lora_A", None)
    if not matrices:
        return None, None, False, guarded
    name = next(iter(matrices))
    dora = name in getattr(wrapper, "lora_magnitude_vector", {})
    return matrices[name].weight.shape[0], float(wrapper.scaling[name]), dora, guarded
