"""WSC: whom does a pronoun mean?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import label, text

OPTIONS = (" Yes", " No")


class WSC(Task):
    """Whether a pronoun refers to a noun, Yes or No, whichever is likelier.

    Text, then a question about the pronoun's referent (PACT, Table 8); the words are ours. Of the 104 validation rows
    66 are No: always saying No scores .635.
    """

    name = "wsc"
    columns = ("text", "label")
    hub = Hub("aps/super_glue", "wsc.fixed", {"train": "train", "test": "validation"})

    def example(self, row: Mapping[str, Any]) -> Example:
        """Spans lie in the row (the Hub), or under `target` (SuperGLUE's files)."""
        gold = label(row, "label", [True, 1], [False, 0])
        spans = row.get("target", row)
        if not isinstance(spans, Mapping):
            raise InputError(f"column 'target': found {spans!r:.80}; span1_text and span2_text are asked for")
        question = f'does the pronoun "{text(spans, "span2_text")}" refer to "{text(spans, "span1_text")}"?'
        prompt = f"{text(row, 'text')}\nQuestion: In the text above, {question}\nAnswer:"
        return Example(prompt, OPTIONS[gold], OPTIONS, gold)
