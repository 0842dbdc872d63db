"""What is known of a run while it goes on, and the report that is made of it wherever it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.records import rows as rows_file
from toolkit.records.dataflow import Flow
from toolkit.records.io import write_json
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.report import REPORT
from toolkit.records.selection import Selection
from toolkit.records.trained import ROW, Course, Data, Flag, Scores, Trained
from toolkit.runs.finetuning.data import Rows, record
from toolkit.runs.finetuning.design import Run
from toolkit.runs.finetuning.starting import begun
from toolkit.runs.tasks import Evaluated, Split

if TYPE_CHECKING:
    from toolkit.runs.training import Pacing

ADAPTER = "adapter"
"""Folder of the saved adapter, beside the report."""

MEMORY = "out-of-memory"
"""The check that a run did not pass whose device had too little memory."""

DIED = "process-died"
"""The check that a run did not pass whose process was ended from outside, twice."""

SCORING = "scoring"
"""The check that a run did not pass whose model cannot be scored."""

AGAIN = (MEMORY, DIED)
"""Checks whose failure may be the moment's: the same command tries such runs again."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run with its plan, and the settings that its task's runs share.

    Attributes:
        start: folder of the starts; None where every layer starts plainly.
    """

    run: Run
    plan: Plan
    protect: Selection | None
    adapt: Selection | None
    settings: str
    start: Path | None = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every run of a study shares; plain data, so that it can be sent to another process.

    Attributes:
        folder: of the study's results; `home`: of its file, whose commit is recorded.
        model: what is loaded; `profile` knows its published name and fingerprint.
        device, dtype: names.
    """

    study: str
    form: str
    folder: Path
    home: Path
    model: str
    profile: Profile
    rows: Mapping[str, Rows]
    device: str
    dtype: str
    batch: int
    keep_adapters: bool = False
    lock: str | None = None
    report_to: tuple[str, ...] = ()
    pacing: Pacing | None = None


class Attempt:
    """What is known of a run while it goes on, so that a report can be made wherever it ends."""

    def __init__(self, planned: Planned, where: Path, split: Split) -> None:
        self.planned, self.where, self.split = planned, where, split
        self.doing: str | None = None
        self.train: Data | None = None
        self.dataflow: Flow | None = None
        self.course: Course | None = None
        self.flags: list[Flag] = []
        self.evaluated: Evaluated | None = None
        self.memory: dict[str, int] = {}
        self.fallbacks: dict[str, int] = {}
        self.trainable = 0
        self.adapter: str | None = None

    def ended(self, check: str, error: object, doing: str | None) -> None:
        """Mark the run as ended early."""
        if any(flag.severity == "fatal" for flag in self.flags):
            return  # the training has said it better
        reason = " ".join(str(error).split())[:300]
        step = self.course.steps if self.course is not None else None
        self.flags.append(
            Flag(check=check, severity="fatal", reason=f"{doing}: {reason}" if doing else reason, step=step)
        )

    def write(self, setup: Setup, provenance: Any) -> Trained:
        """Rows, then the report, each atomically."""
        run, planned, done = self.planned.run, self.planned, self.evaluated
        rows = setup.rows[run.task]
        labels = list(run.labels)
        if rows.shared and run.role != "tune":
            labels.append(f"{rows.shared} of {len(rows.test.examples)} scored rows stand among the training rows")
        scores: dict[str, Scores] = {} if done is None else dict(done.scores)
        finished = done is not None and not any(flag.severity == "fatal" for flag in self.flags)
        report = Trained(
            study=setup.study,
            form=setup.form,  # type: ignore[arg-type]
            run=run.name,
            role=run.role,
            arm=run.arm,
            task=run.task,
            seeds=run.seeds,
            draw=run.draw,
            value=run.value,
            own=run.own,
            levers=run.levers,
            model=setup.profile.model,
            fingerprint=setup.profile.fingerprint,
            reference=setup.profile.reference,
            settings=planned.settings,
            lock=setup.lock,
            plan=planned.plan,
            protect=planned.protect,
            adapt=planned.adapt,
            start=None if planned.start is None else begun(planned.start),
            dataflow=self.dataflow,
            finished=finished,
            flags=self.flags + ([] if done is None else list(done.flags)),
            labels=labels,
            train=self.train or record(rows.train),
            test=record(self.split)
            if done is None
            else record(self.split, done.cut, len(done.rows), shortened=done.shortened),
            course=self.course or _no_course(run, self.trainable),
            scores=scores,
            adapter=self.adapter,
            rows=None if done is None else rows_file.write(self.where, ROW, done.rows),
            provenance=provenance,
        )
        write_json(self.where / REPORT, report.to_json())
        return report


def _no_course(run: Run, trainable: int) -> Course:
    """Of a run that trained nothing."""
    return Course(
        steps=0,
        planned=(run.levers.steps or 0) if run.trains else 0,
        examples=0,
        target_tokens=0,
        real_tokens=0,
        computed_tokens=0,
        first_loss=None,
        last_loss=None,
        seconds=0.0,
        trainable=trainable,
    )
