"""One report, read fast and cut down to what tables and figures need: the numbers of its draws become arrays.

The report is validated by its record, except for three parts: the plan and the provenance, which no table
needs, and the draws, whose keys and numbers are checked as they become columns. Rows files are opened only by
statistics that need them (`toolkit.analysis.reading.windows`).
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable
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
MASKS = re.compile(r"0x(?:0|[1-9a-f][0-9a-f]*)(?: 0x(?:0|[1-9a-f][0-9a-f]*))*")


@dataclass(frozen=True)
class Draws:
    """The draws of one control, or the layers of one sweep, as columns.

    Attributes:
        index: which draw of its law each is, counted from 0, int64.
        masks: the sets of layers as `hex` writes them, with a space between two: one text, because there may be
            millions. Bit i is the profile's layer i.
        layers, parameters, bytes: totals of each draw, int64.
        mismatch: (reached − target)/target, signed, float64.
        outcomes: text → outcome (`loss` and `kl` in nats a token, `agreement` as a share) → float64 values.
    """

    index: np.ndarray
    masks: str
    layers: np.ndarray
    parameters: np.ndarray
    bytes: np.ndarray
    mismatch: np.ndarray
    outcomes: dict[str, dict[str, np.ndarray]]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def sets(self) -> list[int]:
        """The sets of layers as bit masks."""
        return [int(mask, 16) for mask in self.masks.split()]


@dataclass(frozen=True)
class Run:
    """One report, cut down; the attributes are those of `toolkit.records.report.Report`.

    Attributes:
        law: without its inclusion probabilities, of which `expected` is the sum by role.
        started: when it was measured, UTC; None where the report does not say.
    """

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
    lock: str | None = None
    started: str | None = None
    labels: tuple[str, ...] = ()


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
    except (ValidationError, InputError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
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
        ValueError, KeyError, TypeError, OverflowError: a key is missing or unknown, or a value is no number of
            its kind.
    """
    if not draws:
        return None
    if sum(map(len, draws)) != len(draws) * len(Draw.model_fields):
        raise ValueError("a draw has other keys")
    scores = [draw["scores"] for draw in draws]
    if sum(map(len, scores)) != len(draws) * len(texts):
        raise ValueError("a draw has a score on another text")
    outcomes: dict[str, dict[str, np.ndarray]] = {}
    for text in texts:
        of_text = [score[text] for score in scores]
        if sum(map(len, of_text)) != len(draws) * len(Score.model_fields):
            raise ValueError("a score has other keys")
        outcomes[text] = {name: _numbers([score[name] for score in of_text]) for name in OUTCOMES}
    masks = " ".join([draw["mask"] for draw in draws])
    if not MASKS.fullmatch(masks):  # written by hand: a zero in front, a capital letter
        masks = " ".join(hex(int(draw["mask"], 16)) for draw in draws)
    return Draws(
        index=_numbers([draw["index"] for draw in draws], "q"),
        masks=masks,
        layers=_numbers([draw["layers"] for draw in draws], "q"),
        parameters=_numbers([draw["parameters"] for draw in draws], "q"),
        bytes=_numbers([draw["bytes"] for draw in draws], "q"),
        mismatch=_numbers([draw["mismatch"] for draw in draws]),
        outcomes=outcomes,
    )


def _numbers(values: list[Any], code: str = "d") -> np.ndarray:
    """Finite numbers as an array, float64 or (code "q") int64; `array` takes no text and rounds no fraction."""
    numbers = array(code, values)
    if not math.isfinite(sum(numbers)):
        raise ValueError("a value is no finite number")
    return np.frombuffer(numbers, dtype=np.float64 if code == "d" else np.int64)


WITH_DRAWS = ("control", "sweep")
NEEDS: dict[str, tuple[str, ...]] = {
    "control": ("budget", "control", "law", "layers", "draws"),
    "sweep": ("layers", "draws"),
    "arm": ("budget", "selection"),
    "oracle": ("budget", "control", "selection"),
}
"""Role → what its report holds besides scores."""


def _run(report: Report, columns: Draws | None, path: Path) -> Run:
    """What tables and figures need, all of it there."""
    role, law = report.role, report.law
    for part in NEEDS.get(role, ()):
        if not getattr(report, part) and (part != "draws" or columns is None):
            needed = ", ".join(NEEDS[role])
            raise InputError(f"{path}: the report of role {role!r} has {needed}; {part} is missing")
    if role not in WITH_DRAWS:
        _complete(report.scores, report.texts, str(path))
    started = report.provenance["started"] if isinstance(report.provenance, dict) else report.provenance.started
    run = Run(
        path=path,
        name=report.run,
        role=role,
        arm=report.arm,
        control=report.control,
        budget=None if report.budget is None else str(report.budget),
        selection=report.selection,
        law=None if law is None else law.model_copy(update={"inclusion": None}),
        layers=None if report.layers is None else tuple(report.layers),
        scores=report.scores,
        draws=columns if role in WITH_DRAWS else None,
        rows=report.rows,
        lock=report.lock,
        started=started if isinstance(started, str) else None,
        labels=tuple(report.labels),
    )
    if role == "sweep":
        _check_sweep(run)
    return run


def _check_sweep(run: Run) -> None:
    """Refuse a sweep that does not hold each layer alone, in profile order."""
    assert run.layers is not None and run.draws is not None
    count = len(run.layers)
    alone = [1 << at for at in range(count)]
    if run.draws.sets not in (alone, [(1 << count) - 1 - one for one in alone]):
        raise InputError(
            f"{run.path}: a sweep holds each of the {count} layers alone (or all but each) in profile order; these "
            f"{len(run.draws)} draws do not"
        )


def _complete(scores: dict[str, Score], texts: Iterable[str], where: str) -> None:
    for text in texts:
        if text not in scores:
            raise InputError(f"{where}: no score on text {text!r}; scores are on {', '.join(scores) or 'none'}")
        for outcome in OUTCOMES:
            if not np.isfinite(getattr(scores[text], outcome)):
                raise InputError(f"{where}: {outcome} on text {text!r} is {getattr(scores[text], outcome)}")
