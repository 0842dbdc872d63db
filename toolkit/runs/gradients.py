"""Gradients of frozen weights, layer by layer: each is handed over as backward makes it, and then let go.

The loss of a batch is the mean over its predicted tokens, as training has it:

    L_b = −1/n_b · Σ_{t to be predicted} log p(x_t | x_<t)        G_b = ∂L_b/∂W, (out, in)

log-softmax in float32. One layer's gradient is in memory at a time (a stack of experts counts as one).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError, closest
from toolkit.records.profile import Profile
from toolkit.weights.layers import Layer, layers_of

IGNORED = -100
"""The label of a token that is not to be predicted."""

Batch = Mapping[str, torch.Tensor]
Reduce = Callable[[Layer, torch.Tensor], Any]
"""(layer, its gradient as (out, in) in float32) → one number, or a tensor that holds one."""


def layers_in(model: nn.Module, profile: Profile) -> list[Layer]:
    """The model's layers in the profile's order.

    Raises:
        InputError: the profile has a layer that the model has not, or gives it another shape.
    """
    found = {layer.name: layer for layer in layers_of(model, include_head=profile.head in profile.names)}
    for row in profile.layers:
        if row.name not in found:
            raise InputError(f"{type(model).__name__} has no layer {row.name!r}; {closest(row.name, found)}")
        if found[row.name].shape != row.shape:
            raise InputError(
                f"layer {row.name} is {found[row.name].shape} in the model and {row.shape} in the profile (out, in)"
            )
    return [found[row.name] for row in profile.layers]


def token_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """The mean of −log p over a batch's predicted tokens, in float32, and how many these are.

    Raises:
        InputError: no token of the batch is to be predicted.
    """
    labels = batch["labels"][:, 1:]
    at = labels != IGNORED
    count = int(at.sum())
    if count == 0:
        raise InputError("a batch holds no token that is to be predicted after a first one")
    answer = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    logits = answer.logits[:, :-1][at].float()  # rows of predicted tokens only: the vocabulary is wide
    return nn.functional.cross_entropy(logits, labels[at]), count


def mean_over_batches(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Sequence[Layer],
    reduce: Reduce,
    progress: Callable[[int, int], None] | None = None,
) -> list[float | None]:
    """1/B · Σ_b reduce(layer, G_b) for each layer; None where no batch's gradient reached the layer.

    A layer that a batch does not reach counts 0 for that batch. The gradient of a weight that several modules share
    (a tied head) is the whole one. The model is left as it was: no gradients, none asked for.

    Raises:
        InputError: a loss, or a layer's reduced gradient, that is no finite number (batch and layer named), or
            a batch without a predicted token.
    """
    if not batches:
        raise InputError("there are no batches to take gradients of")
    totals: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        found: dict[str, Any] = {}  # in the order of backward: what is wrong shows first nearest to the loss
        with _watched(
            model, layers, lambda layer, gradient, found=found: found.update({layer.name: reduce(layer, gradient)})
        ):
            loss, _ = token_loss(model, batch)
            if not torch.isfinite(loss):
                raise InputError(f"the loss of calibration batch {number + 1} of {len(batches)} is {loss.item()}")
            loss.backward()
        for name, value in found.items():
            value = float(value)
            if not abs(value) < float("inf"):  # NaN compares false
                raise InputError(
                    f"layer {name}: its gradient on calibration batch {number + 1} of {len(batches)} gives {value}, "
                    "no finite number; measure in a wider dtype (float32), or leave the batch out"
                )
            totals[name] = totals.get(name, 0.0) + value
        if progress is not None:
            progress(number + 1, len(batches))
    return [totals[layer.name] / len(batches) if layer.name in totals else None for layer in layers]


@contextlib.contextmanager
def _watched(model: nn.Module, layers: Sequence[Layer], see: Callable[[Layer, torch.Tensor], None]) -> Iterator[None]:
    """Inside, backward hands each layer's gradient to `see` and frees it; nothing else of the model asks for one."""
    held: dict[int, tuple[nn.Parameter, list[Layer]]] = {}
    for layer in layers:
        parameter = getattr(layer.module, layer.parameter)
        held.setdefault(id(parameter), (parameter, []))[1].append(layer)
    asked = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    hooks = []
    try:
        for parameter, _, _ in asked:
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter, sharing in held.values():
            parameter.requires_grad_(True)

            def take(parameter: torch.Tensor, sharing: list[Layer] = sharing) -> None:
                gradient, parameter.grad = parameter.grad, None
                assert gradient is not None
                with torch.no_grad():
                    for layer in sharing:
                        part = gradient if layer.index is None else gradient[layer.index]
                        see(layer, (part.mT if layer.transposed else part).float())

            hooks.append(parameter.register_post_accumulate_grad_hook(take))
        with torch.enable_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, wanted, gradient in asked:
            parameter.requires_grad_(wanted)
            parameter.grad = gradient
