"""A table of scores from any runner, as CSV: read strictly, every wrong line named by its number.

Columns: `selection` (the `layers_hash` of a selection, at least 8 digits of its beginning, or its file's name),
`model`, `budget`, `seed`, `metric`, `value`; and, where scores are told one a row or window of the data, `row` or
`window`.
"""

from __future__ import annotations

import csv
import io
import math
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from toolkit.errors import InputError, closest
from toolkit.records.io import atomic

COLUMNS = ("selection", "model", "budget", "seed", "metric", "value")
PARTS = ("row", "window")
"""Optional columns, one of them at most: values are averaged over it."""


class Named(NamedTuple):
    """A selection as a line names it, with the budget that stands beside it, and the first line that does."""

    name: str
    budget: str
    line: int


@dataclass
class Scores:
    """The lines of a scores file as columns of numbers: line i gives `values[i]`.

    Attributes:
        model: the one model that all lines name.
        selections, metrics, seeds, rows: what the numbers in the columns of the same name count; in the order in
            which they come up.
        lines: the line of the file (the heading is line 1).
        part: `row` or `window`, whichever column is there; else None.
    """

    path: Path
    model: str
    selections: list[Named]
    metrics: list[str]
    seeds: list[int]
    rows: list[str]
    selection: np.ndarray
    metric: np.ndarray
    seed: np.ndarray
    row: np.ndarray
    values: np.ndarray
    lines: np.ndarray
    part: str | None = None


@dataclass
class _Column:
    """Values → numbers in the order in which they come up."""

    known: dict[object, int] = field(default_factory=dict)
    numbers: array[int] = field(default_factory=lambda: array("q"))

    def add(self, value: object) -> None:
        self.numbers.append(self.known.setdefault(value, len(self.known)))


def read_scores(path: str | os.PathLike[str], metrics: Iterable[str] = ()) -> Scores:
    """Every line of a scores file; with `metrics`, those of these metrics.

    UTF-8 with or without a byte order mark, any line ends, cells quoted or not. Lines without any cell are left
    out.

    Raises:
        InputError: the file is missing, empty, no UTF-8 text or no CSV; a column is unknown, missing or there
            twice; it holds no line, or lines of several models; or a line has too few or too many cells, an empty
            one, a value that is no finite number, or a seed that is no integer.
    """
    path = Path(path)
    wanted = set(metrics)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            try:
                return _read(path, reader, wanted)
            except csv.Error as error:
                raise InputError(f"{path}:{reader.line_num}: {error}") from None
            except UnicodeDecodeError as error:
                raise InputError(f"{path} is not UTF-8 text (after line {reader.line_num}): {error.reason}") from None
    except FileNotFoundError:
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"no file {path}; {closest(path.name, near)}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _read(path: Path, reader: Iterable[list[str]], wanted: set[str]) -> Scores:
    lines = iter(reader)
    heading = [name.strip() for name in next(lines, [])]
    at = _places(path, heading)
    part = next((at[name] for name in PARTS if name in at), None)
    places = [at[name] for name in COLUMNS]
    models: dict[str, int] = {}
    selections, metrics, seeds, rows = _Column(), _Column(), _Column(), _Column()
    first: dict[object, int] = {}
    values, numbers = array("d"), array("q")
    said: set[str] = set()
    width = len(heading)
    for cells in lines:
        if not any(cells):
            continue
        line = reader.line_num  # type: ignore[attr-defined]
        if len(cells) != width:
            raise InputError(f"{path}:{line}: {len(cells)} cells, and the heading has {width} columns")
        name, model, budget, seed, metric, text = [cells[place].strip() for place in places]
        value = _number(text)
        if value is None:
            raise InputError(f"{path}:{line}: value is {text!r}; a finite number is asked for")
        if not (name and model and metric):
            lacking = next(n for n, v in (("selection", name), ("model", model), ("metric", metric)) if not v)
            raise InputError(f"{path}:{line}: the cell of column {lacking!r} is empty")
        if len(models) < 2:
            models.setdefault(model, line)
        said.add(metric)
        if wanted and metric not in wanted:
            continue
        number = _integer(seed)
        if number is None:
            raise InputError(f"{path}:{line}: seed is {seed!r}; an integer is asked for")
        first.setdefault((name, budget), line)
        selections.add((name, budget))
        metrics.add(metric)
        seeds.add(number)
        rows.add("" if part is None else cells[part].strip())
        values.append(value)
        numbers.append(line)
    if len(models) > 1:
        (one, _), (other, line) = models.items()
        raise InputError(
            f"{path}:{line}: scores of model {other!r}, and the lines before are of {one!r}: they are mixed"
        )
    for metric in sorted(wanted - said):
        raise InputError(f"{path} has no score of metric {metric!r}; {closest(metric, said)}")
    if not models:
        raise InputError(f"{path} holds a heading and no scores")
    named = [Named(name, budget, first[name, budget]) for name, budget in first]
    return Scores(
        path=path,
        model=next(iter(models)),
        selections=named,
        metrics=[str(m) for m in metrics.known],
        seeds=[int(s) for s in seeds.known],  # type: ignore[call-overload]
        rows=[str(r) for r in rows.known],
        selection=np.frombuffer(selections.numbers, dtype=np.int64),
        metric=np.frombuffer(metrics.numbers, dtype=np.int64),
        seed=np.frombuffer(seeds.numbers, dtype=np.int64),
        row=np.frombuffer(rows.numbers, dtype=np.int64),
        values=np.frombuffer(values, dtype=np.float64),
        lines=np.frombuffer(numbers, dtype=np.int64),
        part=next((name for name in PARTS if name in at), None),
    )


def _places(path: Path, heading: list[str]) -> dict[str, int]:
    """Column name → its place in a line."""
    if not any(heading):
        raise InputError(f"{path} is empty; its first line names the columns: {','.join(COLUMNS)}")
    for name in heading:
        if name not in COLUMNS + PARTS:
            raise InputError(f"{path}:1: unknown column {name!r}; {closest(name, COLUMNS + PARTS)}")
        if heading.count(name) > 1:
            raise InputError(f"{path}:1: column {name!r} stands twice")
    if missing := [name for name in COLUMNS if name not in heading]:
        raise InputError(f"{path}:1: column {missing[0]!r} is missing; the columns are {', '.join(COLUMNS)}")
    if all(name in heading for name in PARTS):
        raise InputError(f"{path}:1: columns 'row' and 'window' both; values are averaged over one of them")
    return {name: heading.index(name) for name in heading}


def _number(text: str) -> float | None:
    """A finite number as other programs write it, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def _integer(text: str) -> int | None:
    """An integer, also as `0.0`, which is how a table with gaps writes it; or None."""
    if text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 4300:  # Python reads no longer ones
        return int(text)  # a float would make one seed of two that lie above 2⁵³
    value = _number(text)
    return int(value) if value is not None and value.is_integer() else None


def write_template(
    path: str | os.PathLike[str], selections: Sequence[tuple[str, str]], model: str, metric: str, seeds: Sequence[int]
) -> Path:
    """A scores file with one line a selection (name, budget) and seed, values left empty; atomic.

    Raises:
        InputError: a file is there already: it may hold scores.
    """
    path = Path(path)
    if path.exists():
        raise InputError(f"{path} exists, and a template never replaces a file: it may hold scores")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(
        [name, model, budget, seed, metric, ""] for name, budget in selections for seed in dict.fromkeys(seeds)
    )
    with atomic(path) as temporary:
        temporary.write_text(out.getvalue(), encoding="utf-8")
    return path
