"""One report of a fine-tuning run, checked and cut down to what tables and figures need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core
from pydantic import ValidationError

from toolkit.errors import InputError
from toolkit.records.dataflow import Flow
from toolkit.records.io import read_bytes
from toolkit.records.levers import Levers, Seeds
from toolkit.records.report import Rows
from toolkit.records.trained import Course, Data, Flag, Scores, Trained

ALL = ""
"""The group that holds all rows of a task together."""


@dataclass(frozen=True)
class Layers:
    """A choice of layers: how many, their parameters, both of how many, and what a random one was matched to."""

    selector: str
    layers: int
    parameters: int
    of: dict[str, int]
    matched_to: str | None
    mismatch: float | None
    hash: str


@dataclass(frozen=True)
class TrainedRun:
    """One report, cut down; the attributes are those of `toolkit.records.trained.Trained`.

    Attributes:
        note: of the reference weights.
        memory: bytes by name, as `toolkit.records.report.Provenance.peak_memory`.
        started: when it was made, UTC.
    """

    path: Path
    name: str
    study: str
    form: str
    role: str
    arm: str
    task: str
    seeds: Seeds
    draw: int | None
    value: float | None
    own: bool
    levers: Levers
    model: str
    fingerprint: str
    note: str
    settings: str
    protect: Layers | None
    adapt: Layers | None
    finished: bool
    flags: tuple[Flag, ...]
    labels: tuple[str, ...]
    train: Data
    test: Data
    course: Course
    scores: dict[str, Scores]
    rows: Rows | None
    memory: dict[str, int]
    device: str
    dtype: str
    commit: str | None
    lock: str | None = None
    started: str | None = None
    dataflow: Flow | None = None

    @property
    def fatal(self) -> Flag | None:
        """What ended the run early."""
        return next((flag for flag in self.flags if flag.severity == "fatal"), None)

    @property
    def where(self) -> tuple[str, str, Seeds, int | None]:
        """Task, arm, seeds and draw: what tells the runs of one role apart, but for a trial's value."""
        return self.task, self.arm, self.seeds, self.draw


class Head(Trained):
    """A report whose plan, which no table needs, is not looked into."""

    plan: Any = None


def read_trained(path: Path) -> TrainedRun:
    """One report, checked.

    Raises:
        InputError: the file is damaged, foreign or of another schema version; a finished run has no scores of all
            rows together, an unfinished one no reason, a trial no value; or a score is not finite.
    """
    try:
        data = pydantic_core.from_json(read_bytes(path), cache_strings="keys")
        if type(data["schema"]) is not int or data["schema"] != Trained.version:
            raise ValueError("another schema version")
        report: Trained = Head.model_validate(data)
    except (ValidationError, ValueError, LookupError, TypeError, AttributeError):
        try:  # the slow way says what is wrong
            report = Trained.load(path)
        except InputError as error:
            raise InputError(f"{error}\n{_damaged(path)}") from None
    if reason := _wrong(report):
        raise InputError(f"{path}: {reason}\n{_damaged(path)}")
    return TrainedRun(
        path=path,
        name=report.run,
        study=report.study,
        form=report.form,
        role=report.role,
        arm=report.arm,
        task=report.task,
        seeds=report.seeds,
        draw=report.draw,
        value=report.value,
        own=report.own,
        levers=report.levers,
        model=report.model,
        fingerprint=report.fingerprint,
        note=report.reference.note,
        settings=report.settings,
        protect=_layers(report.protect),
        adapt=_layers(report.adapt),
        finished=report.finished,
        flags=tuple(report.flags),
        labels=tuple(report.labels),
        train=report.train,
        test=report.test,
        course=report.course,
        scores=report.scores,
        rows=report.rows,
        memory=report.provenance.peak_memory,
        device=report.provenance.device,
        dtype=report.provenance.compute_dtype,
        commit=report.provenance.commit,
        lock=report.lock,
        started=report.provenance.started,
        dataflow=report.dataflow,
    )


def _damaged(path: Path) -> str:
    return f"{path} is damaged or no report of a fine-tuning run: move it away, and `toolkit run` repeats its run"


def _wrong(report: Trained) -> str | None:
    """What a report must not be, in words."""
    if not report.finished:
        fatal = any(flag.severity == "fatal" for flag in report.flags)
        return None if fatal else "the run is not finished, and no fatal flag says why"
    if report.role == "tune" and report.value is None:
        return "a trial (role tune) holds the `value` of the lever that it tries; it is missing"
    if ALL not in report.scores:
        found = ", ".join(map(repr, report.scores)) or "none"
        return f"a finished run has scores of all rows together (group ''); found {found}"
    for group, scores in report.scores.items():
        where = f"scores of group {group!r}" if group else "scores"
        if math.isinf(scores.loss):  # NaN: no loss was measured, to which the rows are held
            return f"{where}: the loss is {scores.loss}, and a finite number is asked for"
        if scores.score is not None and not 0 <= scores.score <= 1:
            return f"{where}: {scores.metric} is {scores.score}, and a number from 0 to 1 is asked for"
    return None


def _layers(selection: Any) -> Layers | None:
    if selection is None:
        return None
    return Layers(
        selector=selection.selector,
        layers=len(selection.layers),
        parameters=selection.parameters,
        of=selection.of,
        matched_to=None if selection.matched_to is None else selection.matched_to.selector,
        mismatch=selection.mismatch,
        hash=selection.layers_hash,
    )
