"""WiC: does a word mean the same in two sentences?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import label, text

OPTIONS = (" Yes", " No")


class WiC(Task):
    """Whether a word has one meaning in two sentences, Yes or No, whichever is likelier.

    Word, two sentences, and a question about shared meaning (PACT, Table 8); the words are ours.
    """

    name = "wic"
    columns = ("word", "sentence1", "sentence2", "label")
    hub = Hub("aps/super_glue", "wic", {"train": "train", "test": "validation"})

    def example(self, row: Mapping[str, Any]) -> Example:
        gold = label(row, "label", [True, 1], [False, 0])
        prompt = (
            f"Word: {text(row, 'word')}\nSentence 1: {text(row, 'sentence1')}\nSentence 2: {text(row, 'sentence2')}\n"
            "Question: Does the word have the same meaning in both sentences?\nAnswer:"
        )
        return Example(prompt, OPTIONS[gold], OPTIONS, gold)
