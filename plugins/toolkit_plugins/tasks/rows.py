"""What tasks read from their rows: a text, a label, the choices of a question. Errors say what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import InputError


def text(row: Mapping[str, Any], column: str) -> str:
    """A column that must hold text, without the spaces around it."""
    found = row.get(column)
    if not isinstance(found, str) or not found.strip():
        raise InputError(f"column {column!r}: found {found!r:.80}; a text is asked for")
    return found.strip()


def label(row: Mapping[str, Any], column: str, *classes: Sequence[Any]) -> int:
    """The class of a label: the place of the first class among whose spellings it is; 1 and true are told apart.

    Raises:
        InputError: another label, such as the −1 of a test set whose labels are hidden.
    """
    found = row.get(column)
    for place, spellings in enumerate(classes):
        if any(type(spelling) is type(found) and spelling == found for spelling in spellings):
            return place
    hidden = "; −1 marks a row whose label is hidden: score the validation split" if found in (-1, "-1", "") else ""
    allowed = ", ".join(repr(spelling) for spellings in classes for spelling in spellings)
    raise InputError(f"column {column!r}: found label {found!r}; allowed: {allowed}{hidden}")


def choices(row: Mapping[str, Any]) -> tuple[list[str], int]:
    """The choices of a question and the right one's place.

    Either `choices: {text, label}` and `answerKey` (the Hub's ARC and OpenBookQA), or `choices` as a list and `label`
    or `answer` as the place from 0.
    """
    found = row.get("choices")
    if isinstance(found, Mapping):
        texts, names = list(found.get("text", ())), list(found.get("label", ()))
        key = row.get("answerKey")
        if key not in names:
            raise InputError(f"column 'answerKey': found {key!r}; the choices are called {', '.join(names)}")
        gold = names.index(key)
    elif isinstance(found, Sequence) and not isinstance(found, str):
        texts = list(found)
        column = "label" if "label" in row else "answer"
        gold = row.get(column)
        if type(gold) is not int or not 0 <= gold < len(texts):
            raise InputError(f"column {column!r}: found {gold!r}; a place from 0 to {len(texts) - 1} is asked for")
    else:
        raise InputError(f"column 'choices': found {found!r:.80}; a list, or text and label, is asked for")
    if len(texts) < 2 or not all(isinstance(choice, str) and choice.strip() for choice in texts):
        raise InputError(f"column 'choices': found {texts!r:.80}; at least two texts are asked for")
    return [choice.strip() for choice in texts], gold
