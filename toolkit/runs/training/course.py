"""The course of a run: its curve, step by step, and what was counted."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.records.io import atomic
from toolkit.records.trained import CURVE, Course
from toolkit.runs.training.batches import Schedule

COLUMNS = ["step", "loss", "learning_rate", "gradient_norm", "target_tokens", "seconds"]


class Clock:
    """Seconds of the steps and seconds of waiting, over all parts of a resumed run."""

    def __init__(self, seconds: float = 0.0, paused: float = 0.0) -> None:
        self.paused = paused
        self._before, self._since = seconds, None

    @property
    def seconds(self) -> float:
        """Of the steps alone."""
        return self._before + (time.monotonic() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        """The steps go on."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """They do not."""
        self._before, self._since = self.seconds, None


class Curve:
    """The curve's file: one line a step, written as they are known; a resumed run cuts off what it does again.

    Args:
        folder: of the run.
        step: keep the lines up to this one.
    """

    def __init__(self, folder: Path, *, step: int = 0, written: bool = True) -> None:
        self.path, self._written = folder / CURVE, written
        self.rows: list[list[Any]] = [row for row in _read(self.path) if row[0] <= step] if step else []
        if written:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([COLUMNS, *self.rows])
            with atomic(self.path) as temporary:
                temporary.write_text(text.getvalue(), encoding="utf-8")

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append steps."""
        self.rows += [list(row) for row in rows]
        if self._written and rows:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)

    @property
    def losses(self) -> list[float]:
        """Nats a target token, step by step."""
        return [row[1] for row in self.rows]


def reaches(folder: Path, step: int) -> bool:
    """Whether the folder's curve holds every step up to this one."""
    return [row[0] for row in _read(folder / CURVE)[:step]] == list(range(1, step + 1))


def _read(path: Path) -> list[list[Any]]:
    """The whole lines of a curve; the last may be torn."""
    if not path.is_file():
        return []
    rows: list[list[Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        try:
            step, loss, rate, norm, tokens, seconds = line.split(",")
            rows.append([int(step), float(loss), float(rate), float(norm), int(tokens), float(seconds)])
        except ValueError:
            break
    return rows


def course(
    plan: Schedule,
    losses: Sequence[float],
    clock: Clock,
    *,
    steps: int,
    resumed: int,
    lowest: int | None,
    scale: float | None,
    trainable: int,
    replayed: int = 0,
) -> Course:
    """What is reported of the first `steps` steps.

    Token counts follow from the schedule alone. The first and the last tenth are of at least one step.
    """
    tenth = max(1, math.ceil(len(losses) / 10))

    def mean(values: Sequence[float]) -> float | None:
        finite = [v for v in values if math.isfinite(v)]
        return sum(finite) / len(finite) if finite and len(finite) == len(values) else None

    return Course(
        steps=steps,
        planned=len(plan.steps),
        examples=sum(len(rows) for step in plan.steps[:steps] for rows in step),
        target_tokens=sum(plan.target[:steps]),
        real_tokens=sum(plan.real[:steps]),
        computed_tokens=sum(plan.computed[:steps]),
        first_loss=mean(losses[:tenth]) if losses else None,
        last_loss=mean(losses[-tenth:]) if losses else None,
        seconds=clock.seconds,
        resumed=resumed,
        paused=clock.paused,
        lowest=lowest,
        scale=scale,
        trainable=trainable,
        replayed=replayed,
    )
