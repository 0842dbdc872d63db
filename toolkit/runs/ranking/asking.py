"""What is asked of a study: which form, on which model and texts, and in which folder its results lie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from toolkit.errors import InputError
from toolkit.records.io import parse
from toolkit.records.study import Study
from toolkit.runs import asking
from toolkit.runs.asking import Asked
from toolkit.runs.ranking import design
from toolkit.runs.texts.documents import parse_texts


def asked(
    study: str | os.PathLike[str] | Study,
    *,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
) -> Asked[Study]:
    """The study with what replaces its parts, checked as far as that goes without a model.

    Args:
        study, model, out, small: as `toolkit.runs.asking.asked`.
        texts: instead of the study's: name → source, or `[NAME=]SOURCE` items.

    Raises:
        InputError: no such study, or one that cannot be run (`toolkit.runs.ranking.design.check`); a model that is a
            path, and is not there; or an empty `out`.
    """

    def change(declared: Study, named: str) -> Study:
        if texts is None:
            return declared
        given = dict(texts) if isinstance(texts, Mapping) else parse_texts(texts)
        if not given:
            raise InputError("no text is given; leave `texts` out for the study's own")
        return parse(Study, declared.to_json() | {"texts": given}, named, {})

    return asking.asked(Study, study, model=model, out=out, small=small, change=change, check=design.check)
