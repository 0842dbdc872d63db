"""What each scored row of each run came to, as arrays: all runs of a task score the same rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.analysis.reading.trained_file import ALL, TrainedRun
from toolkit.errors import InputError, closest
from toolkit.records import rows as rows_file
from toolkit.records.trained import ROW

AGREES = 1e-5
"""Difference of a stated loss or score and the sum of its rows that rounding the rows may make."""


@dataclass(frozen=True)
class Outcomes:
    """The rows of one run.

    Attributes:
        groups, numbers: set and number of each row.
        nll: of the gold target, nats, NaN where it was not measured, float64 (rows,); tokens: its target tokens.
        score: in [0, 1], NaN where the row has none, float64 (rows,).
    """

    groups: tuple[str, ...]
    numbers: tuple[Any, ...]
    nll: np.ndarray
    tokens: np.ndarray
    score: np.ndarray

    def of(self, group: str) -> Outcomes:
        """The rows of one set; `""`: all."""
        if group == ALL:
            return self
        at = [n for n, name in enumerate(self.groups) if name == group]
        return Outcomes(
            tuple(self.groups[n] for n in at),
            tuple(self.numbers[n] for n in at),
            self.nll[at],
            self.tokens[at],
            self.score[at],
        )


@dataclass(frozen=True)
class Scored:
    """The outcomes of some runs on the rows that they share.

    Attributes:
        loss: of each row, nats a target token, float64 (runs, rows); score: (runs, rows); None where a row has none.
        tokens: target tokens of each row, (rows,): Σ loss·tokens/Σ tokens is a run's loss.
    """

    runs: tuple[TrainedRun, ...]
    loss: np.ndarray | None
    score: np.ndarray | None
    tokens: np.ndarray


def read_outcomes(run: TrainedRun) -> Outcomes:
    """The rows beside a report.

    Raises:
        InputError: the report names no rows file, or it is missing, not the one that the report tells of, damaged,
            lacks a column, holds a value that is no finite number or a row twice; or its rows add up to another
            loss or score than the report states.
    """
    if run.rows is None:
        raise InputError(f"{run.path} names no rows file: there are no outcomes of its rows")
    path = run.path.parent / run.rows.file
    columns = rows_file.read(path, run.rows, str(run.path))
    for name in ROW:
        if name not in columns:
            raise InputError(f"{path} has no column {name!r}; {closest(name, columns)}")
    nll = _numbers(path, "nll", columns["nll"], missing=True)
    tokens = _numbers(path, "tokens", columns["tokens"])
    score = _numbers(path, "score", columns["score"], missing=True)
    none = np.flatnonzero((tokens <= 0) & ~np.isnan(nll))
    if len(none):
        number = int(none[0])
        raise InputError(f"{path}:{number + 1}: tokens is {tokens[number]:g}; a loss is of at least one target token")
    found = Outcomes(tuple(columns["group"]), tuple(columns["row"]), nll, tokens, score)
    keys = list(zip(found.groups, found.numbers, strict=True))
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"{path}: row {twice[1]} of group {twice[0]!r} stands twice")
    _expect(run, found)
    return found


def _numbers(path: Path, name: str, values: list[Any], *, missing: bool = False) -> np.ndarray:
    """Finite numbers as an array; with `missing`, null becomes NaN."""
    for number, value in enumerate(values, 1):
        if missing and value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InputError(f"{path}:{number}: {name} is {value!r:.40}, and a finite number is asked for")
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _expect(run: TrainedRun, found: Outcomes) -> None:
    """Hold a report's losses and scores to its rows."""
    for group, scores in run.scores.items():
        mine = found.of(group)
        where = f"group {group!r}" if group else "all rows"
        if len(mine.nll) != scores.rows:
            raise InputError(f"{run.path}: {where}: {scores.rows} rows are stated, and the file holds {len(mine.nll)}")
        if not scores.rows:
            raise InputError(f"{run.path}: {where}: no row was scored")
        pairs = []
        if not np.isnan(mine.nll).all() or math.isfinite(scores.loss):
            known = ~np.isnan(mine.nll)
            pairs.append(("loss", scores.loss, float(mine.nll[known].sum() / max(mine.tokens.sum(), 1))))
        if scores.score is not None and not np.isnan(mine.score).any():
            pairs.append((scores.metric, scores.score, float(mine.score.mean())))
        for name, stated, rows in pairs:
            if not math.isclose(stated, rows, rel_tol=AGREES, abs_tol=AGREES):
                raise InputError(
                    f"{run.path}: {where}: the {name} is {stated:.9g}, and its rows add up to {rows:.9g}: the report "
                    "or its rows were changed"
                )


class Reader:
    """The rows of runs, each file read once; runs of one task must have scored the same rows, and so must trials."""

    def __init__(self) -> None:
        self._outcomes: dict[Path, Outcomes] = {}
        self._first: dict[tuple[str, bool], TrainedRun] = {}

    def outcomes(self, run: TrainedRun) -> Outcomes:
        """The rows of one run, which are those of the other runs of its task.

        Raises:
            InputError: as `read_outcomes`; or the rows or their target tokens are others than another run's (both
                are named).
        """
        if run.path not in self._outcomes:
            found = read_outcomes(run)
            first = self._first.setdefault((run.task, run.role == "tune"), run)
            if first is not run:
                _alike(first, self._outcomes[first.path], run, found)
            self._outcomes[run.path] = found
        return self._outcomes[run.path]

    def scored(self, runs: list[TrainedRun], group: str = ALL) -> Scored:
        """The outcomes of some runs of one task, one line a run."""
        of = [self.outcomes(run).of(group) for run in runs]
        tokens = of[0].tokens
        scores, nll = np.stack([o.score for o in of]), np.stack([o.nll for o in of])
        return Scored(
            runs=tuple(runs),
            loss=None if np.isnan(nll).any() else nll / tokens,
            score=None if np.isnan(scores).any() else scores,
            tokens=tokens,
        )


def _alike(first: TrainedRun, a: Outcomes, second: TrainedRun, b: Outcomes) -> None:
    who = f"{second.path} (arm {second.arm!r}) and {first.path} (arm {first.arm!r})"
    if first.scores.keys() != second.scores.keys():
        sets = " and ".join(", ".join(map(repr, run.scores)) for run in (second, first))
        raise InputError(f"{who} have scores of other sets of rows of task {first.task!r}: {sets}")
    mine, other = (list(zip(o.groups, o.numbers, strict=True)) for o in (a, b))
    if mine != other:
        odd = sorted(set(map(str, mine)) ^ set(map(str, other)))
        what = f"rows such as {', '.join(odd[:3])} are in one alone" if odd else "the rows stand in another order"
        raise InputError(f"{who} did not score the same rows of task {first.task!r}: {what}; arms are compared by row")
    if not np.array_equal(a.tokens, b.tokens):
        at = int(np.flatnonzero(a.tokens != b.tokens)[0])
        raise InputError(
            f"{who} count the target tokens of row {a.numbers[at]} of task {first.task!r} otherwise: {b.tokens[at]:g} "
            f"and {a.tokens[at]:g}; they were not encoded alike"
        )
