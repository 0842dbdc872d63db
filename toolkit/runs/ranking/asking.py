"""What is asked of a study: which form, on which model and texts, and in which folder its results lie."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.errors import InputError
from toolkit.records.declared import study_file
from toolkit.records.io import parse
from toolkit.records.study import Study
from toolkit.runs import results
from toolkit.runs.ranking import design
from toolkit.runs.texts.documents import parse_texts
from toolkit.weights.sources import refuse_missing


@dataclasses.dataclass(frozen=True)
class Asked:
    """A study as it is run or locked.

    Attributes:
        folder: of its results.
        home: of its file, whose commit is recorded.
    """

    study: Study
    folder: Path
    home: Path


def asked(
    study: str | os.PathLike[str] | Study,
    *,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
) -> Asked:
    """The study with what replaces its parts, checked as far as that goes without a model.

    Args:
        study: a study's folder or its `study.yaml`; or a Study, and then `out` is needed.
        model: instead of the study's: a Hugging Face id, a local directory, or `demo`.
        texts: instead of the study's: name → source, or `[NAME=]SOURCE` items.
        out: folder of the results; by default `results` beside the study, or `results-small` for its small form.
        small: the small form that the study declares.

    Raises:
        InputError: no such study, or one that cannot be run (`toolkit.runs.ranking.design.check`); a model that is a
            path, and is not there; or an empty `out`.
    """
    if isinstance(study, Study):
        if out is None or small:
            raise InputError(
                "a Study given as an object needs `out`, and has its form already: Study.read(…, small=True)"
            )
        file, declared = Path(f"study {study.name}"), study
    else:
        file = study_file(study)
        declared = Study.read(file, small=small)
    declared = _with(declared, file, model, texts)
    design.check(declared)
    folder = results.folder_of(out, file.parent, small=small)
    refuse_missing(declared.model)
    return Asked(declared, folder, file.parent)


def _with(
    study: Study,
    file: Path,
    model: str | os.PathLike[str] | None,
    given: Mapping[str, str] | Iterable[str] | None,
) -> Study:
    """The study with another model or other texts."""
    data = study.to_json()
    if model is not None:
        data["model"] = os.fspath(model)
    if given is not None:
        data["texts"] = dict(given) if isinstance(given, Mapping) else parse_texts(given)
        if not data["texts"]:
            raise InputError("no text is given; leave `texts` out for the study's own")
    return parse(Study, data, str(file), {})
