"""Locking a ranking study: what it declares, its code, weights and texts, before the first run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.records.study import Study
from toolkit.runs import locking
from toolkit.runs.ranking import design
from toolkit.runs.ranking.asking import asked
from toolkit.runs.texts.documents import read_text


def lock(
    study: str | os.PathLike[str] | Study,
    *,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
) -> Path:
    """Seal a study's analysis before its first run: `lock.json` in the folder of its results, and its path.

    Locking the same study twice keeps the first lock. The arguments are those of `run`, and must be the same
    there: a study that is run on another text is not the one that was locked.

    Raises:
        InputError: results exist already (the first is named), or another lock stands there (what differs is
            named); or the study cannot be run.
        RunError: the folder cannot be written, or another process is writing in it.
    """
    what = asked(study, model=model, texts=texts, out=out, small=small)
    declared = what.study
    hashes = {name: read_text(source).sha256 for name, source in declared.texts.items()}
    return locking.seal(what.folder, declared, hashes, components(declared))


def components(study: Study) -> list[tuple[str, str]]:
    """Kind and key of every component that a ranking study names, or that a selector of it reads."""
    keys = [("quantizer", key) for key in [*design.quantizers(study), study.protect]]
    return keys + [("selector", item.selector) for item in [*study.arms, *study.controls]]
