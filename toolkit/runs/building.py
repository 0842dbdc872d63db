"""`build`: from a model and a plan to a ready model, checked before and audited after."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError, closest
from toolkit.interfaces import DataFlow
from toolkit.records.plan import LayerPlan, Plan
from toolkit.registry import registry

if TYPE_CHECKING:
    import torch
    from torch import nn


def build(
    model: str | os.PathLike[str] | nn.Module,
    plan: Plan,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    attention: str | None = None,
    start: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """A model whose planned layers are quantized and whose others are untouched, in evaluation mode.

    The plan is checked against the model's layer names and components before weights are loaded, and against
    its fingerprint before one is changed. Weights are quantized from the checkpoint's own dtype; what stays
    dense is then cast to the compute dtype. A model object is changed in place.

    Adapters alone can be trained; they are float32 in a 16-bit model, and their A depend on (seed, layer name, rank,
    shape) alone where their initializer leaves them so. Layers whose initializer is not plain start as the folder
    `start` says, or are started here, from their dense weights, where nothing need be calibrated. `model.plan` is the
    plan, with the weights' fingerprint and the digest of the bases that initializers changed; `model.starts` tells of
    each such layer; `model.dataflow` (`toolkit.records.dataflow.Flow`) of how it computes, where its data flow had a
    choice. A model with adapters keeps no cache of keys and values unless it is asked to.

    Args:
        model: a Hugging Face id, a local directory, `demo`, or a dense model object.
        plan: what becomes of each layer.
        device: by default CUDA where there is one; a model object stays where it is.
        dtype: compute dtype; by default bfloat16 where the device has it, else float32; a model object keeps its own.
        seed: of the adapters.
        attention: implementation of attention, by transformers' name; by default `sdpa`, and a model object's own.
        start: folder of starts, as `toolkit initialize` and `toolkit calibrate` write them.

    Raises:
        InputError: the plan names layers that the model does not have, is for another model or for other
            weights, names components that do not exist, asks for what its data flow cannot compute or an initializer
            cannot do (layer and reason are named), or the starts are of another model or plan.
        RunError: the built model is not what was planned (`toolkit.runs.audit`).
    """
    from torch import nn

    from toolkit.runs.audit import audit
    from toolkit.runs.guard import settle
    from toolkit.runs.models import cast, choose_device, compute_dtype, load_model, skeleton
    from toolkit.runs.started import Starts

    if not isinstance(plan, Plan):
        raise InputError(
            f"plan is {plan!r:.60} ({type(plan).__name__}), and a Plan is asked for, as Plan.protecting(selection)"
        )
    flow = checked(plan)
    if isinstance(model, nn.Module):
        where = None if device is None else choose_device(device)
        target = compute_dtype(where or _device_of(model), dtype if dtype is not None else _dtype_of(model))
        begun = Starts(_begun(model, plan, start), target, seed, start)
        if attention is not None:
            _attend(model, attention)
    else:
        where = choose_device(device)
        target = compute_dtype(where, dtype)
        source = os.fspath(model) if isinstance(model, Path) else model
        begun = Starts(_begun(skeleton(source), plan, start), target, seed, start)
        model = load_model(source, device="cpu", attention=attention or "sdpa")
    adapted = plan.default.adapter is not None or any(layer.adapter is not None for layer in plan.layers.values())
    plan = _of_these_weights(plan, model, needed=adapted or begun.layers > 0)
    begun.expect(plan.fingerprint)
    if where is not None:
        model.to(where)
    layers = decide(model, plan)
    model = flow.apply(model, layers, target, seed=seed, starts=begun)
    plan = _on_this_base(plan, begun.digest)
    cast(model, target, keep={id(p) for p in model.parameters() if p.requires_grad} if adapted else set())
    model.eval()
    if adapted and hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    settle(model)
    audit(model, layers, target)
    model.plan, model.starts = plan, begun.records
    return model


def _begun(model: nn.Module, plan: Plan, folder: str | os.PathLike[str] | None) -> dict[str, LayerPlan]:
    """The layers that do not start plainly; names and initializers are checked.

    Raises:
        InputError: as `decide` and `toolkit.runs.started.check`; or starts for a plan that starts every layer plainly.
    """
    from toolkit.runs.started import check
    from toolkit.weights.layers import head_of, layers_of

    layers = decide(model, plan)
    shapes = {layer.name: layer.shape for layer in layers_of(model, include_head=head_of(model) in layers)}
    found = check(layers, shapes, folder=folder is not None)
    if folder is not None and not found:
        raise InputError(f"the plan starts every layer plainly, and starts are given: {os.fspath(folder)}")
    return found


def _on_this_base(plan: Plan, digest: str | None) -> Plan:
    """The plan with the digest of the bases that initializers changed.

    Raises:
        InputError: the plan is for another base.
    """
    if plan.start is not None and plan.start != digest:
        made = "no initializer has changed this one" if digest is None else f"this one is {digest[:12]}"
        raise InputError(
            f"the plan is for a base that initializers changed (start {plan.start[:12]}), and {made}: build with the "
            "folder of starts that it was made with"
        )
    return plan.model_copy(update={"start": digest})


def _of_these_weights(plan: Plan, model: nn.Module, *, needed: bool) -> Plan:
    """The plan with the fingerprint of the weights, where it has one or one is needed.

    Raises:
        InputError: the plan is for other weights.
    """
    from toolkit.weights.profiling import fingerprint_of

    if plan.fingerprint is None and not needed:
        return plan
    found = fingerprint_of(model)
    if plan.fingerprint is None:
        return plan.model_copy(update={"fingerprint": found, "model": plan.model or _name_of(model)})
    if found != plan.fingerprint:
        raise InputError(
            f"the plan is for {plan.model} (weights {plan.fingerprint[:12]}), and this model's weights are "
            f"{found[:12]}: a plan for another model, or changed weights"
        )
    return plan


def _name_of(model: nn.Module) -> str | None:
    """The hub id that a model was loaded by; a path is of one machine only."""
    name = getattr(model, "name_or_path", None) or None
    return None if name is None or os.path.exists(name) else name


def _attend(model: nn.Module, attention: str) -> None:
    """Give a model object the implementation of attention that is asked for, where it has a choice."""
    if getattr(getattr(model, "config", None), "_attn_implementation", attention) == attention:
        return
    try:
        model.set_attn_implementation(attention)
    except (AttributeError, ImportError, ValueError) as error:
        raise InputError(f"{type(model).__name__} cannot attend by {attention!r}: {error}") from None


def checked(plan: Plan) -> DataFlow:
    """The plan's data flow, after every component it names was found.

    Raises:
        InputError: an unknown quantizer, initializer, scaler or data flow; a scaling that its scaler does not give; an
            initializer that fits an adapter where there is none; or a plan that the data flow refuses.
    """
    flow: DataFlow = registry.make("dataflow", plan.dataflow)
    for name, layer in _named(plan):
        try:
            registry.make("quantizer", layer.quantizer)
            begin = registry.make("initializer", layer.initializer)
            if begin.needs_rank and layer.adapter is None:
                raise InputError(f"initializer {begin.key} fits an adapter, and there is none: give a rank")
            if layer.adapter is not None:
                adapter = layer.adapter
                scaling = registry.make("scaler", adapter.scaler)(adapter.alpha, adapter.rank)
                if scaling != adapter.scaling:
                    raise InputError(
                        f"the scaling is {adapter.scaling}, and {adapter.scaler} gives {scaling} for alpha "
                        f"{adapter.alpha} and rank {adapter.rank}"
                    )
        except InputError as error:
            raise InputError(f"plan, {name}: {error}") from None
    flow.check(plan)
    return flow


def _named(plan: Plan) -> Iterable[tuple[str, LayerPlan]]:
    yield "default", plan.default
    for name, layer in plan.layers.items():
        yield f"layer {name}", layer


def decide(model: nn.Module, plan: Plan) -> dict[str, LayerPlan]:
    """The decision for every layer of a model, in model order; the head's only where it is named.

    Raises:
        InputError: the plan names layers that the model does not have; the closest names are offered.
    """
    from toolkit.weights.layers import head_of, layers_of

    head = head_of(model)
    names = [layer.name for layer in layers_of(model, include_head=head in plan.layers)]
    unknown = [name for name in plan.layers if name not in set(names)]
    if unknown:
        more = f" (and {len(unknown) - 1} others of the plan)" if len(unknown) > 1 else ""
        of = f"; the plan is for {plan.model}" if plan.model else ""
        raise InputError(f"{type(model).__name__} has no layer {unknown[0]!r}{more}; {closest(unknown[0], names)}{of}")
    return {name: plan.of(name) for name in names}


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
