"""Adapters of a built model: where they start, which parameters they are, and their files in PEFT's format.

A folder holds `adapter_model.safetensors` (float32) and `adapter_config.json`, which stock PEFT loads over the same
base, and `plan.json`: the plan with the fingerprint of the weights and the digest of the bases that initializers
changed, so that an adapter is never put on another base by mistake. Where one was changed, the base that
`adapter_config.json` names is no model that could be loaded: the plain one would be another.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, closest
from toolkit.records.io import atomic, read_json, write_json
from toolkit.records.plan import LayerPlan, Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PLAN = "plan.json"


def initial(seed: int, name: str, rank: int, shape: tuple[int, int]) -> torch.Tensor:
    """A (rank, in) in float32 on the CPU, a function of its arguments alone.

    Uniform on ±1/√in: Kaiming's with a = √5, as PEFT has it. The generator's seed is the first 8 bytes of SHA-256
    over the arguments as JSON, so that two arms that adapt a layer start it alike, whatever else they adapt, at
    any dtype and on any device.

    Args:
        shape: (out, in) of the layer.
    """
    import torch

    text = json.dumps([seed, name, rank, list(shape)], separators=(",", ":"))
    own = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(rank, shape[1], dtype=torch.float32).uniform_(-bound, bound, generator=own)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter, of what training changes."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextlib.contextmanager
def uncast(model: nn.Module) -> Iterator[None]:
    """Under autocast: LoRA's matrices take their input as it is, where PEFT would widen it to float32 first.

    Autocast narrows it again, so that the result is the same, and two casts and a copy of every input are spared.
    DoRA keeps the wide input: from it PEFT takes the dtype of the norms that it divides by. Without autocast a
    16-bit input and float32 matrices do not multiply: use it inside an autocast region only.
    """
    layers = [m for m in model.modules() if getattr(m, "cast_input_dtype_enabled", False) and not m.lora_variant]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a built model's adapters: its weights last, so that a folder with weights is whole.

    Raises:
        InputError: the model has no adapters, or was not made by `build`.
        RunError: the disk is full or the folder cannot be written.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if not hasattr(model, "peft_config"):
        raise InputError(f"{type(model).__name__} has no adapters to save: its plan gives no layer one")
    plan = getattr(model, "plan", None)
    if not isinstance(plan, Plan):
        raise InputError("this model's adapters were not made by build(), so their base is not known; build it first")
    config = copy.copy(next(iter(model.peft_config.values())))
    config.inference_mode = True
    config.base_model_name_or_path = plan.model or config.base_model_name_or_path
    if plan.start is not None:  # the name of the plain model would lead another loader to a wrong base
        config.base_model_name_or_path = f"{config.base_model_name_or_path} started as {plan.start[:12]}"
    settings = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    tensors = {name: p.detach().float().cpu().contiguous() for name, p in _state(model).items()}
    write_json(folder / PLAN, plan.to_json())
    write_json(folder / CONFIG, settings)
    with atomic(folder / WEIGHTS) as path:
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def load(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Put saved adapters into a built model that has the same base and the same adapters.

    Raises:
        InputError: the folder holds no adapter, or a damaged one; or it is for another base, other layers, ranks or
            scalings: both are named, and what differs.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    if not hasattr(model, "peft_config"):
        raise InputError(f"{type(model).__name__} has no adapters to load into: its plan gives no layer one")
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            held = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
            raise InputError(
                f"{folder} holds no {name}: no adapter in PEFT's format; found {', '.join(held) or 'nothing'}"
            )
    if (folder / PLAN).exists():
        _check_plan(model, Plan.load(folder / PLAN), folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {folder / WEIGHTS}: {error}") from None
    own = _state(model)
    if unknown := sorted(set(tensors) - set(own)):
        raise InputError(
            f"the adapter in {folder} has {unknown[0]!r} ({_others(unknown)}), the model has not; "
            f"{closest(unknown[0], own)}"
        )
    if missing := sorted(set(own) - set(tensors)):
        raise InputError(f"the adapter in {folder} lacks {missing[0]!r} ({_others(missing)}), which the model has")
    for name, parameter in own.items():
        if tensors[name].shape != parameter.shape:
            raise InputError(
                f"the adapter in {folder} has {name} of shape {tuple(tensors[name].shape)}, "
                f"the model's is {tuple(parameter.shape)}"
            )
        if not tensors[name].is_floating_point() or not bool(tensors[name].isfinite().all()):
            raise InputError(f"the adapter in {folder} holds NaN, infinity or no floats in {name}")
    _check_scaling(model, folder)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def _others(names: list[str]) -> str:
    return f"{len(names)} such tensor{'s' if len(names) > 1 else ''}"


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters' own tensors under the names that PEFT gives them in its files."""
    from peft import get_peft_model_state_dict

    adapters = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
    return get_peft_model_state_dict(model, state_dict=adapters, save_embedding_layers=False)


def _check_plan(model: nn.Module, theirs: Plan, folder: Path) -> None:
    from toolkit.runs.audit import built_layers
    from toolkit.weights.layers import head_of

    ours: Plan = model.plan
    both = f"the adapter in {folder} is for {_named(theirs)}, and this model is {_named(ours)}"
    if None not in (theirs.fingerprint, ours.fingerprint) and theirs.fingerprint != ours.fingerprint:
        raise InputError(f"{both}: another base; build the model that the adapter was trained on")
    if theirs.start != ours.start:
        raise InputError(
            f"{both}: another base, which initializers made of these weights; build with the folder of starts that the "
            "adapter was trained on (start=DIR)"
        )
    names = [layer.name for layer in built_layers(model)]
    head = head_of(model)  # decided by a plan that names it only
    names = [name for name in names if name != head or head in ours.layers or head in theirs.layers]
    if strange := [name for name in theirs.layers if name not in names]:
        raise InputError(f"{both}: its plan names layer {strange[0]!r}; {closest(strange[0], names)}")
    differing = []
    for name in names:
        if text := _difference(theirs.of(name), ours.of(name)):
            differing.append(f"layer {name} {text}")
    if differing:
        more = f" (and {len(differing) - 1} layers more)" if len(differing) > 1 else ""
        raise InputError(f"{both}: {differing[0]}{more}; stock PEFT loads it over any base of these shapes")


def _difference(theirs: LayerPlan, ours: LayerPlan) -> str:
    if theirs.quantizer != ours.quantizer:
        return f"is {theirs.quantizer} there and {ours.quantizer} here"
    return "" if theirs.adapter == ours.adapter else f"has {_about(theirs)} there and {_about(ours)} here"


def _about(layer: LayerPlan) -> str:
    adapter = layer.adapter
    if adapter is None:
        return "no adapter"
    return f"a{' DoRA' if adapter.dora else 'n'} adapter of rank {adapter.rank} and scaling {adapter.scaling:.6g}"


def _named(plan: Plan) -> str:
    weights = f"weights {plan.fingerprint[:12]}" if plan.fingerprint else "weights not recorded"
    if plan.start is not None:
        weights += f", start {plan.start[:12]}"
    return f"{plan.model or 'a model without a name'} ({weights})"


def _check_scaling(model: nn.Module, folder: Path) -> None:
    """The factor that stock PEFT would use for each layer is the model's own."""
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG} holds {type(config).__name__} where PEFT's settings are looked for")
    for name, module in model.get_base_model().named_modules():
        if not getattr(module, "lora_A", None):
            continue
        found, planned = scaling_in(config, name, folder), float(next(iter(module.scaling.values())))
        if not math.isclose(found, planned, rel_tol=1e-12):
            raise InputError(f"the adapter in {folder} scales layer {name} by {found:.6g}, the model by {planned:.6g}")


def scaling_in(config: dict[str, Any], name: str, folder: Path) -> float:
    """alpha/r, or alpha/√r under `use_rslora`, as PEFT's patterns give them for a layer."""
    from peft.utils.other import get_pattern_key

    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    try:
        rank = ranks.get(get_pattern_key(ranks, name), config.get("r"))
        alpha = alphas.get(get_pattern_key(alphas, name), config.get("lora_alpha"))
        return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, re.error) as error:
        raise InputError(f"{folder / CONFIG} gives layer {name} no scaling: {error}") from None
