"""compressed-tensors checkpoints: what is left out by name, one scale for what engines fuse, and the library's check.

vLLM computes q, k and v as one product, and gate and up as one: it takes one global scale for all of them, and
decodes the others wrongly. So layers of one module that are fused there share a scale by
default. Where their own scales differ, a base that the quantizer made is quantized anew from the dense weights under
the largest of them; a base that an initializer made is refused, for rounding it again would undo what it was made for,
and so is a base whose error an adapter was fitted to.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from toolkit.errors import InputError, RunError
from toolkit.runs.exporting.packing import Held

if TYPE_CHECKING:
    from torch import nn

Fused = Literal["shared", "separate", "requantize"]
FUSED: tuple[Fused, ...] = ("shared", "separate", "requantize")
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Roles of one module that serving engines compute as one product."""
UNREAD = (
    "compressed-tensors is not installed, so that nothing was read back and compared: "
    "pip install 'qlora-toolkit[exports]', and export again"
)
"""What is said of an export that its library could not read."""


def fused(names: Iterable[str]) -> list[list[str]]:
    """The layers that engines fuse, group by group, of these; a group has two at least."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parent, _, role = name.rpartition(".")
        for index, roles in enumerate(GROUPS):
            if role in roles:
                found.setdefault((parent, index), []).append(name)
    return [group for group in found.values() if len(group) > 1]


def share(
    held: dict[str, Held],
    every: Iterable[str],
    how: Fused,
    *,
    trained: bool = False,
    fitted: Container[str] = (),
) -> list[str]:
    """Give fused layers one scale, in place, as `how` says; `separate` leaves them as they are.

    Args:
        every: names of all layers, quantized or not.
        trained: whether an adapter was trained on these bases: then they are rounded again from what they are, which
            moves them a third as far as rounding the dense weights does (2 to 3 % of ‖Ŵ‖, and not 8 to 9).
        fitted: names of layers whose adapter holds what their base lost, and fits no other base.

    Returns:
        What a reader has to know.

    Raises:
        InputError: a fused group is quantized in part; or its scales differ and an initializer made the bases, or
            fitted adapters to them.
    """
    groups = fused(every)
    if how == "separate":
        apart = [g for g in groups if _mixed(g, held) or len({_scale(held, name) for name in g}) > 1]
        if not apart:
            return []
        return [
            f"{len(apart)} groups that vLLM fuses, such as {' and '.join(apart[0])}, do not share a scale or a format: "
            "transformers and compressed-tensors read them, vLLM does not read them rightly"
        ]
    changed = 0
    for group in groups:
        if _mixed(group, held):
            quantized = next(name for name in group if name in held)
            dense = next(name for name in group if name not in held)
            raise InputError(
                f"layer {quantized} is quantized and layer {dense} is not, and vLLM fuses the two: it would refuse the "
                "checkpoint; fused='separate' (--fused separate) writes it for transformers alone"
            )
        scales = {name: _scale(held, name) for name in group if name in held}
        known = {name: scale for name, scale in scales.items() if scale is not None}
        if len(set(known.values())) < 2:
            continue
        largest = max(known.values())
        for name, scale in known.items():
            if scale != largest:
                _rescale(name, held, largest, how, trained, name in fitted)
                changed += 1
    if not changed:
        return []
    return [
        f"{changed} layers were quantized anew under the scale that their fused group shares; `rescaled` of each layer "
        "says by how much they moved"
    ]


def _mixed(group: list[str], held: Mapping[str, Held]) -> bool:
    return len({name in held for name in group}) > 1


def _scale(held: Mapping[str, Held], name: str) -> float | None:
    return held[name].layout.scale(held[name].packed) if name in held else None


def _rescale(name: str, held: dict[str, Held], scale: float, how: Fused, trained: bool, fitted: bool) -> None:
    each = held[name]
    before = each.packed.dequantize(torch.float32)
    reference = each.reference()
    if (reference is None or fitted) and how != "requantize":
        made = "that an initializer made" if reference is None else "whose error an initializer fitted its adapter to"
        raise InputError(
            f"layer {name} has a base {made}, under a scale of its own, and vLLM reads one scale for what it fuses: "
            "make it under a shared one (tk.fuse, toolkit fuse PLAN) before layers are started; or fused='separate' "
            "(--fused separate) keeps the base bit for bit, for transformers, and fused='requantize' "
            "(--fused requantize) rounds it again and reports the change"
        )
    if reference is None or trained:
        reference = before
    each.packed = each.layout.at_scale(reference, scale)
    moved = (each.packed.dequantize(torch.float32) - before).double().norm() / before.double().norm().clamp(min=1e-300)
    update: dict[str, Any] = {"rescaled": float(moved)}
    if each.about.base != "merged":
        update["base"] = "rescaled"
    each.about = each.about.model_copy(update=update)


def ignored(model: nn.Module, quantized: Iterable[str]) -> list[str]:
    """The config's `ignore`: every `nn.Linear` that is not quantized, by its whole path, the head included."""
    from torch import nn

    kept = set(quantized)
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and path not in kept]


def check(folder: Path, held: Mapping[str, Held], source: str) -> bool:
    """Read the folder with compressed-tensors: its config quantizes these layers and no other, and every weight is
    decoded to bfloat16 as expected, bit for bit. Whether that could be done: False where the library is not installed.

    Raises:
        RunError: a layer is not what was written; names it.
    """
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    except ImportError:
        return False
    from toolkit.records.io import read_json
    from toolkit.runs.models import skeleton
    from toolkit.weights.checkpoints import open_checkpoint

    data = read_json(folder / "config.json")["quantization_config"]
    config = QuantizationConfig.model_validate(data)
    empty = skeleton(source)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        apply_quantization_config(empty, config, run_compressed=False)
    found = {path for path, module in empty.named_modules() if getattr(module, "quantization_scheme", None) is not None}
    if wrong := sorted(found ^ set(held)):
        raise RunError(f"compressed-tensors reads {wrong[0]} otherwise than planned ({len(wrong)} such layers)")
    stored = open_checkpoint(folder).tensors
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    for name, each in held.items():
        written = each.layout.tensors(each.packed, torch.bfloat16)
        read = _read({key: stored[f"{name}.{key}"].file for key in written}, name)
        for key, tensor in written.items():
            if not torch.equal(_bits(read[key]), _bits(tensor)):
                raise RunError(f"layer {name}: {key} is not read as it was written; nothing was exported")
        theirs = compressor.decompress(read, scheme)["weight"]
        ours = each.layout.decoded(written, (each.packed.shape[0], each.packed.shape[1]), torch.bfloat16)
        if not torch.equal(theirs, ours):
            raise RunError(f"layer {name}: compressed-tensors decodes it otherwise than expected; nothing was exported")
    return True


def _read(files: Mapping[str, Path], name: str) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    found = {}
    for key, file in files.items():
        with safe_open(file, framework="pt") as opened:
            found[key] = opened.get_tensor(f"{name}.{key}")
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
