"""What is asked of a fine-tuning study: which form, on which model and data, and in which folder its results lie."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.errors import InputError
from toolkit.records.declared import study_file
from toolkit.records.finetuning import FineTuning
from toolkit.records.io import parse
from toolkit.runs import results
from toolkit.runs.finetuning import plans
from toolkit.weights.sources import refuse_missing


@dataclasses.dataclass(frozen=True)
class Asked:
    """A fine-tuning study as it is run, timed or locked.

    Attributes:
        folder: of its results.
        home: of its file, whose commit is recorded.
    """

    study: FineTuning
    folder: Path
    home: Path


def asked(
    study: str | os.PathLike[str] | FineTuning,
    *,
    model: str | os.PathLike[str] | None = None,
    data: Mapping[str, str | os.PathLike[str]] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
) -> Asked:
    """The study with what replaces its parts, checked as far as that goes without a model and data.

    Args:
        study: a study's folder or its `study.yaml`; or a FineTuning, and then `out` is needed.
        model: instead of the study's: a Hugging Face id, a local directory, or `demo`.
        data: instead of the study's: task name → folder of rows (`NAME:train` for those trained on), or `NAME=PATH`.
        out: folder of the results; by default `results` beside the study, or `results-small` for its small form.
        small: the small form that the study declares.

    Raises:
        InputError: no such study, or one that cannot be run (`toolkit.runs.finetuning.plans.check`); a model that is
            a path, and is not there; or an empty `out`.
    """
    if isinstance(study, FineTuning):
        if out is None or small:
            raise InputError(
                "a FineTuning given as an object needs `out`, and has its form already: FineTuning.read(…, small=True)"
            )
        home, declared, named = Path(out).absolute().parent, study, f"study {study.name}"
        home = next(p for p in (home, *home.parents) if p.is_dir())
    else:
        file = study_file(study)
        home, declared, named = file.parent, FineTuning.read(file, small=small), str(file)
    if model is not None:
        declared = parse(FineTuning, declared.to_json() | {"model": os.fspath(model)}, named, {})
    if data is not None:
        declared = declared.with_data(_pairs(data))
    try:
        plans.check(declared)
    except InputError as error:
        raise InputError(f"{named}: {error}") from None
    folder = results.folder_of(out, home, small=small)
    refuse_missing(declared.model)
    return Asked(declared, folder, home)


def _pairs(data: Mapping[str, str | os.PathLike[str]] | Iterable[str]) -> dict[str, str]:
    if isinstance(data, Mapping):
        return {name: os.fspath(path) for name, path in data.items()}
    if isinstance(data, str):
        data = [data]
    found: dict[str, str] = {}
    for item in data:
        name, equals, path = item.partition("=")
        if not equals or not name or not path:
            raise InputError(f"cannot read the task data {item!r}: write NAME=PATH")
        if name in found:
            raise InputError(f"data for task {name!r} are given twice; give them once")
        found[name] = path
    return found
