"""Commonsense-170K: eight sets of multiple-choice questions, answered in words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from toolkit.errors import InputError, closest
from toolkit.interfaces import Answered, Example, Hub, Task
from toolkit_plugins.tasks.alpaca import alpaca
from toolkit_plugins.tasks.commonsense_sets import SETS
from toolkit_plugins.tasks.rows import text

SENTENCE = "the correct answer is "

RULES = {
    "true": r"true|false",
    "solution": r"solution1|solution2",
    "answer": r"answer1|answer2|answer3|answer4|answer5",
    "ending": r"ending1|ending2|ending3|ending4",
    "option": r"option1|option2",
}
"""What the first match is looked for, by the beginning of an allowed answer (LLM-Adapters, commonsense_evaluate)."""


@dataclasses.dataclass
class Commonsense(Task):
    """Commonsense questions with LLM-Adapters' schema: the first allowed word in the greedy answer counts.

    Rows are {instruction, input, output, answer}, or the original sets' rows, which are put into the same words.
    `set=all` trains on the union of the eight sets and scores each of them; local rows then lie in one subfolder a
    set, or in one file. Source: Hu et al. (2023) and its repository LLM-Adapters; AQLoRA §4.

    Differences from LLM-Adapters' code, on purpose:

    - Its training prompt indents every line by 16 spaces and holds the words "# noqa: E501"; its evaluation prompt
      ends in 16 spaces and differs from the training prompt in both. Ours is one prompt for both: Alpaca's.
    - Its loss covers prompt and answer unless told otherwise; ours covers the answer alone, as the paper's does.
    - Its evaluation pads without an attention mask, and searches with 4 beams; ours masks, and is greedy, as the
      paper's is. 32 new tokens are its number.
    - It cuts long examples at their end, and so loses answers; ours cuts the prompt's beginning.
    - BoolQ has no passage, as there: the question is answered from memory. The task `boolq` gives the passage.
    - Chance, and whether an answer could be parsed, are recorded; an answer that cannot be parsed is wrong, as there.
    """

    name = "commonsense"
    scored = "generation"
    new_tokens = 32

    set: str = "all"

    def __post_init__(self) -> None:
        if self.set != "all" and self.set not in SETS:
            raise InputError(f"option 'set' of task {self.name!r}: {self.set!r}; {closest(self.set, ['all', *SETS])}")

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(SETS) if self.set == "all" else (self.set,)

    def hub_of(self, part: str) -> Hub:
        return SETS[part][0]

    def example(self, row: Mapping[str, Any]) -> Example:
        """ "… Answer format: true/false" → "the correct answer is true"."""
        instruction, context, answer = self._worded(row)
        asked = instruction.rpartition("Answer format:")[2].strip().split("/")
        if answer not in asked or not any(answer.startswith(word) for word in (*RULES, "false")):
            raise InputError(f"column 'answer': found {answer!r}; the instruction allows {', '.join(asked)}")
        options = tuple(SENTENCE + word for word in asked)
        return Example(
            prompt=alpaca(instruction, context),
            target=SENTENCE + answer,
            options=options,
            gold=asked.index(answer),
            references=(answer,),
        )

    def _worded(self, row: Mapping[str, Any]) -> tuple[str, str, str]:
        """Instruction, input and answer of a row of either schema."""
        if "instruction" in row:
            missing = [column for column in ("input", "output", "answer") if column not in row]
            if missing:
                raise InputError(f"no column {missing[0]!r}; there are: {', '.join(row)}")
            answer = text(row, "answer")
            if row["output"] != SENTENCE + answer:
                raise InputError(f"column 'output': found {row['output']!r:.80}; {SENTENCE + answer!r} is asked for")
            return text(row, "instruction"), str(row["input"] or ""), answer
        found = [name for name in self.parts if _original(name) <= row.keys()]
        if not found:
            raise InputError(
                "no column 'instruction' (LLM-Adapters: instruction, input, output, answer), and no row of "
                f"{' or '.join(self.parts)} as on the Hub; there are: {', '.join(row)}"
            )
        instruction, answer = SETS[found[0]][1](row)
        return instruction, "", answer

    def judge(self, text: str, example: Example) -> Answered:
        """The first of the set's answer words in the text."""
        gold = example.references[0]
        rule = next(rule for rule in RULES.values() if re.fullmatch(rule, gold))
        found = re.search(rule, text)
        return Answered(found[0] if found else None, float(bool(found) and found[0] == gold))


COLUMNS = {
    "boolq": {"question", "answer", "passage"},
    "piqa": {"goal", "sol1", "sol2", "label"},
    "social_i_qa": {"context", "question", "answerA", "answerB", "answerC", "label"},
    "hellaswag": {"activity_label", "ctx", "endings", "label"},
    "winogrande": {"sentence", "option1", "option2", "answer"},
    "openbookqa": {"question_stem", "choices", "answerKey"},
}


def _original(name: str) -> set[str]:
    """The columns of a set's own rows."""
    return COLUMNS.get(name, {"question", "choices"})
