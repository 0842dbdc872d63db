"""One block at work: its layers' inputs seen, rounded and counted; its weights replaced by what layers start with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from toolkit.errors import InputError
from toolkit.interfaces import Quantizer
from toolkit.runs.starting.shell import Call, Enough
from toolkit.weights.layers import Layer

PRODUCTS = (nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
"""What models multiply experts' inputs by their weights with."""

See = Callable[[str, torch.Tensor], torch.Tensor]
"""(layer, its input) → the input that it computes with."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that are calibrated at one time: each tuple of names shares one input."""

    inputs: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> list[str]:
        """All of its layers."""
        return [name for names in self.inputs for name in names]


class Block:
    """A copy of one block, on the device and in the compute dtype.

    Args:
        module: the copy.
        path: of the block in the model.
        layers: its layers, of the model.
        rounded: names of the layers whose inputs are rounded, by `activations`.
        activations: None: none are.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        layers: Iterable[Layer],
        rounded: Collection[str] = (),
        activations: Quantizer | None = None,
    ) -> None:
        self.module = module
        self.layers = {
            layer.name: dataclasses.replace(layer, module=module.get_submodule(layer.path[len(path) + 1 :]))
            for layer in layers
        }
        self._rounded = frozenset(rounded) if activations is not None else frozenset()
        self._activations = activations
        self._memo: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Replace a layer's weight, (out, in), in the block's own dtype."""
        self.layers[name].weight().copy_(weight)

    def run(self, call: Call, hidden: torch.Tensor, see: See | None = None) -> torch.Tensor | None:
        """The block's hidden states; `see` is told every layer's input, rounded where it is; None: it had enough."""
        self._memo = None

        def input_of(name: str, x: torch.Tensor) -> torch.Tensor:
            x = self._round(name, x)
            return x if see is None else see(name, x)

        try:
            with torch.no_grad(), self._seen(input_of if see is not None or self._rounded else None):
                return call(self.module, hidden)
        except Enough:
            return None
        finally:
            self._memo = None

    def order(self, call: Call, hidden: torch.Tensor) -> tuple[list[tuple[str, ...]], set[str]]:
        """Layers by the input that they share, in the order in which they are called; and those called twice or more.

        Experts of one stacked parameter stand in tuples of one, and those that were not called come last.
        """
        kept: list[torch.Tensor] = []  # so that no id is given twice
        found: dict[Any, list[str]] = {}
        times: dict[str, int] = {}

        def note(name: str, x: torch.Tensor) -> None:
            kept.append(x)
            times[name] = times.get(name, 0) + 1
            if times[name] == 1:
                found.setdefault(name if self.layers[name].index is not None else id(x), []).append(name)

        def input_of(name: str, x: torch.Tensor) -> torch.Tensor:
            note(name, x)
            return self._round(name, x)

        with torch.no_grad(), self._seen(input_of):
            call(self.module, hidden)
        self._memo = None
        shared = [tuple(names) for names in found.values()]
        shared += [(name,) for name in self.layers if name not in times]
        return shared, {name for name, count in times.items() if count > 1}

    def groups(self, shared: Sequence[tuple[str, ...]], *, sequential: bool = True) -> list[Group]:
        """What is calibrated at one time, one after the other: what shares an input, or the experts of a parameter."""
        if not sequential:
            return [Group(tuple(shared))]
        found: dict[Any, list[tuple[str, ...]]] = {}
        for names in shared:
            layer = self.layers[names[0]]
            key = names if layer.index is None else (layer.path, layer.parameter)
            found.setdefault(key, []).append(names)
        return [Group(tuple(inputs)) for inputs in found.values()]

    def _round(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in self._rounded or self._activations is None:
            return x
        if self._memo is None or self._memo[0] is not x:
            try:
                self._memo = (x, self._activations.each_row(x))
            except InputError as error:
                raise InputError(f"layer {name}, its inputs: {error}") from None
        return self._memo[1]

    @contextlib.contextmanager
    def _seen(self, input_of: See | None) -> Iterator[None]:
        """Every layer's input goes through `input_of`, for the length of a forward pass."""
        with contextlib.ExitStack() as stack:
            if input_of is not None:
                stacked: dict[int, tuple[torch.Tensor, dict[int, str]]] = {}
                for name, layer in self.layers.items():
                    if layer.index is None:
                        handle = layer.module.register_forward_pre_hook(_hook(name, input_of))
                        stack.callback(handle.remove)
                    else:
                        parameter = getattr(layer.module, layer.parameter)
                        entry = stacked.setdefault(parameter.untyped_storage().data_ptr(), (parameter, {}))
                        entry[1][layer.index] = name
                if stacked:
                    stack.enter_context(_Experts(stacked, input_of))
            yield


def _hook(name: str, input_of: See) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise InputError(f"layer {name} is called without an input by place: it cannot be calibrated")
        return (input_of(name, args[0]), *args[1:])

    return hook


class _Experts(TorchFunctionMode):
    """Inputs of experts that are stacked in one parameter: an expert is known by where its weight lies in memory."""

    def __init__(self, stacked: Mapping[int, tuple[torch.Tensor, Mapping[int, str]]], input_of: See) -> None:
        super().__init__()
        self._stacked, self._input_of = stacked, input_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and len(args) > 1 and isinstance(args[1], torch.Tensor):
            name = self._name(args[1])
            if name is not None:
                args = (self._input_of(name, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _name(self, weight: torch.Tensor) -> str | None:
        found = self._stacked.get(weight.untyped_storage().data_ptr())
        if found is None:
            return None
        parameter, names = found
        return names.get((weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0))
