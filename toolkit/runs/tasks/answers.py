"""What a task answers, checked: a stranger's component may raise, or answer what no score can be made of.

Whatever is wrong with a task is wrong in every run, so that it ends a study at once, as bad input does.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from toolkit.errors import InputError, ToolkitError, closest
from toolkit.interfaces import Answered, Example, Scored, Task, Windows
from toolkit.runs.provenance import out_of_memory


@contextlib.contextmanager
def answering(task: Task, what: str) -> Iterator[None]:
    """Calls of a task's own code.

    Raises:
        InputError: it raised (a lack of memory is passed on).
    """
    try:
        yield
    except ToolkitError:
        raise
    except Exception as error:
        if not isinstance(error, NotImplementedError) and out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"task {task.key}: {what} failed: {type(error).__name__}: {reason}") from error


def check_settings(task: Task) -> None:
    """Refuse a task whose own settings cannot be used."""
    kinds = get_args(get_args(get_type_hints(Task)["scored"])[0])
    if task.scored not in kinds:
        raise InputError(f"task {task.key}: scored is {task.scored!r}; {closest(str(task.scored), kinds)}")
    if not _texts(task.columns):
        raise InputError(f"task {task.key}: columns is {task.columns!r}; a tuple of names is asked for")
    if task.scored != "generation":
        return
    if not isinstance(task.new_tokens, int) or task.new_tokens < 1:
        raise InputError(f"task {task.key}: new_tokens is {task.new_tokens!r}; at least one is asked for")
    if not _texts(task.stop) or "" in task.stop:
        raise InputError(f"task {task.key}: stop is {task.stop!r}; a tuple of texts, none of them empty, is asked for")


def check_example(task: Task, example: Any, where: str) -> Example:
    """The example, where it is one: texts, and a gold place that is a number."""
    if not isinstance(example, Example):
        raise InputError(f"{where}: task {task.key} made {_named(example)} of it; an Example, or None, is asked for")
    for key, right in (
        ("prompt", isinstance(example.prompt, str)),
        ("target", isinstance(example.target, str)),
        ("options", _texts(example.options)),
        ("gold", example.gold is None or (isinstance(example.gold, int) and not isinstance(example.gold, bool))),
        ("references", _texts(example.references)),
        ("group", isinstance(example.group, str)),
    ):
        if not right:
            raise InputError(f"{where}: task {task.key} gave {key} {_named(getattr(example, key))}, which is none")
    return example


def check_answered(task: Task, answered: Any, row: int) -> Answered:
    """The judgement, where it is one."""
    if not isinstance(answered, Answered):
        raise InputError(f"task {task.key}: judge gave {_named(answered)} for row {row}; an Answered is asked for")
    if not (answered.answer is None or isinstance(answered.answer, str)):
        raise InputError(
            f"task {task.key}: judge gave the answer {_named(answered.answer)} for row {row}; a text or None"
        )
    return Answered(answered.answer, _share(task, answered.score, row))


def check_metrics(task: Task, metrics: Any) -> dict[str, float]:
    """Further metrics by name."""
    if not isinstance(metrics, Mapping):
        raise InputError(f"task {task.key}: the metrics are {_named(metrics)}; names with numbers are asked for")
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, numbers.Real):
            raise InputError(f"task {task.key}: metric {name!r} is {_named(value)}; a name and a number are asked for")
    return {name: float(value) for name, value in metrics.items()}


def check_windows(task: Task, windows: Any) -> Windows:
    """How running text is cut."""
    if not isinstance(windows, Windows):
        raise InputError(f"task {task.key}: windows gave {_named(windows)}; a Windows is asked for")
    return windows


def check_scored(task: Task, found: Any) -> tuple[list[Scored], dict[str, float]]:
    """Rows and metrics of a task that scores itself."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Sequence)):
        raise InputError(f"task {task.key}: score gave {_named(found)}; rows and metrics are asked for")
    for number, row in enumerate(found[0]):
        if not isinstance(row, Scored):
            raise InputError(f"task {task.key}: score gave {_named(row)} as row {number}; a Scored is asked for")
        _share(task, row.score, number)
    return list(found[0]), check_metrics(task, found[1])


def _share(task: Task, score: Any, row: int) -> float:
    if not isinstance(score, numbers.Real) or not math.isfinite(score) or not 0 <= score <= 1:
        raise InputError(
            f"task {task.key}: the score of row {row} is {_named(score)}; a number from 0 to 1 is asked for"
        )
    return float(score)


def _texts(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(each, str) for each in value)


def _named(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"
