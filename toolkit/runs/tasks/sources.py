"""Where rows come from: local JSON files, the Hub, or a task's own code."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import InputError
from toolkit.interfaces import Hub
from toolkit.records.io import read_bytes

SplitName = Literal["train", "test"]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
STEMS: Mapping[str, Sequence[str]] = {"train": ("train",), "test": ("test", "validation", "val", "dev")}
"""Names of a split's file, the first that exists is read: validation rows are scored where there is no test file."""


def local(source: str, split: SplitName, part: str = "") -> tuple[Path, list[dict[str, Any]]]:
    """Rows of a split from a folder (or its subfolder `part`), or from one file that is taken as the split.

    A folder holds `train` and `test` (else `validation`, `val`, `dev`), each as .jsonl or .json, plain or .gz; a
    .json file is one array of rows.

    Raises:
        InputError: no such folder or file, no file of that split, two of them, or content that cannot be read.
    """
    path = Path(source).expanduser()
    if part and (path / part).is_dir():
        path = path / part
    if path.is_dir():
        path = _file(path, split)
    elif not path.exists():
        raise InputError(f"no data at {path}: a folder with {_asked(split)} is asked for, or one such file")
    elif not path.name.endswith(SUFFIXES):
        raise InputError(f"{path}: a data file ends in one of {', '.join(SUFFIXES)}")
    rows = _rows(path)
    if not rows:
        raise InputError(f"{path} holds no rows")
    return path, rows


def _asked(split: SplitName) -> str:
    return f"a file {' or '.join(STEMS[split])} ({', '.join(SUFFIXES)})"


def _file(folder: Path, split: SplitName) -> Path:
    for stem in STEMS[split]:
        found = [folder / f"{stem}{suffix}" for suffix in SUFFIXES if (folder / f"{stem}{suffix}").is_file()]
        if len(found) > 1:
            raise InputError(f"{folder} holds {' and '.join(p.name for p in found)}: which rows are meant? Keep one")
        if found:
            return found[0]
    names = sorted(p.name for p in folder.iterdir())
    shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "") if names else "nothing"
    raise InputError(f"{folder} holds no {split} rows: {_asked(split)} was looked for; it holds {shown}")


def _rows(path: Path) -> list[dict[str, Any]]:
    content = read_bytes(path)
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is no readable gzip file: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from None
    if path.name.removesuffix(".gz").endswith(".json"):
        return _array(path, text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            rows.append(_row(f"{path}:{number}", line))
    return rows


def _row(where: str, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: a row is an object, found {type(row).__name__}")
    return row


def _array(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}; one row a line is a .jsonl file") from None
    if not isinstance(data, list):
        raise InputError(f"{path}: an array of rows is asked for, found {type(data).__name__}")
    for number, row in enumerate(data):
        if not isinstance(row, dict):
            raise InputError(f"{path}: row {number} is no object, found {type(row).__name__}")
    return data


def from_hub(hub: Hub, split: SplitName) -> tuple[str, list[dict[str, Any]]]:
    """Rows of a split from the Hugging Face Hub, through `datasets`.

    Raises:
        InputError: the data set, its configuration or its split cannot be had; local data are offered instead.
    """
    name = hub.path + (f" ({hub.name})" if hub.name else "")
    hint = (
        "rows can also be read from a folder of JSON lines: `data: FOLDER` in the study, with "
        f"{' or '.join(STEMS[split])} .jsonl in it"
    )
    if split not in hub.splits:
        raise InputError(f"data set {name} has no {split} rows; {hint}")
    import datasets

    try:
        rows = datasets.load_dataset(hub.path, hub.name, split=hub.splits[split], revision=hub.revision)
        for column, feature in rows.features.items():
            if hasattr(feature, "decode"):  # pictures stay files: text tasks only ask whether there is one
                rows = rows.cast_column(column, type(feature)(decode=False))
    except Exception as error:  # whatever the Hub, the proxy or the cache answers: the rows are not to be had
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"data set {name} cannot be read from the Hugging Face Hub ({reason}); {hint}") from error
    if not len(rows):
        raise InputError(f"data set {name}, split {hub.splits[split]}, holds no rows")
    return f"hub:{hub.path}" + (f"/{hub.name}" if hub.name else ""), list(rows)
