"""WinoGrande: which of two nouns fills a blank?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import label, text


class WinoGrande(Task):
    """The likelier of two ways to go on with a sentence at its blank: with either noun, and the rest.

    PACT's text gives no wording for this task; this one is ours. Noun and rest are scored together, given what stands
    before the blank. `commonsense(set=winogrande)` asks for "option1" or "option2" in words.
    """

    name = "winogrande"
    columns = ("sentence", "option1", "option2", "answer")
    hub = Hub("allenai/winogrande", "winogrande_xl", {"train": "train", "test": "validation"})

    def example(self, row: Mapping[str, Any]) -> Example:
        """ "Sentence: … more than Maria so" → " Maria always got the easier cases."."""
        gold = label(row, "answer", *"12")
        sentence = text(row, "sentence")
        before, blank, after = sentence.partition("_")
        if not blank or "_" in after:
            raise InputError(f"column 'sentence': found {sentence!r:.80}; exactly one blank (_) is asked for")
        gap = " " if before.endswith(" ") or not before else ""
        options = tuple(gap + text(row, f"option{number}") + after for number in (1, 2))
        return Example(f"Sentence: {before}".rstrip(" "), options[gold], options, gold)
