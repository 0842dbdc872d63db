"""BoolQ with its passage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import label, text

OPTIONS = (" Yes", " No")


class BoolQ(Task):
    """A question about a passage, Yes or No, whichever is likelier.

    Passage, then question (PACT, Table 8); the words are ours. `commonsense(set=boolq)` asks without the passage.
    """

    name = "boolq"
    columns = ("passage", "question", "label")
    hub = Hub("aps/super_glue", "boolq", {"train": "train", "test": "validation"})

    def example(self, row: Mapping[str, Any]) -> Example:
        gold = label(row, "label", [True, 1], [False, 0])
        question = text(row, "question").rstrip("?")
        return Example(f"{text(row, 'passage')}\nQuestion: {question}?\nAnswer:", OPTIONS[gold], OPTIONS, gold)
