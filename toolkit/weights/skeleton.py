"""Layouts of model types that the table does not know, from the model that the installed transformers builds.

The model is made on the meta device, without weights and never with code from the checkpoint. Checkpoint names
are mapped by transformers' own conversion rules, of which those are followed that rename tensors, stack experts,
or put matrices below one another; any other rule is refused for a layer.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.errors import InputError, closest
from toolkit.weights.checkpoints import Checkpoint
from toolkit.weights.families import Layout, StoredLayer
from toolkit.weights.layers import Layer, block_count, head_of, layer_of, layers_of


def skeleton_layout(checkpoint: Checkpoint) -> Layout:
    """Map a checkpoint's tensors to the layers of the model that transformers builds from its config.

    Raises:
        InputError: transformers does not know the type or cannot build a causal language model of it, or a
            layer's weight is missing, has another shape, or is made by a rule that is not followed.
    """
    model = _build(checkpoint)
    sources = _sources(model, checkpoint)
    head = head_of(model)
    layers = [_stored(layer, sources, checkpoint) for layer in layers_of(model)]
    # Tied parameters are one parameter on the meta device too, and are counted once.
    others = sum(p.numel() for p in model.parameters()) - sum(n.shape[0] * n.shape[1] for n in layers)
    return Layout(
        layers=layers,
        head=head,
        head_layer=_head(model, head, sources, checkpoint),
        blocks=block_count(model),
        other_parameters=others,
        note=f"names mapped through the model that transformers builds, for model type {_kind(checkpoint)!r}",
    )


def _kind(checkpoint: Checkpoint) -> str:
    return checkpoint.config["model_type"]


def _build(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = _kind(checkpoint)
    if kind not in CONFIG_MAPPING_NAMES:
        code = (
            " without running the checkpoint's own code, which is never done"
            if checkpoint.config.get("auto_map")
            else ""
        )
        raise InputError(
            f"{checkpoint.folder}: transformers does not know the model type {kind!r}{code}; "
            f"{closest(kind, CONFIG_MAPPING_NAMES)}"
        )
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{checkpoint.folder}: transformers builds no causal language model of type {kind!r}: {reason:.300}"
        ) from error


class _Sources:
    """Which checkpoint tensors a parameter of the model is made of, and by which operations."""

    def __init__(self) -> None:
        self.plain: dict[str, str] = {}
        self.merged: dict[str, dict[str, list[str]]] = {}  # parameter → source pattern → tensors
        self.rules: dict[str, Any] = {}


def _sources(model: Any, checkpoint: Checkpoint) -> _Sources:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    renamings = [r for r in rules if not isinstance(r, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    found = _Sources()
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if key not in state and name in state:  # already in the model's own form
            key, pattern = name, None
        if pattern is None:
            found.plain.setdefault(key, name)
        else:
            found.merged.setdefault(key, {}).setdefault(pattern, []).append(name)
            found.rules[key] = by_pattern[pattern]
    return found


def _stored(layer: Layer, sources: _Sources, checkpoint: Checkpoint) -> StoredLayer:
    place = f"{layer.path}.{layer.parameter}".lstrip(".")
    index = layer.index
    if place in sources.plain:
        tensors: tuple[str, ...] = (sources.plain[place],)
    elif place in sources.merged:
        tensors, index = _merged(layer, place, sources), None
    else:
        raise InputError(
            f"{checkpoint.folder}: no tensor holds layer {layer.name} (parameter {place}); "
            f"{closest(place, checkpoint.tensors)}"
        )
    stored = StoredLayer(layer.name, layer.role, layer.block, layer.shape, tensors, layer.transposed, index)
    _check_shape(stored, checkpoint)
    return stored


def _merged(layer: Layer, place: str, sources: _Sources) -> tuple[str, ...]:
    """The tensors of one layer, in the order in which they stand below one another."""
    rule = sources.rules[place]
    steps = [(type(op).__name__, getattr(op, "dim", None)) for op in rule.operations]
    patterns = sources.merged[place]
    lists = [patterns[p] for p in rule.source_patterns if p in patterns]
    complete = len(lists) == len(rule.source_patterns)
    if complete and layer.index is not None and not layer.transposed:
        below = steps == [("MergeModulelist", 0), ("Concatenate", 1)] or (
            steps == [("MergeModulelist", 0)] and len(lists) == 1
        )
        if below and all(layer.index < len(tensors) for tensors in lists):
            return tuple(tensors[layer.index] for tensors in lists)
    if complete and layer.index is None and not layer.transposed and steps == [("Concatenate", 0)]:
        return tuple(name for tensors in lists for name in tensors)
    raise InputError(
        f"layer {layer.name} is made from {', '.join(t[0] for t in lists)} … by a conversion that is not followed "
        f"here ({', '.join(name for name, _ in steps)}): load the model and profile the object"
    )


def _check_shape(stored: StoredLayer, checkpoint: Checkpoint) -> None:
    shapes = [checkpoint.tensors[name].shape for name in stored.tensors]
    if stored.index is not None:
        shapes = [s[1:] for s in shapes]
    if stored.transposed:
        shapes = [s[::-1] for s in shapes]
    found = (sum(s[0] for s in shapes), *shapes[0][1:])
    if found != stored.shape or any(s[1:] != shapes[0][1:] for s in shapes):
        raise InputError(
            f"{checkpoint.folder}: layer {stored.name} has shape {stored.shape} by the config, and "
            f"{', '.join(stored.tensors)} {'has' if len(shapes) == 1 else 'have'} "
            f"{', '.join(str(checkpoint.tensors[n].shape) for n in stored.tensors)}"
        )


def _head(model: Any, head: str | None, sources: _Sources, checkpoint: Checkpoint) -> StoredLayer | None:
    if head is None:
        return None
    layer = layer_of(model, head)
    tied = [n for n, p in model.named_parameters(remove_duplicate=False) if p is layer.module.weight]
    for place in (f"{head}.weight", *tied):
        if place in sources.plain:
            stored = StoredLayer(head, layer.role, layer.block, layer.shape, (sources.plain[place],))
            _check_shape(stored, checkpoint)
            return stored
    return None
