"""One report, read fast and cut down to what tables and figures need: the numbers of its draws become arrays.

The report is validated by its record, except for three parts: the plan and the provenance, which no table
needs, and the draws, whose keys and numbers are checked as they become columns. Rows files are opened only by
statistics that need them (`toolkit.analysis.windows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic_core
from pydantic import ValidationError

from toolkit.errors import InputError
from toolkit.records.io import read_bytes
from toolkit.records.profile import Reference
from toolkit.records.report import Draw, Law, Report, Rows, Score, Text
from toolkit.records.selection import Selection

OUTCOMES = ("loss", "kl", "agreement")
NUMBERS = ("layers", "parameters", "bytes")
_score = itemgetter(*Score.model_fields)
_draw = itemgetter("mask", *NUMBERS, "mismatch", "scores", "index")


@dataclass(frozen=True)
class Draws:
    """The draws of one control, as columns.

    Attributes:
        sets: the sets of layers, as bit masks: bit i is the profile's layer i.
        layers, parameters, bytes: totals of each draw, int64.
        mismatch: (reached − target)/target, signed, float64.
        outcomes: text → outcome (`loss` and `kl` in nats a token, `agreement` as a share) → float64 values.
    """

    sets: tuple[int, ...]
    layers: np.ndarray
    parameters: np.ndarray
    bytes: np.ndarray
    mismatch: np.ndarray
    outcomes: dict[str, dict[str, np.ndarray]]

    def __len__(self) -> int:
        return len(self.sets)


@dataclass(frozen=True)
class Run:
    """One report, cut down; the attributes are those of `toolkit.records.report.Report`."""

    path: Path
    name: str
    role: str
    arm: str
    control: str | None
    budget: str | None
    selection: Selection | None
    law: Law | None
    layers: tuple[str, ...] | None
    scores: dict[str, Score]
    draws: Draws | None
    rows: Rows | None


class Common(NamedTuple):
    """What all reports of one study share; texts are sorted by name."""

    study: str
    form: str
    model: str
    fingerprint: str
    settings: str
    texts: tuple[tuple[str, Text], ...]
    reference: Reference


class Head(Report):
    """A report whose large parts are not looked into."""

    plan: Any = None
    provenance: dict[str, Any]
    layers: Any = None
    draws: list[Any] = []  # type: ignore[assignment]


def read_report(path: Path) -> tuple[Common, Run]:
    """One report, checked: what it must share with the others of its study, and the run it tells of.

    Raises:
        InputError: the file is damaged, foreign or of another schema version; a part that its role needs is
            missing; or a score is not finite.
    """
    content = read_bytes(path)
    try:
        data = pydantic_core.from_json(content, cache_strings="keys")
        if type(data["schema"]) is not int or data["schema"] != Report.version:
            raise ValueError("another schema version")
        head = Head.model_validate(data)
        columns = _columns(head.draws, list(head.texts))
    except (ValidationError, InputError, ValueError, LookupError, TypeError, AttributeError):
        # the slow way says what is wrong
        head, columns = _explained(path)
    common = Common(
        head.study,
        head.form,
        head.model,
        head.fingerprint,
        head.settings,
        tuple(sorted(head.texts.items(), key=itemgetter(0))),
        head.reference,
    )
    return common, _run(head, columns, path)


def _explained(path: Path) -> tuple[Report, Draws | None]:
    """The report, validated in full: either the error, or what the quick way is too strict for."""
    try:
        report = Report.load(path)
        for draw in report.draws:
            _complete(draw.scores, report.texts, f"draw {draw.index}")
            int(draw.mask, 16)
        return report, _columns([draw.model_dump() for draw in report.draws], list(report.texts))
    except (InputError, ValueError, KeyError, TypeError, OverflowError) as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise InputError(
            f"{text}\n{path} is damaged or no report: move it away, and `toolkit run` repeats its run"
        ) from None


def _columns(draws: list[dict[str, Any]], texts: list[str]) -> Draws | None:
    """The draws as columns.

    Raises:
        ValueError, KeyError, TypeError: a key is missing or unknown, or a value is no number of its kind.
    """
    if not draws:
        return None
    if any(len(draw) != len(Draw.model_fields) for draw in draws):
        raise ValueError("a draw has other keys")
    masks, *totals, mismatch, scores, _ = zip(*map(_draw, draws), strict=True)
    outcomes: dict[str, dict[str, np.ndarray]] = {}
    for text in texts:
        of_text = [score[text] for score in scores]
        if any(len(score) != len(Score.model_fields) for score in of_text):
            raise ValueError("a score has other keys")
        columns = dict(zip(Score.model_fields, zip(*map(_score, of_text), strict=True), strict=True))
        outcomes[text] = {name: _numbers(columns[name], "fiu") for name in OUTCOMES}
    if any(len(score) != len(texts) for score in scores):
        raise ValueError("a draw has a score on another text")
    return Draws(
        sets=tuple([int(mask, 16) for mask in masks]),
        mismatch=_numbers(mismatch, "fiu"),
        outcomes=outcomes,
        **{name: _numbers(values, "iu") for name, values in zip(NUMBERS, totals, strict=True)},
    )


def _numbers(values: Sequence[Any], kinds: str) -> np.ndarray:
    """Numbers of these kinds (of numpy's dtypes), all finite."""
    array = np.array(values)
    if array.dtype.kind not in kinds or not np.isfinite(array).all():
        raise ValueError("a value is no finite number of its kind")
    return array.astype(np.float64 if "f" in kinds else np.int64)


def _run(report: Report, columns: Draws | None, path: Path) -> Run:
    """What tables and figures need, all of it there."""
    control = report.role == "control"
    if control and (report.law is None or report.control is None or columns is None or not report.layers):
        raise InputError(f"{path}: a control's report has a control, a law, layers and draws; one of them is missing")
    if not control:
        _complete(report.scores, report.texts, str(path))
    if report.role != "reference" and report.budget is None:
        raise InputError(f"{path}: the report of an {report.role} has a budget; found none")
    if report.role == "arm" and report.selection is None:
        raise InputError(f"{path}: the report of an arm has a selection; found none")
    law = report.law
    return Run(
        path=path,
        name=report.run,
        role=report.role,
        arm=report.arm,
        control=report.control,
        budget=None if report.budget is None else str(report.budget),
        selection=report.selection,
        law=None if law is None else law.model_copy(update={"inclusion": None}),
        layers=None if report.layers is None else tuple(report.layers),
        scores=report.scores,
        draws=columns if control else None,
        rows=report.rows,
    )


def _complete(scores: dict[str, Score], texts: Iterable[str], where: str) -> None:
    for text in texts:
        if text not in scores:
            raise InputError(f"{where}: no score on text {text!r}; scores are on {', '.join(scores) or 'none'}")
        for outcome in OUTCOMES:
            if not np.isfinite(getattr(scores[text], outcome)):
                raise InputError(f"{where}: {outcome} on text {text!r} is {getattr(scores[text], outcome)}")
