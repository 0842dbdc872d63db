"""What is asked of a study of any kind: which form, on which model and data, and in which folder its results lie."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

from toolkit.errors import InputError
from toolkit.records.declared import study_file
from toolkit.records.io import File, parse
from toolkit.runs import results
from toolkit.weights.sources import refuse_missing


class Declared(Protocol):
    """A study's record, as far as it is the same for every kind."""

    @property
    def name(self) -> str:
        """Of the study."""

    @property
    def model(self) -> str:
        """Hugging Face id, local directory, or `demo`."""

    @classmethod
    def read(cls, path: str | os.PathLike[str], small: bool = False) -> Declared:
        """From its folder or its `study.yaml`."""


S = TypeVar("S", bound=File)


@dataclasses.dataclass(frozen=True)
class Asked(Generic[S]):
    """A study as it is run, timed or locked.

    Attributes:
        folder: of its results.
        home: of its file, whose commit is recorded; for a study given as an object, where its results will lie.
    """

    study: S
    folder: Path
    home: Path


def asked(
    kind: type[S],
    study: str | os.PathLike[str] | S,
    *,
    model: str | os.PathLike[str] | None,
    out: str | os.PathLike[str] | None,
    small: bool,
    change: Callable[[S, str], S],
    check: Callable[[S], None],
) -> Asked[S]:
    """The study with what replaces its parts, checked as far as that goes without a model and data.

    Args:
        kind: the study's record.
        study: a study's folder or its `study.yaml`; or the record, and then `out` is needed.
        model: instead of the study's: a Hugging Face id, a local directory, or `demo`.
        out: folder of the results; by default `results` beside the study, or `results-small` for its small form.
        small: the small form that the study declares.
        change: (study, its name in errors) → the study with other data.
        check: refuses what cannot be run; the error is told with the study's name.

    Raises:
        InputError: no such study, or one that cannot be run; a model that is a path, and is not there; or an empty
            `out`.
    """
    given, home, named = _read(kind, study, out, small)
    if model is not None:
        given = parse(kind, given.to_json() | {"model": os.fspath(model)}, named, {})
    given = change(given, named)
    try:
        check(given)
    except InputError as error:
        raise InputError(f"{named}: {error}") from None
    folder = results.folder_of(out, home, small=small)
    refuse_missing(cast(Declared, given).model)
    return Asked(given, folder, home)


def _read(
    kind: type[S], study: str | os.PathLike[str] | S, out: str | os.PathLike[str] | None, small: bool
) -> tuple[S, Path, str]:
    """The study's record, its home, and its name in errors."""
    declared = cast(type[Declared], kind)
    if not isinstance(study, kind):
        file = study_file(cast("str | os.PathLike[str]", study))
        return cast(S, declared.read(file, small=small)), file.parent, str(file)
    if out is None or small:
        raise InputError(
            f"a study given as an object ({kind.__name__}) needs `out`, and has its form already: "
            f"{kind.__name__}.read(…, small=True)"
        )
    home = Path(out).absolute().parent
    home = next(place for place in (home, *home.parents) if place.is_dir())
    return study, home, f"study {cast(Declared, study).name}"
