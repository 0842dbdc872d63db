"""SAMSum: a summary of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.interfaces import Answered, Example, Hub, Task
from toolkit_plugins.tasks.rows import text


class SAMSum(Task):
    """Dialogue summaries: ROUGE-L (F-measure, no stemming) of a generated summary, by torchmetrics.

    A summary ends at a line break. The words of the prompt are ours.
    """

    name = "samsum"
    scored = "generation"
    metric = "ROUGE-L"
    columns = ("dialogue", "summary")
    hub = Hub("knkarthick/samsum")
    new_tokens = 96
    stop = ("\n",)

    def example(self, row: Mapping[str, Any]) -> Example | None:
        """ "Dialogue:\\n…\\nSummary:" → " Amanda baked cookies."; one row of the set has no dialogue."""
        if not str(row["dialogue"] or "").strip():
            return None
        dialogue = "\n".join(line.strip() for line in text(row, "dialogue").splitlines())
        summary = " ".join(text(row, "summary").split())
        return Example(f"Dialogue:\n{dialogue}\nSummary:", f" {summary}", references=(summary,))

    def judge(self, text: str, example: Example) -> Answered:
        from torchmetrics.functional.text import rouge_score

        found = text.strip()
        if not found:
            return Answered(None, 0.0)
        scores = rouge_score(found, example.references[0], rouge_keys="rougeL")
        return Answered(found, scores["rougeL_fmeasure"].item())
