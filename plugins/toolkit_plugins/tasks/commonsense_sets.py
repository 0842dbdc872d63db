"""The eight commonsense sets: where the Hub holds them, and their rows in LLM-Adapters' wording.

The templates reproduce LLM-Adapters' own files from the original rows byte for byte (PIQA, SIQA, WinoGrande, ARC,
OpenBookQA; BoolQ without its passage).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.interfaces import Hub
from toolkit_plugins.tasks.rows import choices, label, text

Rendered = tuple[str, str]
"""Instruction and answer."""


def _listed(word: str, options: Sequence[str], gold: int, joined: str = " ", before: str = "\n\n") -> Rendered:
    names = [f"{word}{number}" for number in range(1, len(options) + 1)]
    shown = joined.join(f"{name.capitalize()}: {option}" for name, option in zip(names, options, strict=True))
    return f"\n\n{shown}{before}Answer format: {'/'.join(names)}", names[gold]


def _boolq(row: Mapping[str, Any]) -> Rendered:
    gold = label(row, "answer", [True], [False])
    question = text(row, "question")
    return (
        f"Please answer the following question with true or false, question: {question}?\n\nAnswer format: true/false",
        ("true", "false")[gold],
    )


def _piqa(row: Mapping[str, Any]) -> Rendered:
    gold = label(row, "label", [0], [1])
    options, answer = _listed("solution", [row["sol1"], row["sol2"]], gold, joined="\n\n")
    return f"Please choose the correct solution to the question: {row['goal']}{options}", answer


def _social_i_qa(row: Mapping[str, Any]) -> Rendered:
    gold = label(row, "label", *"123")
    options, answer = _listed("answer", [row[f"answer{letter}"] for letter in "ABC"], gold)
    return f"Please choose the correct answer to the question: {row['context']} {row['question']}{options}", answer


def _hellaswag(row: Mapping[str, Any]) -> Rendered:
    gold = label(row, "label", *"0123")
    options, answer = _listed("ending", row["endings"], gold)
    begun = f"{row['activity_label']}: {row['ctx']}"
    return f"Please choose the correct ending to complete the given sentence: {begun}{options}", answer


def _winogrande(row: Mapping[str, Any]) -> Rendered:
    gold = label(row, "answer", *"12")
    options, answer = _listed("option", [row["option1"], row["option2"]], gold, before=" ")
    task = "Please choose the correct answer to fill in the blank to complete the given sentence: "
    return f"{task}{row['sentence']}{options}", answer


def _question(column: str) -> Callable[[Mapping[str, Any]], Rendered]:
    def render(row: Mapping[str, Any]) -> Rendered:
        texts, gold = choices(row)
        options, answer = _listed("answer", texts, gold)
        return f"Please choose the correct answer to the question: {text(row, column)}{options}", answer

    return render


def _validated(path: str, name: str | None = None) -> Hub:
    return Hub(path, name, {"train": "train", "test": "validation"})


SETS: Mapping[str, tuple[Hub, Callable[[Mapping[str, Any]], Rendered]]] = {
    "boolq": (_validated("google/boolq"), _boolq),
    "piqa": (_validated("baber/piqa"), _piqa),
    "social_i_qa": (_validated("lighteval/siqa"), _social_i_qa),
    "hellaswag": (_validated("Rowan/hellaswag"), _hellaswag),
    "winogrande": (_validated("allenai/winogrande", "winogrande_xl"), _winogrande),
    "ARC-Easy": (Hub("allenai/ai2_arc", "ARC-Easy"), _question("question")),
    "ARC-Challenge": (Hub("allenai/ai2_arc", "ARC-Challenge"), _question("question")),
    "openbookqa": (Hub("allenai/openbookqa", "main"), _question("question_stem")),
}
"""Set → its place on the Hub, and how its original rows are worded. Test labels that are hidden there: validation."""
