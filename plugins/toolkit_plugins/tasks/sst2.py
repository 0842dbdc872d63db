"""SST-2: is a sentence of a film review good or bad?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import label, text

OPTIONS = (" terrible", " great")


class SST2(Task):
    """Sentiment of a sentence: "It was terrible" or "It was great", whichever is likelier.

    Input and targets as in PACT, Table 8.
    """

    name = "sst2"
    columns = ("sentence", "label")
    hub = Hub("nyu-mll/glue", "sst2", {"train": "train", "test": "validation"})

    def example(self, row: Mapping[str, Any]) -> Example:
        """ "it 's a charming journey . It was" → " great"."""
        gold = label(row, "label", [0], [1])
        return Example(f"{text(row, 'sentence')} It was", OPTIONS[gold], OPTIONS, gold)
