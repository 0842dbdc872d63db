"""The rows of one split of a task: read, checked, in a fixed order, and hashed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolkit.errors import InputError, closest
from toolkit.interfaces import Example, Task
from toolkit.runs.tasks.answers import answering, check_example, check_settings
from toolkit.runs.tasks.sources import SplitName, from_hub, local

MOST = 5_000_000
"""Rows that a task's own code may make: one that never ends would fill the memory."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples of a split.

    Attributes:
        numbers: of each example, its row's place in the source (in its set, where a task holds several), from 0.
        source: what was read: `code`, the Hub's data set, or the name of the file (its folder is the machine's matter).
        found: rows in the source; `unusable`: those that the task cannot use.
        limit: the most rows that are scored; of running text, windows.
    """

    examples: list[Example]
    numbers: list[int]
    source: str
    found: int
    unusable: int = 0
    limit: int | None = None

    @property
    def sha256(self) -> str:
        """SHA-256 of the prompts and targets, in order."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(json.dumps([example.prompt, example.target, example.options]).encode())
        return digest.hexdigest()

    def part(self, start: int, stop: int | None = None) -> Split:
        """A slice of the examples; `found` and `unusable` stay those of the source."""
        return dataclasses.replace(self, examples=self.examples[start:stop], numbers=self.numbers[start:stop])


def read(task: Task, split: SplitName, *, source: str | None = None, limit: int | None = None, seed: int = 0) -> Split:
    """The first `limit` usable rows of a split, in a shuffled order that task, split and seed fix.

    All runs of a study so share their rows. The order is that of a hash, and no generator's, so that it is the same
    under every version of Python. Rows of running text keep their order; where they are scored, `limit` counts windows.

    Args:
        source: a folder or file of local JSON rows; None: the rows that the task makes, else the Hub's.

    Raises:
        InputError: no data, no row that can be used, a column that is missing (what was looked for, what exists), or
            a value that no row of the task may hold; file and row are named.
    """
    check_settings(task)
    if limit is not None and limit < 1:
        raise InputError(f"task {task.key}: {limit} rows of {split} are asked for; at least one is needed")
    examples: list[tuple[str, int, Example]] = []
    found = 0
    names = []
    for part in task.parts or ("",):
        name, rows, own = _rows(task, split, source, part)
        if name in names:  # one file holds all sets
            break
        names.append(name)
        with answering(task, f"prepare, of {name},"):
            rows = list(task.prepare(rows))
        found += len(rows)
        for number, row in enumerate(rows):
            example = _example(task, row, f"{name}, row {number}")
            if example is not None:
                group = example.group or (part if own and len(task.parts) > 1 else "")
                examples.append((part, number, dataclasses.replace(example, group=group)))
    if not examples and task.scored != "own":
        raise InputError(f"task {task.key}: none of the {found} rows of {', '.join(names)} can be used")
    if task.scored != "text":
        examples.sort(key=lambda item: _place(task, split, seed, item[0], item[1]))
    windows = task.scored == "text" and split == "test"
    kept = examples if windows else examples[:limit]
    return Split(
        examples=[example for *_, example in kept],
        numbers=[number for _, number, _ in kept],
        source=_source(names),
        found=found,
        unusable=found - len(examples),
        limit=limit,
    )


def _source(names: Sequence[str]) -> str:
    """One name of what was read: of many sets' files of one name, that name and how many."""
    files = {name.rpartition("/")[2] for name in names}
    if len(names) > 1 and len(files) == 1 and not any(name.startswith("hub:") for name in names):
        return f"{files.pop()} of {len(names)} sets"
    return ", ".join(names)


def _place(task: Task, split: str, seed: int, part: str, number: int) -> bytes:
    return hashlib.sha256(f"{task.name} {split} {seed} {part} {number}".encode()).digest()


def _rows(task: Task, split: SplitName, source: str | None, part: str) -> tuple[str, Iterable[Mapping[str, Any]], bool]:
    """A name of the source, its rows, and whether they are those of the part alone."""
    if source is None:
        made = _made(task, split)
        if made is not None:
            return "code", made, False
        hub = task.hub_of(part)
        if hub is None:
            raise InputError(
                f"task {task.key} names no data set on the Hub: give a folder of JSON lines (`data: FOLDER`)"
            )
        return *from_hub(hub, split), True
    path, rows = local(source, split, part)
    own = bool(part) and path.parent.name == part
    return (f"{part}/{path.name}" if own and len(task.parts) > 1 else path.name), rows, own


def _made(task: Task, split: SplitName) -> list[Mapping[str, Any]] | None:
    """The rows that the task's code makes, twice the same."""
    with answering(task, f"make, of the {split} rows,"):
        first = task.make(split)
        if first is None:
            return None
        rows = list(itertools.islice(first, MOST + 1))
        if len(rows) > MOST:
            raise InputError(f"task {task.key} makes more than {MOST:,} {split} rows")
        again = list(itertools.islice(task.make(split) or (), MOST))
    if rows != again:
        raise InputError(
            f"task {task.key} makes other {split} rows each time: seed what it draws, or no run has its twin"
        )
    return rows


def _example(task: Task, row: Mapping[str, Any], where: str) -> Example | None:
    if not isinstance(row, Mapping):
        raise InputError(
            f"{where}: task {task.key} has {row!r:.60} ({type(row).__name__}) as a row; a mapping is asked for"
        )
    missing = [column for column in task.columns if column not in row]
    if missing:
        raise InputError(
            f"{where}: task {task.key} asks for a column {missing[0]!r}; {closest(missing[0], row)} "
            f"(asked for: {', '.join(task.columns)}; there are: {', '.join(row) or 'none'})"
        )
    try:
        with answering(task, f"example, of {where},"):
            example = task.example(dict(row))  # its own copy: what it changes there is its own matter
    except InputError as error:
        raise error if str(error).startswith(f"task {task.key}: ") else InputError(f"{where}: {error}") from None
    if example is None:
        return None
    example = check_example(task, example, where)
    _check(task, example, where)
    return example


def _check(task: Task, example: Example, where: str) -> None:
    """Refuse what cannot be scored: it would be a wrong number later."""
    try:
        "".join((example.prompt, example.target, *example.options)).encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} holds half of a surrogate pair, which is no text: UTF-8 cannot write it") from None
    if not example.target.strip() and task.scored != "text":
        raise InputError(f"{where}: the target is empty")
    if not example.prompt.strip() and task.scored != "text":
        raise InputError(f"{where}: the prompt is empty")
    if task.scored == "options" and len(example.options) < 2:
        raise InputError(f"{where}: {len(example.options)} options; at least two are asked for")
    if example.options:
        if example.gold is None or not 0 <= example.gold < len(example.options):
            raise InputError(f"{where}: gold is {example.gold}, and there are {len(example.options)} options")
        if example.options[example.gold] != example.target:
            raise InputError(f"{where}: the target {example.target!r} is not the gold option")
