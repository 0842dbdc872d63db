"""RTE: does a text entail a sentence?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import label, text

OPTIONS = (" Yes", " No")


class RTE(Task):
    """Textual entailment, Yes or No, whichever is likelier.

    Premise, then a question whether the hypothesis is true (PACT, Table 8); the words are ours.
    """

    name = "rte"
    columns = ("premise", "hypothesis", "label")
    hub = Hub("aps/super_glue", "rte", {"train": "train", "test": "validation"})

    def example(self, row: Mapping[str, Any]) -> Example:
        """On the Hub 0 is entailment; in SuperGLUE's files labels are words."""
        gold = label(row, "label", ["entailment", 0], ["not_entailment", 1])
        question = f'Question: Does this mean that "{text(row, "hypothesis")}" is true?'
        return Example(f"{text(row, 'premise')}\n{question}\nAnswer:", OPTIONS[gold], OPTIONS, gold)
