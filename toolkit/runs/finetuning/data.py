"""The rows of a study's tasks: what is trained on, what is scored, and what is held out for the tuned lever."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Task
from toolkit.records.finetuning import FineTuning, Use
from toolkit.records.trained import Data, Flag
from toolkit.runs.finetuning.plans import task_of
from toolkit.runs.tasks import Encoded, Split, encode, read


@dataclasses.dataclass(frozen=True)
class Rows:
    """One task's rows.

    Attributes:
        task: what is scored, and how; `taught`: what is trained on, usually the same.
        train, test: the rows that are trained on and scored.
        tune: held out of the training rows for the choice of the tuned lever; None where nothing is tuned.
        shared: scored rows that stand, prompt and target, among the training rows as well.
    """

    task: Task
    taught: Task
    train: Split
    test: Split
    tune: Split | None = None
    shared: int = 0

    @property
    def splits(self) -> dict[str, Split]:
        """Those that there are, by name."""
        found = {"train": self.train, "test": self.test, "tune": self.tune}
        return {name: split for name, split in found.items() if split is not None}


def hashes(rows: Mapping[str, Rows]) -> dict[str, str]:
    """SHA-256 of every split of every task, as a lock names them."""
    return {f"{task} {name}": split.sha256 for task, of in rows.items() for name, split in of.splits.items()}


def read_rows(study: FineTuning, name: str) -> Rows:
    """The rows of one task of a study; with a `tune` block, some are held out for it.

    Raises:
        InputError: as `read_use`.
    """
    return read_use(study.tasks[name], name, held=0 if study.tune is None else study.tune.rows)


def read_use(use: Use, name: str, *, held: int = 0) -> Rows:
    """The rows of one task.

    The last `held` of the rows read for training are held out for the tuned lever and trained on by no run, so that
    trials and runs train on the same rows. The scored rows take no part in the choice.

    Raises:
        InputError: no data (what was looked for, what exists), no usable rows, or no rows left to train on.
    """
    limit = None if use.train_rows is None else use.train_rows + held
    try:
        task = task_of(use.task)
        test = read(task, "test", source=use.data, limit=use.rows)
        taught = task if use.train is None else task_of(use.train)
        source = use.data if use.train is None else use.train_data
        train = read(taught, "train", source=source, limit=limit)
    except InputError as error:
        raise InputError(f"task {name!r}: {error}") from None
    tune = None
    if held:
        count = len(train.examples) - held
        if count < 1:
            raise InputError(
                f"task {name!r}: tune.rows holds out {held} of {len(train.examples)} training rows, and leaves none to "
                "train on"
            )
        train, tune = train.part(0, count), train.part(count)
    trained_on = {(example.prompt, example.target) for example in train.examples}
    shared = sum((example.prompt, example.target) in trained_on for example in test.examples)
    return Rows(task, taught, train, test, tune, shared)


def encoded(tokenizer: Any, split: Split, length: int) -> tuple[list[Encoded], int]:
    """A split's examples as tokens, and how many were left out because their targets do not fit.

    Raises:
        InputError: none fits.
    """
    found = [encode(tokenizer, example, length) for example in split.examples]
    kept = [one for one in found if one is not None]
    if not kept:
        raise InputError(
            f"none of {len(found)} training rows has a target that fits into a length of {length} tokens; give a "
            "larger length"
        )
    return kept, len(found) - len(kept)


def doubts(train: Data) -> list[Flag]:
    """What a reader must know of the rows that were trained on."""
    found = []
    if train.cut:
        reason = f"{train.cut} training rows were left out: the whole target does not fit into the length"
        found.append(Flag(check="dropped", severity="flag", reason=reason))
    if train.shortened:
        reason = f"the prompts of {train.shortened} training rows lost their beginning, to fit into the length"
        found.append(Flag(check="shortened", severity="flag", reason=reason))
    return found


def record(split: Split, cut: int = 0, rows: int | None = None, *, shortened: int = 0) -> Data:
    """What a report says of a split."""
    return Data(
        source=split.source,
        sha256=split.sha256,
        found=split.found,
        rows=len(split.examples) - cut if rows is None else rows,
        unusable=split.unusable,
        cut=cut,
        shortened=shortened,
    )
