"""Starts of layers on disk and in `build`: one file a layer, and the digest of the base that they make.

DIR/start.json              what was done, layer by layer; written last
DIR/settings.json           what the starts depend on: a pass that was cut short goes on under the same alone
DIR/plan.json               the plan that was asked for, with the weights' fingerprint
DIR/layers/<layer>.safetensors    base.<tensor> of the packed base, A and B; what is needed to read it as metadata
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import InputError, closest
from toolkit.interfaces import FALLBACK, LIMITED, Packed, Start
from toolkit.records.io import atomic
from toolkit.records.start import LayerStart, StartFile

if TYPE_CHECKING:
    import torch

STARTS = "starts"
"""The folder of folders of starts, one a plan, in the results of a fine-tuning study."""
LAYERS = "layers"
REPORT = "start.json"
PLAN = "plan.json"
SETTINGS = "settings.json"


def write(
    folder: str | os.PathLike[str], name: str, start: Start, record: LayerStart | None = None, settings: str = ""
) -> Path:
    """Write one layer's start, atomically; read back bit for bit by `read`.

    Args:
        record, settings: what `start.json` will say of it, and a digest of what it was made under: by these a pass that
            was cut short goes on (`told`).
    """
    from safetensors.torch import save_file

    path = Path(folder) / LAYERS / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"base.{key}": t.detach().contiguous().cpu() for key, t in start.base.tensors.items()}
    if start.A is not None and start.B is not None:
        tensors |= {"A": start.A.detach().contiguous().cpu(), "B": start.B.detach().contiguous().cpu()}
    about = {
        "layer": name,
        "quantizer": start.base.quantizer.key,
        "shape": json.dumps(list(start.base.shape)),
        "dtype": str(start.base.dtype),
        "scaling": repr(start.scaling),
        "residuals": json.dumps(list(start.residuals)),
        "kept": str(start.kept),
        "notes": json.dumps(dict(start.notes)),
    }
    if record is not None:
        about |= {"record": json.dumps(record.model_dump(mode="json")), "settings": settings}
    with atomic(path) as temporary:
        save_file(tensors, temporary, metadata=about)
    return path


def told(folder: str | os.PathLike[str], name: str, settings: str) -> LayerStart | None:
    """The record of a layer that was written under these settings; None where no such start lies there."""
    from safetensors import SafetensorError, safe_open

    path = Path(folder) / LAYERS / f"{name}.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
        return LayerStart.model_validate_json(about["record"]) if about.get("settings") == settings else None
    except (OSError, SafetensorError, KeyError, ValueError):  # damaged: it is made anew
        return None


def take(source: str | os.PathLike[str], folder: str | os.PathLike[str], name: str) -> None:
    """Hold one layer's start of another folder in this one too: by a hard link, or a copy where there are none."""
    file = Path(LAYERS) / f"{name}.safetensors"
    with atomic(Path(folder) / file) as temporary:
        temporary.unlink()
        try:
            os.link(Path(source) / file, temporary)
        except OSError:
            shutil.copyfile(Path(source) / file, temporary)


def whole(folder: str | os.PathLike[str]) -> bool:
    """Whether the report lies there, and the tensors of every layer that it tells of; they may be kept apart from it.

    Raises:
        InputError: the report is damaged.
    """
    path = Path(folder)
    if not (path / REPORT).is_file():
        return False
    return all((path / LAYERS / f"{name}.safetensors").is_file() for name in StartFile.load(path / REPORT).layers)


def read(folder: str | os.PathLike[str], name: str, device: str | torch.device = "cpu") -> Start:
    """One layer's start.

    Raises:
        InputError: there is no such file (the closest layer is named), it is damaged, or no quantizer has its key.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    from toolkit.registry import registry

    path = Path(folder) / LAYERS / f"{name}.safetensors"
    if not path.is_file():
        held = [p.name.removesuffix(".safetensors") for p in path.parent.glob("*.safetensors")]
        raise InputError(f"{folder} holds no start of layer {name!r}; {closest(name, held)}")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {key: file.get_tensor(key).to(device) for key in file.keys()}  # noqa: SIM118 — no mapping
        dtype = getattr(torch, about["dtype"].removeprefix("torch."))
        base = Packed(
            registry.make("quantizer", about["quantizer"]),
            {key.removeprefix("base."): t for key, t in tensors.items() if key.startswith("base.")},
            tuple(json.loads(about["shape"])),
            dtype,
        )
        return Start(
            base,
            tensors.get("A"),
            tensors.get("B"),
            float(about["scaling"]),
            tuple(json.loads(about["residuals"])),
            int(about["kept"]),
            json.loads(about["notes"]),
        )
    except InputError as error:
        raise InputError(f"cannot read {path} as a layer's start: {error}") from None
    except (OSError, SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise InputError(f"cannot read {path} as a layer's start: {type(error).__name__}: {error}") from None


def digest_of(packed: Packed) -> str:
    """SHA-256 over a packed weight: its quantizer's key, shape, and every tensor's name, dtype, shape and bytes."""
    import torch

    found = hashlib.sha256(f"{packed.quantizer.key} {list(packed.shape)}".encode())
    for key in sorted(packed.tensors):
        tensor = packed.tensors[key].detach().contiguous().cpu()
        found.update(f" {key} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def changed(start: Start, weight: torch.Tensor) -> str | None:
    """`digest_of` the base that a start made; None where it is the quantizer's own Q(W), which any loader makes.

    Args:
        weight: W, (out, in), the dense weight that it was made from, on the same device.
    """
    import torch

    own = start.base.quantizer.quantize(weight).tensors
    same = own.keys() == start.base.tensors.keys() and all(
        torch.equal(tensor, start.base.tensors[key]) for key, tensor in own.items()
    )
    return None if same else digest_of(start.base)


def digest_over(bases: Mapping[str, str]) -> str:
    """SHA-256 over layers' names and their bases' digests, in the order of names: which base they make."""
    return hashlib.sha256(json.dumps(sorted(bases.items())).encode()).hexdigest()


class Noted(Protocol):
    """What is told of one layer's start, with notes."""

    @property
    def notes(self) -> Mapping[str, Any]:
        """Of its initializer."""


def fallbacks(layers: Mapping[str, Noted], notes: Sequence[str] = (FALLBACK, LIMITED)) -> dict[str, list[str]]:
    """What was not done as asked for → the layers, each under the first of these notes that it has.

    The numbers of single layers, in parentheses behind a reason, are left out.
    """
    found: dict[str, list[str]] = {}
    for name, each in layers.items():
        if reason := next((str(text).partition(" (")[0] for key in notes if (text := each.notes.get(key))), None):
            found.setdefault(reason, []).append(name)
    return found


def counts(layers: Mapping[str, Noted]) -> dict[str, int]:
    """What was not done as asked for → in how many layers."""
    return {reason: len(names) for reason, names in fallbacks(layers).items()}


def said(counted: Mapping[str, int], layers: int) -> list[str]:
    """A line a reason, for the end of a run: `counted` as `counts` answers, of so many layers."""
    return [f"not as asked for in {count} of {layers} layers: {reason}" for reason, count in counted.items()]
