"""The layers of a model object: its frozen linear projections, in model order.

A layer is an `nn.Linear`, a GPT-2 style `Conv1D` (stored the other way round), or one expert of a 3-D
parameter. The output head is known by being the output embedding, and is no layer unless it is asked for.
Routers and gates are what the model makes them: a bare 2-D parameter is no layer. transformers is not imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from toolkit.errors import InputError, closest

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts", "moe_num_experts")


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One frozen linear projection of a model object.

    Attributes:
        name: module path without `.weight`; an expert's is the path of its parameter and `[index]`.
        role: last part of the module path, without the expert's index.
        block: index of its block, counted on over several lists of blocks; None outside the blocks.
        shape: (out_features, in_features).
        path: path of `module`; for a layer under an adapter, the path of the adapter's wrapper.
        module: the module that holds the weight.
        parameter: the weight's attribute in `module`.
        transposed: whether the parameter is stored (…, in, out).
        index: which expert of a 3-D parameter; None for a whole parameter.
    """

    name: str
    role: str
    block: int | None
    shape: tuple[int, int]
    path: str
    module: nn.Module
    parameter: str = "weight"
    transposed: bool = False
    index: int | None = None

    @property
    def parameters(self) -> int:
        """Number of weights, out·in."""
        return self.shape[0] * self.shape[1]

    def weight(self) -> torch.Tensor:
        """The weight as (out, in): a detached view of the model's own memory, not necessarily contiguous.

        Raises:
            InputError: the weight is already quantized, on the meta device, or no float of 16 bit or more.
        """
        stored = getattr(self.module, self.parameter, None)
        if type(stored) not in (torch.Tensor, nn.Parameter) or stored.dtype not in READABLE:
            found = "no weight" if stored is None else f"{type(stored).__name__} of {stored.dtype}"
            raise InputError(
                f"layer {self.name} ({type(self.module).__name__}) holds {found}: it is already quantized; "
                "layers are read from a model in float32, float16 or bfloat16"
            )
        if stored.device.type == "meta":
            raise InputError(f"layer {self.name} is on the meta device and holds no values")
        stored = stored.detach()
        if self.index is not None:
            stored = stored[self.index]
        return stored.mT if self.transposed else stored

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight (out, in) as the module holds it, contiguous: what `put` takes, so that it is laid out once."""
        held = (weight.mT if self.transposed else weight).contiguous()
        return nn.Parameter(held, requires_grad=False) if self.index is None else held

    def put(self, stored: torch.Tensor) -> None:
        """Compute with this weight (`stored`) from now on.

        A whole parameter is put in by pointer: what shares the old one, such as an embedding, keeps it. Of a stacked
        parameter the values of this expert are written over.
        """
        if self.index is None:
            self.module._parameters[self.parameter] = stored  # type: ignore[assignment]  # `stored` made it one
        else:
            getattr(self.module, self.parameter).data[self.index] = stored


def layers_of(model: nn.Module, *, include_head: bool = False) -> list[Layer]:
    """Every layer of a model, in model order.

    Quantized linear layers of other libraries are listed (by `in_features` and `out_features`), and refuse
    to be read. Adapters are seen through: the layer is the adapted one, under its wrapper's path.

    Raises:
        InputError: the model has no layer, or `include_head` finds no head.
    """
    model = _bare(model)
    head = head_of(model)
    if include_head and head is None:
        raise InputError(f"{type(model).__name__} has no output embedding to include")
    outside = set() if head is None else {head} | set(_outer_heads(model))
    if include_head:
        outside.discard(head)
    found = [layer for layer in _walk(model, _Blocks(model)) if layer.name not in outside]
    if include_head and head not in [layer.name for layer in found]:
        raise InputError(f"the output embedding of {type(model).__name__} ({head}) is no linear layer")
    if not found:
        raise InputError(f"{type(model).__name__} has no linear layer")
    return found


def layer_of(model: nn.Module, name: str) -> Layer:
    """The layer of that name (the head included).

    Raises:
        InputError: there is none; the closest names are offered.
    """
    model = _bare(model)
    layers = list(_walk(model, _Blocks(model)))
    for layer in layers:
        if layer.name == name:
            return layer
    raise InputError(f"{type(model).__name__} has no layer {name!r}; {closest(name, [layer.name for layer in layers])}")


def block_count(model: nn.Module) -> int:
    """The number of blocks: the lengths of the outermost module lists that hold layers, added up."""
    model = _bare(model)
    blocks = _Blocks(model)
    for _ in _walk(model, blocks):
        pass
    return blocks.count


def head_of(model: nn.Module) -> str | None:
    """Module path of the output embedding, or None where there is none.

    In this order: what `get_output_embeddings` returns; the last linear layer outside the base model (a
    `score` of a classifier); the linear layer that shares its weight with an input embedding; the last
    linear layer outside the blocks that has an input embedding's shape. Names play no part.
    """
    model = _bare(model)
    paths = {id(module): path for path, module in model.named_modules()}
    getter = getattr(model, "get_output_embeddings", None)
    declared = getter() if callable(getter) else None
    if isinstance(declared, nn.Module) and id(declared) in paths:
        return paths[id(declared)]
    outer = _outer_heads(model)
    if outer:
        return outer[-1]
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tied = {id(m.weight) for m in embeddings}
    linear = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    for path, module in linear:
        if id(module._parameters.get("weight")) in tied:
            return path
    shapes = {(m.num_embeddings, m.embedding_dim) for m in embeddings}
    blocks = _Blocks(model)
    alike = [p for p, m in linear if (m.out_features, m.in_features) in shapes and blocks.of(p) is None]
    return alike[-1] if alike else None


def _bare(model: nn.Module) -> nn.Module:
    """The model inside an adapter's model, whose paths are those that transformers gives."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def _outer_heads(model: nn.Module) -> list[str]:
    """Linear layers outside the base model of a transformers model whose output embedding is not declared."""
    base = getattr(model, "base_model", None)
    if not getattr(model, "base_model_prefix", "") or not isinstance(base, nn.Module) or base is model:
        return []
    getter = getattr(model, "get_output_embeddings", None)
    if callable(getter) and getter() is not None:
        return []
    inside = {id(m) for m in base.modules()}
    return [p for p, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) not in inside]


class _Blocks:
    """Block indices: the integer after the outermost `ModuleList` on a path, counted on from list to list.

    An encoder's and a decoder's blocks both start at 0 in their names; here the decoder's follow the
    encoder's, so that an index stands for one place in the network's depth. Lists count in the order in
    which their layers are met; the choice is ours.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lists = {path: len(m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
        self._starts: dict[str, int] = {}
        self.count = 0

    def of(self, path: str) -> int | None:
        parts = path.split(".")
        for depth in range(len(parts)):
            outer = ".".join(parts[:depth])
            if outer in self._lists and parts[depth].isdigit():
                if outer not in self._starts:
                    self._starts[outer] = self.count
                    self.count += self._lists[outer]
                return self._starts[outer] + int(parts[depth])
        return None


def _walk(model: nn.Module, blocks: _Blocks) -> Iterator[Layer]:
    wrapped: set[int] = set()  # parts of an adapter, whose own matrices are no layers
    for path, module in model.named_modules():
        if id(module) in wrapped:
            continue
        base = module
        while isinstance(getattr(base, "base_layer", None), nn.Module):
            base = base.base_layer
        if base is not module:
            wrapped |= {id(m) for m in module.modules()}
        yield from _layers_in(path, base, blocks)


def _layers_in(path: str, module: nn.Module, blocks: _Blocks) -> Iterator[Layer]:
    role = path.rpartition(".")[2]
    if _is_conv1d(module):
        rows, columns = module.weight.shape
        yield Layer(path, role, blocks.of(path), (columns, rows), path, module, transposed=True)
    elif _is_linear(module):
        yield Layer(path, role, blocks.of(path), (module.out_features, module.in_features), path, module)
    else:
        yield from _experts_in(path, module, blocks)


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return True
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(n, int) for n in sizes) and not any(isinstance(m, nn.Linear) for m in module.modules())


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' `Conv1D`, y = x·W + b with W of shape (in, out); recognised without importing it."""
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def _experts_in(path: str, module: nn.Module, blocks: _Blocks) -> Iterator[Layer]:
    """One layer an expert, for each 3-D parameter whose first size is the module's number of experts."""
    stacked = {
        name: p
        for name, p in module.named_parameters(recurse=False)
        if p.ndim == 3 and any(getattr(module, count, None) == p.shape[0] for count in EXPERT_COUNTS)
    }
    transposed = _experts_transposed(module, stacked) if stacked else False
    for name, parameter in stacked.items():
        full = path if name == "weight" else f"{path}.{name}".lstrip(".")
        first, second = parameter.shape[1:]
        shape = (second, first) if transposed else (first, second)
        for index in range(parameter.shape[0]):
            yield Layer(
                name=f"{full}[{index}]",
                role=full.rpartition(".")[2],
                block=blocks.of(full),
                shape=shape,
                path=path,
                module=module,
                parameter=name,
                transposed=transposed,
                index=index,
            )


def _experts_transposed(module: nn.Module, stacked: dict[str, nn.Parameter]) -> bool:
    """Whether experts are stored (experts, in, out): as the module says, else from the sizes.

    transformers marks its experts with `is_transposed`. Unmarked pairs tell it by their sizes: a gate and up
    projection maps H to 2I and the down projection I to H, so (2I, H) with (H, I) is out × in.
    """
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    shapes = [tuple(p.shape[1:]) for p in stacked.values()]
    if len(shapes) == 2:
        (a, b), (c, d) = shapes
        return a == d and b == 2 * c
    return False
