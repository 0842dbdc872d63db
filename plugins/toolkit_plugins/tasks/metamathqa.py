"""MetaMathQA: problems that were made from GSM8K's and MATH's, for training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.interfaces import Answered, Example, Hub
from toolkit_plugins.tasks.alpaca import alpaca
from toolkit_plugins.tasks.gsm8k import GSM8K, NUMBER, number
from toolkit_plugins.tasks.rows import text

MARK = "answer is"


class MetaMathQA(GSM8K):
    """Worked problems for training; scored on GSM8K. Alpaca template.

    Source: Yu et al. (2023); the protocol of training on a subset and scoring GSM8K is PiSSA's (Meng et al., 2024).
    """

    name = "metamathqa"
    columns = ("query", "response")
    hub = Hub("meta-math/MetaMathQA", None, {"train": "train"})

    def example(self, row: Mapping[str, Any]) -> Example:
        """The answer is what follows "The answer is:"; of MATH's problems it may be a formula."""
        response = text(row, "response")
        return Example(alpaca(text(row, "query")), response, references=(_after(response),))

    def judge(self, text: str, example: Example) -> Answered:
        """As a number where the given answer is one, else letter by letter."""
        gold = example.references[0]
        if re.fullmatch(NUMBER, gold):
            return super().judge(text, replace(example, references=(str(number(gold)),)))
        found = _after(text) if MARK in text else None
        return Answered(found, float(found == gold))


def _after(response: str) -> str:
    return response.rpartition(MARK)[2].strip().removeprefix(":").strip().rstrip(".").strip("$")
