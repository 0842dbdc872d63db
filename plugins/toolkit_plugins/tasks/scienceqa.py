"""ScienceQA as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Example, Hub, Task
from toolkit_plugins.tasks.rows import choices, text

LETTERS = "ABCDE"


@dataclasses.dataclass
class ScienceQA(Task):
    """School questions with two to five options: the likeliest of their letters; rows that need an image are left out.

    `images=true` keeps those rows, with the image in the example; only a vision-language model's data flow can read
    them, and encoding for a text model refuses them. The words of the prompt are ours. Source: Lu et al. (2022).
    """

    name = "scienceqa"
    columns = ("question", "choices", "answer", "hint")
    hub = Hub("derek-thomas/ScienceQA")

    images: bool = False

    def example(self, row: Mapping[str, Any]) -> Example | None:
        """ "Question: …\\nContext: …\\nA. chiasmus\\nB. apostrophe\\nAnswer:" → " B"."""
        image = row.get("image")
        if (image is not None or row.get("has_image")) and not self.images:
            return None
        texts, gold = choices(row)
        if len(texts) > len(LETTERS):
            raise InputError(f"column 'choices': found {len(texts)}; at most {len(LETTERS)} are known")
        hint = str(row["hint"] or "").strip()
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, texts, strict=False))
        context = f"\nContext: {hint}" if hint else ""
        options = tuple(f" {letter}" for letter in LETTERS[: len(texts)])
        prompt = f"Question: {text(row, 'question')}{context}\n{listed}\nAnswer:"
        return Example(prompt, options[gold], options, gold, images=(image,) if image is not None else ())
