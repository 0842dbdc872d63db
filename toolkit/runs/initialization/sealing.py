"""Locking a study of starts: what it declares, its code, weights and texts, before the first run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.records.initialization import CALIBRATION, Initialization
from toolkit.runs import locking
from toolkit.runs.initialization import design
from toolkit.runs.initialization.asking import asked
from toolkit.runs.texts.documents import read_text


def lock(
    study: str | os.PathLike[str] | Initialization,
    *,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    calibration: str | None = None,
) -> Path:
    """Seal a study's analysis before its first run: `lock.json` in the folder of its results, and its path.

    The arguments are those of `run`, and must be the same there.

    Raises:
        InputError: results exist already (the first is named), or another lock stands there (what differs is
            named); or the study cannot be run.
        RunError: the folder cannot be written, or another process is writing in it.
    """
    what = asked(study, model=model, texts=texts, calibration=calibration, out=out, small=small)
    declared = what.study
    sources = dict(declared.texts)
    if declared.calibration is not None:
        sources[CALIBRATION] = declared.calibration.text
    hashes = {name: read_text(source).sha256 for name, source in sources.items()}
    return locking.seal(what.folder, declared, hashes, design.components(declared), PACKAGES)


PACKAGES = (*locking.VERSIONS, "peft")
"""Packages beside our own whose version is locked."""
