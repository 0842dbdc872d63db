"""Questions with computable answers: a task that needs no data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any, Literal

from toolkit.interfaces import Example, Task

ROWS = {"train": 4000, "test": 1000}


@dataclasses.dataclass
class Arithmetic(Task):
    """Which of four numbers is a sum or a difference; rows made by code, the same for everyone.

    Operands are drawn uniformly below `largest`; the three wrong options differ from the answer by 1, 2 or 10.
    No question of the test is in training. The task and its rows are ours.
    """

    name = "arithmetic"
    scored = "options"
    columns = ("left", "operator", "right", "options", "gold")

    largest: int = 50

    def make(self, split: Literal["train", "test"]) -> Iterable[Mapping[str, Any]]:
        """The rows, by Python's Mersenne Twister with a fixed seed."""
        rng = Random(f"arithmetic {self.largest}")
        every = [(a, op, b) for a in range(self.largest) for b in range(self.largest) for op in "+-"]
        rng.shuffle(every)
        cut = min(ROWS["test"], len(every) // 4)
        chosen = every[:cut] if split == "test" else every[cut : cut + ROWS["train"]]
        for left, operator, right in chosen:
            answer = left + right if operator == "+" else left - right
            near = rng.sample([-10, -2, -1, 1, 2, 10], 3)
            options = [answer, *(answer + step for step in near)]
            rng.shuffle(options)
            yield {
                "left": left,
                "operator": operator,
                "right": right,
                "options": options,
                "gold": options.index(answer),
            }

    def example(self, row: Mapping[str, Any]) -> Example:
        """ "12 + 30 =" → " 42"."""
        options = tuple(f" {option}" for option in row["options"])
        prompt = f"Question: what is {row['left']} {row['operator']} {row['right']}?\nAnswer:"
        return Example(prompt=prompt, target=options[row["gold"]], options=options, gold=row["gold"])
