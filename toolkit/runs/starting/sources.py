"""What a plan's starts are made from: the model's dense layers, and the decisions about them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit.records.plan import LayerPlan, Plan
from toolkit.registry import registry
from toolkit.runs import started
from toolkit.weights.layers import head_of, layers_of

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Source:
    """A plan, checked against a model.

    Attributes:
        plan: with the model's name and the fingerprint of its weights.
        asked: SHA-256 of the plan as it was given.
        model: the model's name; `reference`: what is known of its weights.
        layers: name → decision of every layer, in model order.
        begun: those of them whose initializer is not plain.
        read: name → W (out, in), in the checkpoint's dtype; one layer is read at a time.
        device, dtype: to compute on, and what bases are decoded to.
    """

    plan: Plan
    asked: str
    model: str
    reference: str
    layers: Mapping[str, LayerPlan]
    begun: Mapping[str, LayerPlan]
    read: Callable[[str], torch.Tensor]
    device: torch.device
    dtype: torch.dtype


def source_of(
    plan: Plan,
    model: str | os.PathLike[str] | nn.Module | None,
    *,
    device: str | None,
    dtype: str | torch.dtype | None,
    calibrated: bool,
) -> Source:
    """The plan's layers and their weights.

    Args:
        model: a Hugging Face id, a local directory, `demo`, or a dense model object; None: the plan's own.
        calibrated: whether initializers will be given what they are calibrated on.

    Raises:
        InputError: no plan, an unknown component, layers that the model does not have, other weights than the plan's,
            an initializer that cannot start a layer (named), or a plan that starts every layer plainly, or none by
            calibration where it is to be calibrated.
    """
    from torch import nn

    from toolkit.runs.building import checked, decide
    from toolkit.runs.models import choose_device, compute_dtype, skeleton
    from toolkit.weights.profiling import profile

    if not isinstance(plan, Plan):
        raise InputError(f"plan is {plan!r:.60} ({type(plan).__name__}), and a Plan is asked for")
    if model is None:
        if plan.model is None:
            raise InputError("the plan names no model, and none is given: name it, as model= or --model")
        model = plan.model
    plan = plan.model_copy(update={"start": None})
    checked(plan)
    if isinstance(model, nn.Module):
        shell, first = model, next(p for p in model.parameters() if p.is_floating_point())
        where = first.device if device is None else choose_device(device)
        target = compute_dtype(where, first.dtype if dtype is None else dtype)
    else:
        model = os.fspath(model) if isinstance(model, Path) else model
        shell, where = skeleton(model), choose_device(device)
        target = compute_dtype(where, dtype)
    layers = decide(shell, plan)
    head = head_of(shell)
    found = layers_of(shell, include_head=head in layers)
    begun = started.check(layers, {layer.name: layer.shape for layer in found}, folder=calibrated)
    if not begun:
        raise InputError("the plan starts every layer plainly: there is nothing to compute, and build needs no starts")
    if calibrated:
        keys = sorted({layer.initializer for layer in begun.values()})
        if not any(registry.make("initializer", key).needs_calibration for key in keys):
            raise InputError(
                f"no initializer of this plan is calibrated ({', '.join(keys)}): its starts are made by "
                "`toolkit initialize PLAN -o DIR`"
            )
    measured = profile(model, (), progress=False)
    if plan.fingerprint is not None and plan.fingerprint != measured.fingerprint:
        raise InputError(
            f"the plan is for {plan.model} (weights {plan.fingerprint[:12]}), and the weights of {measured.model} are "
            f"{measured.fingerprint[:12]}: a plan for another model, or changed weights"
        )
    return Source(
        plan=plan.model_copy(
            update={"fingerprint": measured.fingerprint, "model": plan.model or measured.model},
        ),
        asked=plan.hash,
        model=measured.model,
        reference=measured.reference.note,
        layers=layers,
        begun=begun,
        read=_held(found) if isinstance(model, nn.Module) else _stored(model, head if head in layers else None),
        device=where,
        dtype=target,
    )


def _held(found: list) -> Callable[[str], torch.Tensor]:
    by_name = {layer.name: layer for layer in found}
    return lambda name: by_name[name].weight()


def _stored(model: str | os.PathLike[str], head: str | None) -> Callable[[str], torch.Tensor]:
    """Layers of a checkpoint's files, mapped into memory and read when asked for."""
    from toolkit.weights import sources
    from toolkit.weights.checkpoints import open_checkpoint
    from toolkit.weights.families import layout

    checkpoint = open_checkpoint(sources.resolve(model).path)
    found = layout(checkpoint)
    by_name = {layer.name: layer for layer in found.layers}
    if head is not None and found.head_layer is not None:
        by_name[head] = found.head_layer
    return lambda name: by_name[name].read(checkpoint)
