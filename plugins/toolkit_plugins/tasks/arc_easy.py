"""The easy set of ARC, questions of school science."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import choices, text


class ARCEasy(Task):
    """School science, the easy set: the likeliest of three to five answers.

    The target is the answer's text (PACT scores ARC by likelihood; its text gives no wording, this one is ours).
    """

    name = "arc-easy"
    columns = ("question", "choices")
    hub = Hub("allenai/ai2_arc", "ARC-Easy")

    def example(self, row: Mapping[str, Any]) -> Example:
        """ "Question: …\\nAnswer:" → " a bacterial population in the bloodstream"."""
        texts, gold = choices(row)
        options = tuple(f" {choice}" for choice in texts)
        return Example(f"Question: {text(row, 'question')}\nAnswer:", options[gold], options, gold)
