"""SQuAD: the answer to a question, out of a passage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Answered, Example, Hub, Task
from toolkit_plugins.tasks.rows import text


class SQuAD(Task):
    """Reading comprehension: a generated answer's F1 with the nearest of the given ones, by torchmetrics.

    The answer ends at a line break. The words of the prompt are ours. Exact match is given beside it.
    """

    name = "squad"
    scored = "generation"
    metric = "F1"
    columns = ("context", "question", "answers")
    hub = Hub("rajpurkar/squad", None, {"train": "train", "test": "validation"})
    new_tokens = 48
    stop = ("\n",)

    def example(self, row: Mapping[str, Any]) -> Example | None:
        """ "Context: …\\nQuestion: …\\nAnswer:" → " 23 years"; a question without an answer cannot be used."""
        answers = row["answers"]
        found = answers.get("text") if isinstance(answers, Mapping) else None
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise InputError(f"column 'answers': found {answers!r:.80}; a key 'text' with a list is asked for")
        references = tuple(answer.strip() for answer in found if answer.strip())
        if not references:
            return None
        prompt = f"Context: {text(row, 'context')}\nQuestion: {text(row, 'question')}\nAnswer:"
        return Example(prompt, f" {references[0]}", references=references)

    def judge(self, text: str, example: Example) -> Answered:
        return _squad(text, example)[0]

    def metrics(self, answers: Sequence[Answered], examples: Sequence[Example]) -> dict[str, float]:
        """Exact match, in [0, 1]."""
        exact = [_squad(a.answer or "", e)[1] for a, e in zip(answers, examples, strict=True)]
        return {"exact match": sum(exact) / len(exact)}


def _squad(found: str, example: Example) -> tuple[Answered, float]:
    """A text as an answer with its F1, and its exact match."""
    from torchmetrics.functional.text import squad

    found = found.strip()
    if not found:
        return Answered(None, 0.0), 0.0
    given = {"text": list(example.references), "answer_start": [0] * len(example.references)}
    scores = squad([{"prediction_text": found, "id": "0"}], [{"answers": given, "id": "0"}])
    return Answered(found, scores["f1"].item() / 100), scores["exact_match"].item() / 100
