"""Questions with computable answers: a task that needs no data."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from toolkit.errors import InputError
from toolkit.interfaces import Example, Task
from toolkit_plugins.tasks.rows import label

ROWS = {"train": 4000, "test": 1000}
STEPS = (-10, -2, -1, 1, 2, 10)
"""What wrong options differ from the answer by."""


@dataclasses.dataclass
class Arithmetic(Task):
    """Which of four numbers is a sum or a difference; rows made by code, the same for everyone.

    Operands are drawn uniformly below `largest`; the three wrong options differ from the answer by 1, 2 or 10.
    No question of the test is in training. Rows are ordered by a hash, so that they are the same under every version
    of Python, whose own shuffle may change. The task and its rows are ours.
    """

    name = "arithmetic"
    scored = "options"
    columns = ("left", "operator", "right", "options", "gold")

    largest: int = 50

    def __post_init__(self) -> None:
        if not 4 <= self.largest <= 1000:
            raise InputError(f"option 'largest' of task {self.name!r}: {self.largest}; 4 to 1000 are allowed")

    def make(self, split: Literal["train", "test"]) -> Iterable[Mapping[str, Any]]:
        """At most 1,000 test questions, then at most 4,000 others for training."""
        every = [(a, op, b) for a in range(self.largest) for b in range(self.largest) for op in "+-"]
        every.sort(key=lambda question: self._place(*question))
        cut = min(ROWS["test"], len(every) // 4)
        for left, operator, right in every[:cut] if split == "test" else every[cut : cut + ROWS["train"]]:
            answer = left + right if operator == "+" else left - right
            steps = sorted(STEPS, key=lambda step: self._place(left, operator, right, "step", step))[:3]
            options = [answer, *(answer + step for step in steps)]
            options.sort(key=lambda option: self._place(left, operator, right, "option", option))
            yield {
                "left": left,
                "operator": operator,
                "right": right,
                "options": options,
                "gold": options.index(answer),
            }

    def _place(self, *parts: Any) -> bytes:
        return hashlib.sha256(" ".join(map(str, (self.name, self.largest, *parts))).encode()).digest()

    def example(self, row: Mapping[str, Any]) -> Example:
        """ "Question: what is 12 + 30?\\nAnswer:" → " 42"."""
        options = tuple(f" {option}" for option in row["options"])
        gold = label(row, "gold", *([place] for place in range(len(options))))
        prompt = f"Question: what is {row['left']} {row['operator']} {row['right']}?\nAnswer:"
        return Example(prompt=prompt, target=options[gold], options=options, gold=gold)
