"""`run` and `lock` for a study of any kind: its file says which runner it is for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.records.declared import KINDS, kind_of
from toolkit.records.finetuning import FineTuning
from toolkit.records.initialization import Initialization
from toolkit.records.study import Study

if TYPE_CHECKING:
    from toolkit.runs.training import Pacing

SELECTIONS, TRAINED, STARTS = KINDS


def run(
    study: str | os.PathLike[str] | Study | FineTuning | Initialization,
    *,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    calibration: str | None = None,
    data: Mapping[str, str | os.PathLike[str]] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    workers: int | None = None,
    report_to: Sequence[str] | None = None,
    pacing: Pacing | None = None,
    progress: bool = True,
) -> Path:
    """Run a study, or what is missing of it; the folder of its results.

    A controlled ablation (`toolkit.runs.ranking`) takes `texts`; a study of starts (`toolkit.runs.initialization`)
    also `calibration`, the text to calibrate on; a fine-tuning study (`toolkit.runs.finetuning`) takes `data`,
    `workers`, `report_to` and `pacing`. The other arguments are the same for all.

    Raises:
        InputError: the study cannot be run, or an option is not for its kind.
        RunError: what was finished is kept.
    """
    common: dict[str, Any] = {
        "model": model, "out": out, "small": small, "device": device, "dtype": dtype, "progress": progress
    }  # fmt: skip
    trains = {"data": data, "workers": workers, "report_to": report_to, "pacing": pacing}
    kind = _kind(study)
    if kind == TRAINED:
        from toolkit.runs import finetuning

        _refuse(kind, {"texts": texts, "calibration": calibration})
        return finetuning.run(study, **common, **{k: v for k, v in trains.items() if v is not None})  # type: ignore[arg-type]
    _refuse(kind, trains)
    if kind == STARTS:
        from toolkit.runs import initialization

        return initialization.run(study, texts=texts, calibration=calibration, **common)  # type: ignore[arg-type]
    from toolkit.runs import ranking

    _refuse(kind, {"calibration": calibration})
    return ranking.run(study, texts=texts, **common)  # type: ignore[arg-type]


def lock(
    study: str | os.PathLike[str] | Study | FineTuning | Initialization,
    *,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    calibration: str | None = None,
    data: Mapping[str, str | os.PathLike[str]] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
) -> Path:
    """Seal a study's analysis before its first run: `lock.json` in the folder of its results, and its path.

    Raises:
        InputError, RunError: as `toolkit.runs.locking.seal`.
    """
    kind = _kind(study)
    if kind == TRAINED:
        from toolkit.runs.finetuning import sealing

        _refuse(kind, {"texts": texts, "calibration": calibration})
        return sealing.lock(study, model=model, data=data, out=out, small=small)  # type: ignore[arg-type]
    _refuse(kind, {"data": data})
    if kind == STARTS:
        from toolkit.runs.initialization import sealing as of_starts

        return of_starts.lock(study, model=model, texts=texts, calibration=calibration, out=out, small=small)  # type: ignore[arg-type]
    from toolkit.runs.ranking import sealing as of_selections

    _refuse(kind, {"calibration": calibration})
    return of_selections.lock(study, model=model, texts=texts, out=out, small=small)  # type: ignore[arg-type]


def _kind(study: Any) -> str:
    if isinstance(study, Study | FineTuning | Initialization):
        return study.kind
    return kind_of(study)


def _refuse(kind: str, given: Mapping[str, Any]) -> None:
    """Options that would do nothing."""
    names = {"texts": "--text", "data": "--task-data", "report_to": "--report-to"}
    found = [name for name, value in given.items() if value is not None]
    if found:
        raise InputError(
            f"{found[0]} ({names.get(found[0], '--' + found[0])}) is not for a study of kind {kind!r}: leave it out"
        )
