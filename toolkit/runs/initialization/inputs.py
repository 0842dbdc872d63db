"""The inputs of a model's layers, as hooks see them: rounded while a model is scored, and their second moments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        InputError: a layer is one expert of a stacked parameter, whose input no hook sees.
    """
    last: list[tuple[Any, Any]] = []

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not last or last[0][0] is not args[0]:
            last[:] = [(args[0], quantizer.each_row(args[0]))]
        return (last[0][1], *args[1:])

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            _expect_module(layer)
            hooks.callback(layer.module.register_forward_pre_hook(hook).remove)
        yield


def second_moments(
    model: nn.Module, layers: Sequence[Layer], ids: torch.Tensor, *, batch: int
) -> Mapping[str, torch.Tensor]:
    """Layer name → R = (1/n)·Σ xxᵀ over all n tokens, (in, in), float32, on the model's device.

    Layers that are called with one and the same tensor share one R.

    Args:
        ids: (windows, window) of the calibration text.
        batch: windows a forward pass.

    Raises:
        InputError: an input is not finite (the layer is named), or a layer is one expert of a stacked parameter.
    """
    import torch

    from toolkit.runs.starting.moments import Gathered

    owners: dict[str, str] = {}
    sums: dict[str, Gathered] = {}
    seen: dict[int, str] = {}  # of one forward pass: id of the input → the layer that counted it
    alive: list[Any] = []  # so that no id is given twice

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            owner = seen.setdefault(id(args[0]), name)
            alive.append(args[0])
            if owners.setdefault(name, owner) == name and not sums.setdefault(name, Gathered()).add(args[0]):
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


def _expect_module(layer: Layer) -> None:
    if layer.index is not None:
        raise InputError(
            f"layer {layer.name} is one expert of a stacked parameter: what goes into it cannot be seen from outside; "
            "leave out `calibration` and `activations` for this model"
        )
