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


def rounded(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """x (…, in), rounded by a quantizer as one matrix (tokens, in), in its dtype."""
    flat = x.reshape(-1, x.shape[-1])
    return quantizer.quantize(flat).dequantize(x.dtype).reshape(x.shape)


@contextlib.contextmanager
def rounding(layers: Iterable[Layer], quantizer: Quantizer) -> Iterator[None]:
    """Round every input of these layers, for the length of a block.

    Layers that are called with one and the same tensor share its rounded form.

    Raises:
        InputError: a layer is one expert of a stacked parameter, whose input no hook sees.
    """
    last: list[tuple[Any, Any]] = []

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not last or last[0][0] is not args[0]:
            last[:] = [(args[0], rounded(args[0], quantizer))]
        return (last[0][1], *args[1:])

    handles = []
    try:
        for layer in layers:
            _expect_module(layer)
            handles.append(layer.module.register_forward_pre_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


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

    owners: dict[str, str] = {}
    sums: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}  # of one forward pass: id of the input → the layer that counted it
    alive: list[Any] = []  # so that no id is given twice

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            owner = seen.setdefault(id(x), name)
            alive.append(x)
            if owners.setdefault(name, owner) == name:
                flat = x.detach().reshape(-1, x.shape[-1]).float()
                if name not in sums:
                    sums[name] = flat.new_zeros(flat.shape[1], flat.shape[1])
                sums[name].addmm_(flat.mT, flat)

        return hook

    handles = []
    try:
        for layer in layers:
            _expect_module(layer)
            handles.append(layer.module.register_forward_pre_hook(watch(layer.name)))
        device = next(model.parameters()).device
        with torch.no_grad():
            for at in range(0, len(ids), batch):
                model(input_ids=ids[at : at + batch].to(device), use_cache=False)
                seen.clear()
                alive.clear()
    finally:
        for handle in handles:
            handle.remove()
    for name, total in sums.items():
        total /= ids.numel()
        if not bool(total.isfinite().all()):
            raise InputError(f"layer {name}: its inputs on the calibration text are not finite")
    return {layer.name: sums[owners[layer.name]] for layer in layers if layer.name in owners}


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
