"""Reading what a researcher declares: the `study.yaml` of a folder, its kind, its small form."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from toolkit.errors import InputError, closest
from toolkit.records.io import File, parse, read_yaml

KINDS = ("ranking-control", "fine-tuning", "initialization")
"""What a study's file may be; the first where it states nothing."""

S = TypeVar("S", bound=File)


def kind_of(path: str | os.PathLike[str]) -> str:
    """The kind of a study's file; a file that states none is a controlled ablation.

    Raises:
        InputError: no such study, or another kind (its line and the allowed ones are named).
    """
    file = study_file(path)
    data, lines = read_yaml(file)
    kind = data.get("kind", KINDS[0]) if isinstance(data, dict) else KINDS[0]
    if kind not in KINDS:
        where = f"{file}:{lines[('kind',)]}" if ("kind",) in lines else str(file)
        raise InputError(f"{where}: kind: no kind of study is called {kind!r}; {closest(str(kind), KINDS)}")
    return str(kind)


def read_declared(
    cls: type[S],
    path: str | os.PathLike[str],
    beside: Callable[[Any, Path], Any],
    *,
    small: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> S:
    """A study of any kind from its folder or its `study.yaml`; its small form is always checked.

    Args:
        cls: the record.
        path: the folder or the file.
        beside: makes the paths of plain data, given relative to a folder, paths from here.
        small: the small form.
        changes: fields that are replaced.

    Raises:
        InputError: no such study, an unknown key or a wrong type (with line), or no small form.
    """
    file = study_file(path)
    data, lines = read_yaml(file)
    study = parse(cls, beside(data, file.parent), str(file), lines)
    data = study.to_json()
    declared = data.pop("small", None)
    reduced = data | (declared or {}) | {"form": "small"}  # a null there takes a field out
    if declared:
        inside = {place[1:]: line for place, line in lines.items() if place[0] == "small" and len(place) > 1}
        parse(cls, reduced, f"{file} (small form)", inside)
    elif small:
        raise InputError(f"{file} has no `small` form")
    return parse(cls, (reduced if small else data) | (changes or {}), str(file), {}) if small or changes else study


def study_file(path: str | os.PathLike[str]) -> Path:
    """The `study.yaml` of a folder, or the file itself."""
    path = Path(path)
    file = path / "study.yaml" if path.is_dir() else path
    if not file.exists():
        raise InputError(f"no study at {path}: " + (f"{file} does not exist" if path.is_dir() else _studies(path)))
    return file


def _studies(path: Path) -> str:
    """The studies that a wrong path may have meant: beside it, or one folder further down."""
    found = {p.parent.name: p.parent for deep in ("*/*", "*") for p in path.parent.glob(f"{deep}/study.yaml")}
    if not found:
        return f"no folder in {path.parent} holds a study.yaml"
    near = closest(path.name, found)
    if not near.startswith("did you mean"):
        near = "there are " + ", ".join(repr(name) for name in sorted(found))
    for name, folder in found.items():
        near = near.replace(repr(name), repr(str(folder)))
    return near
