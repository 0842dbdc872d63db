"""Sweeping selections over one model: both states of every layer are prepared once and swapped by pointer.

A swept state computes what `toolkit.build` computes for the same plan, without quantizing or loading again:
a protected layer multiplies by its weight as `protect` keeps it, every other one by the dequantized weight of
`base`, both rounded once to the compute dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from toolkit.errors import InputError, closest
from toolkit.interfaces import Quantizer
from toolkit.registry import registry
from toolkit.runs.models import cast
from toolkit.weights.layers import head_of, layers_of

if TYPE_CHECKING:
    import torch
    from torch import nn


class Sweep:
    """One model whose layers switch between two quantizers.

    Args:
        model: in its checkpoint's dtype; it is changed in place, and cast to `dtype`.
        names: the layers that switch, in profile order.
        base, protect: quantizer keys of the two states.
        dtype: compute dtype.

    A weight that the layer shares with an embedding (a tied head) is untied: the embedding keeps its own.

    Raises:
        InputError: a name that is no layer of the model, or a layer that cannot be quantized (named).
    """

    def __init__(self, model: nn.Module, names: Iterable[str], *, base: str, protect: str, dtype: torch.dtype) -> None:
        names = list(names)
        head = head_of(model)
        layers = {layer.name: layer for layer in layers_of(model, include_head=head in names)}
        for name in names:
            if name not in layers:
                raise InputError(f"the model has no layer {name!r}; {closest(name, layers)}")
        low: Quantizer = registry.make("quantizer", base)
        high: Quantizer = registry.make("quantizer", protect)
        states = {}
        for name in names:
            weight = layers[name].weight()
            try:
                states[name] = (_state(low, weight, dtype), _state(high, weight, dtype))
            except InputError as error:
                raise InputError(f"layer {name}: {error}") from None
        self.names = names
        self.model = model
        self._layers = {name: layers[name] for name in names}
        self._states = {name: tuple(map(layers[name].stored, pair)) for name, pair in states.items()}
        self._protected: frozenset[str] | None = None
        self.set(())  # frees the weights as they were loaded
        cast(model, dtype)
        self._protected = None
        self.set(())  # slices of stacked parameters, which have their dtype only now

    @property
    def protected(self) -> frozenset[str]:
        """The layers that are protected now."""
        assert self._protected is not None
        return self._protected

    def set(self, protected: Collection[str]) -> None:
        """Protect these layers and no others.

        Raises:
            InputError: a name that is no layer of the sweep.
        """
        wanted = frozenset(protected)
        for name in wanted - self._layers.keys():
            raise InputError(f"the sweep has no layer {name!r}; {closest(name, self.names)}")
        changed = self._layers.keys() if self._protected is None else wanted ^ self._protected
        for name in changed:
            self._layers[name].put(self._states[name][name in wanted])
        self._protected = wanted

    @contextlib.contextmanager
    def everything(self) -> Iterator[None]:
        """The 16-bit state, for the length of a block."""
        before = self.protected
        self.set(self.names)
        try:
            yield
        finally:
            self.set(before)


def _state(quantizer: Quantizer, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return quantizer.quantize(weight).dequantize(dtype)
