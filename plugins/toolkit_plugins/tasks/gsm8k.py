"""GSM8K: word problems whose answer is a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Answered, Example, Hub, Task
from toolkit_plugins.tasks.alpaca import alpaca
from toolkit_plugins.tasks.rows import text

SIGN = r"(?:(?<![\w.])[-−]\$?|\$[-−]|\$)?"
NUMBER = SIGN + r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
"""Digits with thousands commas or without; a minus that stands behind a digit is no sign."""

MARKS = ("####", "answer is")
"""What the answer stands after: in GSM8K, and in MetaMathQA."""


def number(found: str) -> Decimal | None:
    """The answer in a text: the first number after its last mark, or else its last number.

    Signs of currency and per cent, thousands commas and a closing full stop do not belong to it: `1,234`, `$5.`,
    `5.00` and `#### 18` are 1234, 5, 5 and 18.
    """
    for mark in MARKS:
        _, marked, after = found.rpartition(mark)
        if marked and (numbers := re.findall(NUMBER, after)):
            return _decimal(numbers[0])
    numbers = re.findall(NUMBER, found)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(found: str) -> Decimal:
    return Decimal(re.sub(r"[$,\s]", "", found).replace("−", "-"))


class GSM8K(Task):
    """Grade-school mathematics: exact match of the final number, as a number (5.00 is 5).

    Training answers lose their calculator marks (<<48/2=24>>) and keep "#### 24"; the choice is ours. Alpaca template.
    """

    name = "gsm8k"
    scored = "generation"
    metric = "exact match"
    columns = ("question", "answer")
    hub = Hub("openai/gsm8k", "main")
    new_tokens = 320
    stop = ("### Instruction:",)

    def example(self, row: Mapping[str, Any]) -> Example:
        answer = re.sub(r"<<[^<>]*>>", "", text(row, "answer"))
        return _problem(text(row, "question"), answer)

    def judge(self, text: str, example: Example) -> Answered:
        found = number(text)
        if found is None:
            return Answered(None, 0.0)
        return Answered(format(found.normalize(), "f"), float(found == Decimal(example.references[0])))


def _problem(question: str, answer: str) -> Example:
    gold = number(answer)
    if gold is None:
        raise InputError(f"the answer ends in no number: {answer[-80:]!r}")
    return Example(alpaca(question), answer, references=(str(gold),))
