"""What is asked of a study of starts: which form, on which model and texts, and in which folder its results lie."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.errors import InputError, closest
from toolkit.records.declared import study_file
from toolkit.records.initialization import Initialization
from toolkit.records.io import parse
from toolkit.runs import results
from toolkit.runs.initialization import design
from toolkit.runs.texts.documents import parse_texts
from toolkit.weights.sources import refuse_missing


@dataclasses.dataclass(frozen=True)
class Asked:
    """A study as it is run or locked.

    Attributes:
        folder: of its results.
        home: of its file, whose commit is recorded.
    """

    study: Initialization
    folder: Path
    home: Path


def asked(
    study: str | os.PathLike[str] | Initialization,
    *,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    calibration: str | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
) -> Asked:
    """The study with what replaces its parts, checked as far as that goes without a model.

    Args:
        study: a study's folder or its `study.yaml`; or an Initialization, and then `out` is needed.
        model: instead of the study's: a Hugging Face id, a local directory, or `demo`.
        texts: instead of the sources of the study's texts: name → source, or `[NAME=]SOURCE` items.
        calibration: instead of the source of its calibration text.
        out: folder of the results; by default `results` beside the study, or `results-small` for its small form.
        small: the small form that the study declares.

    Raises:
        InputError: no such study, or one that cannot be run (`toolkit.runs.initialization.design.check`); a text that
            the study does not have; a model that is a path, and is not there; or an empty `out`.
    """
    if isinstance(study, Initialization):
        if out is None or small:
            raise InputError(
                "an Initialization given as an object needs `out`, and has its form already: "
                "Initialization.read(…, small=True)"
            )
        home, declared, named = Path(out).absolute().parent, study, f"study {study.name}"
        home = next(p for p in (home, *home.parents) if p.is_dir())
    else:
        file = study_file(study)
        home, declared, named = file.parent, Initialization.read(file, small=small), str(file)
    data = declared.to_json()
    if model is not None:
        data["model"] = os.fspath(model)
    if texts is not None:
        given = dict(texts) if isinstance(texts, Mapping) else parse_texts(texts)
        for name in given:
            if name not in declared.texts:
                raise InputError(f"{named}: a text is given for {name!r}; {closest(name, declared.texts)}")
        data["texts"] |= given
    if calibration is not None:
        if declared.calibration is None:
            raise InputError(f"{named} has no calibration: a text for it would do nothing; leave it out")
        data["calibration"]["text"] = calibration
    declared = parse(Initialization, data, named, {})
    try:
        design.check(declared)
    except InputError as error:
        raise InputError(f"{named}: {error}") from None
    folder = results.folder_of(out, home, small=small)
    refuse_missing(declared.model)
    return Asked(declared, folder, home)
