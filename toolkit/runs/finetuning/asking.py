"""What is asked of a fine-tuning study: which form, on which model and data, and in which folder its results lie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from toolkit.errors import InputError
from toolkit.records.finetuning import FineTuning
from toolkit.runs import asking
from toolkit.runs.asking import Asked
from toolkit.runs.finetuning import plans


def asked(
    study: str | os.PathLike[str] | FineTuning,
    *,
    model: str | os.PathLike[str] | None = None,
    data: Mapping[str, str | os.PathLike[str]] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
) -> Asked[FineTuning]:
    """The study with what replaces its parts, checked as far as that goes without a model and data.

    Args:
        study, model, out, small: as `toolkit.runs.asking.asked`.
        data: instead of the study's: task name → folder of rows (`NAME:train` for those trained on), or `NAME=PATH`.

    Raises:
        InputError: no such study, or one that cannot be run (`toolkit.runs.finetuning.plans.check`); a model that is
            a path, and is not there; or an empty `out`.
    """

    def change(declared: FineTuning, _: str) -> FineTuning:
        return declared if data is None else declared.with_data(_pairs(data))

    return asking.asked(FineTuning, study, model=model, out=out, small=small, change=change, check=plans.check)


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
