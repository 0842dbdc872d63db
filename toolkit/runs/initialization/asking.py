"""What is asked of a study of starts: which form, on which model and texts, and in which folder its results lie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from toolkit.errors import InputError, closest
from toolkit.records.initialization import Initialization
from toolkit.records.io import parse
from toolkit.runs import asking
from toolkit.runs.asking import Asked
from toolkit.runs.initialization import design
from toolkit.runs.texts.documents import parse_texts


def asked(
    study: str | os.PathLike[str] | Initialization,
    *,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    calibration: str | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
) -> Asked[Initialization]:
    """The study with what replaces its parts, checked as far as that goes without a model.

    Args:
        study, model, out, small: as `toolkit.runs.asking.asked`.
        texts: instead of the sources of the study's texts: name → source, or `[NAME=]SOURCE` items.
        calibration: instead of the source of its calibration text.

    Raises:
        InputError: no such study, or one that cannot be run (`toolkit.runs.initialization.design.check`); a text that
            the study does not have; a model that is a path, and is not there; or an empty `out`.
    """

    def change(declared: Initialization, named: str) -> Initialization:
        data = declared.to_json()
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
        return parse(Initialization, data, named, {})

    return asking.asked(Initialization, study, model=model, out=out, small=small, change=change, check=design.check)
