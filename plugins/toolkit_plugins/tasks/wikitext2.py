"""WikiText-2: perplexity of Wikipedia's text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Example, Hub, Task, Windows


@dataclasses.dataclass
class WikiText2(Task):
    """Perplexity of WikiText-2 (raw), in windows that are recorded with it.

    perplexity = exp(Σ nll / Σ tokens) over all scored tokens. Rows are the file's lines: joined, with the blank ones
    restored, they are the official `wiki.test.raw`. Others join them by blank lines, which gives another text and
    another number; the choice is ours.

    Options:
        window: tokens a window; 0 takes the study's length.
        stride: between windows' beginnings; 0 takes the window: none of them overlap.
        bos: whether each window begins with the beginning-of-text token.
    """

    name = "wikitext2"
    scored = "text"
    metric = "perplexity"
    columns = ("text",)
    hub = Hub("Salesforce/wikitext", "wikitext-2-raw-v1")

    window: int = 0
    stride: int = 0
    bos: bool = False

    def example(self, row: Mapping[str, Any]) -> Example:
        line = row["text"]
        if not isinstance(line, str):
            raise InputError(f"column 'text': found {line!r:.80}; a text is asked for")
        return Example("", line if line.endswith("\n") else line + ("\n" if line else " \n"))

    def windows(self, length: int) -> Windows:
        window = self.window or length
        return Windows(window, self.stride or window, self.bos)
