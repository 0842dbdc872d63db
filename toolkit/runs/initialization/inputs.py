"""The inputs of a model's layers, as hooks see them: rounded while a model is scored, and their second moments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.interfaces import Quantizer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.weights.layers import Layer


@contextlib.contextmanager
def rounding(layers: Iterable[Layer], quantizer: Quantizer) -> Iterator[None]:
    """Round every input of these layers, each token by itself (`Quantizer.each_row`), for the length of a block.

    Layers that are called with one and the same tensor share its rounded form.

    Raises:
        InputError: a layer is one expert of a stacked parameter, whose input no hook sees; it is called without an
            input by place; or its input cannot be rounded. The layer is named.
    """
    last: list[tuple[Any, Any]] = []

    def round_for(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = _input(name, args)
            if not last or last[0][0] is not x:
                try:
                    last[:] = [(x, quantizer.each_row(x))]
                except InputError as error:
                    raise InputError(f"layer {name}, its inputs: {error}") from None
            return (last[0][1], *args[1:])

        return hook

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            _expect_module(layer)
            hooks.callback(layer.module.register_forward_pre_hook(round_for(layer.name)).remove)
        yield


def second_moments(
    model: nn.Module,
    layers: Sequence[Layer],
    ids: torch.Tensor,
    *,
    batch: int,
    counted: Callable[[], object] = lambda: None,
) -> Mapping[str, torch.Tensor]:
    """Layer name → R = (1/n)·Σ xxᵀ over all n tokens, (in, in), float32, on the model's device.

    Layers that are called with one and the same tensor share one R.

    Args:
        ids: (windows, window) of the calibration text.
        batch: windows a forward pass.
        counted: called after every batch, for progress.

    Raises:
        InputError: an input is not finite (the layer is named), a layer is called without an input by place, or it is
            one expert of a stacked parameter.
    """
    import torch

    from toolkit.runs.starting.moments import Gathered

    owners: dict[str, str] = {}
    sums: dict[str, Gathered] = {}
    seen: dict[int, str] = {}  # of one forward pass: id of the input → the layer that counted it
    alive: list[Any] = []  # so that no id is given twice

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = _input(name, args)
            owner = seen.setdefault(id(x), name)
            alive.append(x)
            if owners.setdefault(name, owner) == name and not sums.setdefault(name, Gathered()).add(x):
                raise InputError(f"layer {name}: its inputs on the calibration text are not finite")

        return hook

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            _expect_module(layer)
            hooks.callback(layer.module.register_forward_pre_hook(watch(layer.name)).remove)
        device = next(model.parameters()).device
        for at in range(0, len(ids), batch):
            model(input_ids=ids[at : at + batch].to(device), use_cache=False)
            seen.clear()
            alive.clear()
            counted()
    found = {name: gathered.moments() for name, gathered in sums.items()}
    return {
        layer.name: moments.second for layer in layers if (moments := found.get(owners.get(layer.name, ""))) is not None
    }


def output_error(error: torch.Tensor, weight: torch.Tensor, second: torch.Tensor) -> float:
    """√(tr(E R Eᵀ)/tr(W R Wᵀ)): the relative error of a layer's outputs over the tokens that R counts.

    Args:
        error: E, (out, in), float32; weight: W.
        second: R, (in, in); sums in float64.
    """
    above, below = ((m @ second).mul_(m).double().sum().item() for m in (error.float(), weight.float()))
    return max(above / below, 0.0) ** 0.5 if below > 0 else 0.0


def _input(name: str, args: tuple[Any, ...]) -> torch.Tensor:
    if not args:
        raise InputError(f"layer {name} is called without an input by place: what goes into it cannot be seen")
    return args[0]


def _expect_module(layer: Layer) -> None:
    if layer.index is not None:
        raise InputError(
            f"layer {layer.name} is one expert of a stacked parameter: what goes into it cannot be seen from outside; "
            "leave out `calibration` and `activations` for this model"
        )
