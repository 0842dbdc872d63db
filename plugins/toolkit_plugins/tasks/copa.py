"""COPA: what was the cause, or what happened as a result?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import label, text

CONNECTIVES = (" because", " so")


class COPA(Task):
    """The likelier of two continuations of "premise because" or "premise so".

    Premise and connective, then the candidate (PACT, Table 8). The candidate's first letter becomes small unless its
    first word is "I"; the choice is ours.
    """

    name = "copa"
    columns = ("premise", "choice1", "choice2", "question", "label")
    hub = Hub("aps/super_glue", "copa", {"train": "train", "test": "validation"})

    def example(self, row: Mapping[str, Any]) -> Example:
        """ "The man turned on the faucet so" → " water flowed from the spout."."""
        gold = label(row, "label", [0], [1])
        connective = CONNECTIVES[label(row, "question", ["cause"], ["effect"])]
        options = tuple(" " + _inside(text(row, f"choice{number}")) for number in (1, 2))
        return Example(text(row, "premise").rstrip(".") + connective, options[gold], options, gold)


def _inside(sentence: str) -> str:
    """A sentence as it stands inside another one."""
    first = sentence.split()[0]
    return sentence if first == "I" or first.startswith("I'") else sentence[0].lower() + sentence[1:]
