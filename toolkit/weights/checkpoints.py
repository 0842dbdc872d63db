"""Safetensors checkpoints, shard by shard: headers are read, weights are memory-mapped, no model is built.

A checkpoint is a folder with `config.json` and `model.safetensors`, or an index naming many shards. Pickle
files are refused: reading one can run any code that its author put there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError, closest
from toolkit.records.io import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
LARGEST_HEADER = 100_000_000
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What a layer's weight may be stored as; anything else belongs to a quantized checkpoint."""
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16}
BITS |= {"I32": 32, "U32": 32, "I64": 64, "U64": 64, "F64": 64, "F32": 32, "F16": 16, "BF16": 16}


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint: where it stands. `start` and `end` count bytes from the file's beginning."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Checkpoint:
    """The tensors of a checkpoint folder by name, read from the page cache when asked for.

    Attributes:
        folder: where it stands.
        config: the plain data of `config.json`.
        tensors: name → where the tensor stands, in the order of the shards.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensors: dict[str, Stored]) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self._maps: dict[Path, mmap.mmap] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """One tensor, a view of the mapped file (a private mapping: writing to it changes no file).

        Raises:
            InputError: no such tensor, it is stored in a quantized format, or the file cannot be mapped.
        """
        if name not in self.tensors:
            raise InputError(f"{self.folder} has no tensor {name!r}; {closest(name, self.tensors)}")
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise InputError(
                f"tensor {name!r} in {stored.file} is stored as {stored.dtype}: the checkpoint is already quantized; "
                f"weights are read from {', '.join(DTYPES)}"
            )
        if not stored.elements:
            return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        flat = torch.frombuffer(
            self._map(stored.file), dtype=torch.uint8, count=stored.end - stored.start, offset=stored.start
        )
        if stored.start % 8:  # headers are padded to 8 bytes by custom, not by the format
            flat = flat.clone()
        return flat.view(DTYPES[stored.dtype]).view(stored.shape)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with open(file, "rb") as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise InputError(f"cannot read {file}: {error}") from error
        return self._maps[file]


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, or beside a given `.safetensors` or index file.

    Raises:
        InputError: a missing or empty folder, no config, no safetensors (pickle and GGUF are named and
            refused), an unreadable or truncated shard, or an index that names what is not there.
    """
    folder = path if path.is_dir() else path.parent
    files = _files(path)
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG} holds {type(config).__name__}, and a mapping is asked for")
    if isinstance(files, Path):
        return Checkpoint(folder, config, read_header(files))
    return Checkpoint(folder, config, _indexed(folder, *files))


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, in the order in which they stand in it.

    Raises:
        InputError: it is no safetensors file, or ends before its tensors do.
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            first = opened.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(LARGEST_HEADER, size - 8):
                raise InputError(_unreadable(file, size, first))
            text = opened.read(length)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    try:
        header = json.loads(text)
        entries = [(n, _entry(file, e, 8 + length)) for n, e in header.items() if n != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{file} is no readable safetensors file: its header is damaged") from None
    for name, stored in entries:
        if stored.end > size:
            raise InputError(
                f"{file} is truncated: tensor {name!r} ends at byte {stored.end:,} and the file has {size:,}; "
                "fetch it again"
            )
    return dict(sorted(entries, key=lambda item: item[1].start))


def _unreadable(file: Path, size: int, first: bytes) -> str:
    if first == b"version ":
        return f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder"
    if size < 8:
        return f"{file} is truncated: it holds {size} bytes"
    return f"{file} is truncated, or no safetensors file: its header is longer than the file ({size:,} bytes)"


def _entry(file: Path, entry: dict[str, Any], offset: int) -> Stored:
    start, end = (int(n) for n in entry["data_offsets"])
    stored = Stored(file, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), offset + start, offset + end)
    bits = BITS.get(stored.dtype)
    if start < 0 or end < start or min(stored.shape, default=0) < 0:
        raise ValueError("offsets or sizes below zero")
    if bits is not None and stored.elements * bits != 8 * (end - start):
        raise ValueError("sizes and offsets differ")
    return stored


def _indexed(folder: Path, index: Path, weight_map: dict[str, str]) -> dict[str, Stored]:
    shards = sorted(set(weight_map.values()))
    absent = [s for s in shards if not (folder / s).is_file()]
    if absent:
        raise InputError(
            f"{index} names {len(shards)} shards and {len(absent)} of them "
            f"{'is' if len(absent) == 1 else 'are'} not in {folder}: {', '.join(absent[:3])}"
            + (", …" if len(absent) > 3 else "")
        )
    held = {shard: read_header(folder / shard) for shard in shards}
    lost = [name for name, shard in weight_map.items() if name not in held[shard]]
    if lost:
        raise InputError(
            f"{index} names {len(lost)} tensor{'s' * (len(lost) > 1)} that the shards lack, such as {lost[0]!r} "
            f"in {weight_map[lost[0]]}"
        )
    return {name: stored for shard in shards for name, stored in held[shard].items() if weight_map.get(name) == shard}


def _files(path: Path) -> Path | tuple[Path, dict[str, str]]:
    """The one weights file, or the index and its map of tensor to shard."""
    if not path.exists():
        raise InputError(missing(path))
    if path.is_dir():
        for file in (path / SINGLE, path / INDEX):
            if file.is_file():
                return _files(file)
        raise InputError(_nothing_in(path))
    if path.suffix == ".safetensors":
        return path
    if path.name.endswith(".safetensors.index.json"):
        return path, _weight_map(path)
    raise InputError(_refused(path))


def _weight_map(index: Path) -> dict[str, str]:
    data = read_json(index)
    found = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(s, str) for s in found.values()):
        raise InputError(f"{index} has no `weight_map` of tensor names to shard files")
    for shard in found.values():
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise InputError(f"{index} names the shard {shard!r}: a shard is a plain file beside its index")
    return found


def missing(path: Path) -> str:
    """What to say of a path that does not exist: the closest names beside it."""
    parent = path.parent
    if not parent.is_dir():
        return f"no model at {path} (there is no folder {parent} either)"
    hint = closest(path.name, [p.name for p in parent.iterdir()])
    return f"no model at {path}" + (f"; {hint}" if hint.startswith("did you mean") else "")


def _refused(file: Path) -> str:
    if any(file.match(p) for p in PICKLES):
        return f"{file} is a pickle file, and is refused: {_PICKLE}"
    if file.suffix == ".gguf":
        return f"{file} is a GGUF file: {_GGUF}"
    return f"{file} is no checkpoint: give its folder, or a .safetensors file"


_PICKLE = (
    "reading one can run any code that its author put there; convert it to safetensors "
    "(save_pretrained in an environment that trusts it)"
)
_GGUF = (
    "its quantized formats are not read here; load it with transformers (gguf_file=) and save it as safetensors, "
    "and mind that its weights are then dequantized ones"
)


def _nothing_in(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    if not names:
        return f"{folder} is an empty folder"
    safe = [n for n in names if n.endswith(".safetensors")]
    if "adapter_config.json" in names or "adapter_model.safetensors" in safe:
        return f"{folder} holds an adapter and no model: give its base model"
    if safe:
        return f"{folder} holds {', '.join(safe[:3])}, and neither {SINGLE} nor {INDEX}, which names the shards"
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        return f"{folder} holds no safetensors, only pickle ({', '.join(pickles[:3])}), which is refused: {_PICKLE}"
    ggufs = [n for n in names if n.endswith(".gguf")]
    if ggufs:
        return f"{folder} holds no safetensors, only GGUF ({ggufs[0]}): {_GGUF}"
    return f"{folder} holds no safetensors (found {', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
