"""Which kind of study a folder holds: of selections, of fine-tuning, or of starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from toolkit.records.declared import KINDS
from toolkit.records.io import read_json, read_yaml
from toolkit.records.study import STUDY_COPY

SELECTIONS, TRAINED, STARTS = KINDS


def places(study: str | os.PathLike[str]) -> list[Path]:
    """Files that may declare a study: the copy beside its runs first, then its `study.yaml`."""
    path = Path(study)
    folder = path.parent if path.is_file() else path
    found = [folder / "results" / STUDY_COPY, folder / STUDY_COPY]
    found += [path] if path.is_file() else []
    return [*found, folder / "study.yaml", folder.parent / "study.yaml"]


def kind_in(study: str | os.PathLike[str]) -> str:
    """The kind that the first file which declares the study states; that of selections where none does.

    Raises:
        InputError: that file cannot be read.
    """
    for file in places(study):
        if file.is_file():
            data: Any = read_json(file) if file.suffix == ".json" else read_yaml(file)[0]
            return str(data.get("kind", SELECTIONS)) if isinstance(data, dict) else SELECTIONS
    return SELECTIONS
