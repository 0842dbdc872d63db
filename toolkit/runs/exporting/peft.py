"""Adapters in PEFT's format: a trained one, made sure of and copied; or the one that starts hold, built and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit.records.exported import Exported
from toolkit.records.io import atomic, read_json, write_json
from toolkit.runs import adapters
from toolkit.runs.exporting.changes import changes_of
from toolkit.runs.exporting.folder import REPORT
from toolkit.runs.exporting.origin import Origin

if TYPE_CHECKING:
    from toolkit.records.plan import LayerPlan, Plan

FITTED = (
    "the adapter holds what quantization took from the weights: it belongs to the base that the plan quantizes, and "
    "not to the model in 16 bit; export that base too, and name it (--base)"
)


def write(origin: Origin, layers: dict[str, LayerPlan], folder: Path, base: Path | None) -> list[str]:
    """Write `adapter_model.safetensors` (float32), `adapter_config.json` and `plan.json`.

    PEFT computes s = alpha/r, or alpha/√r under `use_rslora`; every layer's s by the config written is compared with
    the plan's. `base_model_name_or_path` is `base`; else the model of the plan, where the base is the quantizers' own;
    else nothing that could be loaded, so that no loader puts the adapter on a base that it does not belong to.

    Args:
        layers: name → decision, of every layer of the model.
        base: an exported base that the adapter belongs to.

    Returns:
        What a reader has to know.

    Raises:
        InputError: there is no adapter, it differs from its plan, or `base` is another base.
    """
    if not any(layer.adapter is not None for layer in layers.values()):
        raise InputError(f"the plan in {origin.path} gives no layer an adapter: there is none to export")
    if origin.adapter is None and origin.start is None:
        raise InputError(
            f"{origin.path} has no adapter: name the folder of one, a run that kept its adapter, or a folder of starts"
        )
    named, notes = _base(origin, base)
    if origin.begun:
        _build(origin, folder)
    else:
        _copy(origin, folder)
    config = read_json(folder / adapters.CONFIG)
    config["base_model_name_or_path"] = named
    config["inference_mode"] = True
    write_json(folder / adapters.CONFIG, config)
    write_json(folder / adapters.PLAN, origin.plan.to_json())
    changes_of(Origin(origin.path, origin.plan, origin.model, folder), layers)  # as others will read it
    if config.get("alpha_pattern") or config.get("rank_pattern"):
        notes.append(
            "layers differ in rank or alpha (rank_pattern, alpha_pattern): PEFT and transformers read these, and a "
            "loader that knows one r and one alpha does not"
        )
    return notes


def _base(origin: Origin, base: Path | None) -> tuple[str | None, list[str]]:
    """What the config names as its base, and what to say of it."""
    if base is None:
        if origin.plan.start is None:
            return origin.plan.model, [FITTED] if origin.fitted else []
        return f"{origin.plan.model} started as {origin.plan.start[:12]}", [
            f"the adapter belongs to a base that initializers changed ({origin.plan.start[:12]}), and not to the plain "
            "model: export that base too, and name it (--base)"
        ]
    if not (base / REPORT).is_file():
        raise InputError(f"{base} holds no {REPORT}: no exported base")
    found = Exported.load(base / REPORT)
    if found.adapter is not None:
        raise InputError(f"{base} has an adapter merged in: an adapter goes on the base without one")
    if (
        found.fingerprint != origin.plan.fingerprint
        or found.start != origin.plan.start
        or found.plan_base != digest(origin.plan)
    ):
        raise InputError(
            f"{base} is another base than the adapter's: of {_weights(found.fingerprint, found.start)}, and the "
            f"adapter is of {_weights(origin.plan.fingerprint, origin.plan.start)}, or layers are quantized otherwise"
        )
    return str(base), []


def _weights(fingerprint: str | None, start: str | None) -> str:
    of = f"weights {fingerprint[:12]}" if fingerprint else "weights not recorded"
    return of if start is None else f"{of} as starts {start[:12]} changed them"


def digest(plan: Plan) -> str:
    """SHA-256 over what the plan says of the base alone: quantizers by layer, and the digest of changed bases."""
    from toolkit.records.io import digest as of

    layers = {name: layer.quantizer for name, layer in plan.layers.items() if layer.quantizer != plan.default.quantizer}
    return of({"default": plan.default.quantizer, "layers": layers, "start": plan.start})


def _copy(origin: Origin, folder: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    source = origin.adapter
    assert source is not None
    try:
        tensors = load_file(source / adapters.WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {source / adapters.WEIGHTS} as an adapter: {error}") from None
    wide = {k: t.to(torch.float32) if t.is_floating_point() else t for k, t in tensors.items()}
    write_json(folder / adapters.CONFIG, json.loads((source / adapters.CONFIG).read_text(encoding="utf-8")))
    with atomic(folder / adapters.WEIGHTS) as path:
        save_file({k: t.contiguous() for k, t in wide.items()}, path, metadata={"format": "pt"})


def _build(origin: Origin, folder: Path) -> None:
    """The model of the plan with the starts' A and B, whose adapters are saved as any."""
    from toolkit.runs.building import build

    adapters.save(build(origin.model, origin.plan, device="cpu", start=origin.start), folder)
