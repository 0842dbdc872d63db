"""Locking a fine-tuning study: what it declares, its code, weights and rows, before the first run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.records.finetuning import FineTuning
from toolkit.runs import locking
from toolkit.runs.finetuning import plans
from toolkit.runs.finetuning.asking import asked
from toolkit.runs.finetuning.data import hashes, read_rows
from toolkit.runs.finetuning.starting import text_of

PACKAGES = (*locking.VERSIONS, "peft", "bitsandbytes", "accelerate")
"""Packages beside our own whose version is locked."""


def lock(
    study: str | os.PathLike[str] | FineTuning,
    *,
    model: str | os.PathLike[str] | None = None,
    data: Mapping[str, str | os.PathLike[str]] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
) -> Path:
    """Seal a study's analysis before its first run: `lock.json` in the folder of its results, and its path.

    The arguments are those of `toolkit.runs.finetuning.run`, and must be the same there.

    Raises:
        InputError: results exist already, or another lock stands there (what differs is named); or the study cannot
            be run.
        RunError: the folder cannot be written, or another process is writing in it.
    """
    what = asked(study, model=model, data=data, out=out, small=small)
    rows = {name: read_rows(what.study, name) for name in what.study.tasks}
    texts = hashes(rows) | text_of(what.study.calibration)
    return locking.seal(what.folder, what.study, texts, plans.components(what.study), PACKAGES)
