"""A set's scores from its rows: loss, mean score, chance, and what makes a score doubtful."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from toolkit.interfaces import Example
from toolkit.records.trained import ROW, Flag, Scores

UNPARSED = 0.05
"""The share of answers that could not be parsed above which a run is flagged."""

AT = {name: place for place, name in enumerate(ROW)}


def chance(examples: Sequence[Example]) -> float | None:
    """The larger of uniform guessing and always guessing the majority class, over the scored rows.

        chance = max(mean_r 1/k_r, max_c #{r : class of the gold option = c}/n)

    with k_r options in row r. The class is the option's text where all rows have the same options, else its place.
    None where a row has no options.
    """
    if not examples or any(not example.options for example in examples):
        return None
    uniform = math.fsum(1 / len(example.options) for example in examples) / len(examples)
    fixed = len({frozenset(example.options) for example in examples}) == 1
    classes = Counter(example.options[example.gold or 0] if fixed else example.gold for example in examples)
    return max(uniform, max(classes.values()) / len(examples))


def constant(predictions: Sequence[Any]) -> bool:
    """Whether several rows all got the same prediction."""
    return len(predictions) > 1 and len(set(predictions)) == 1


def summarise(
    rows: Sequence[Sequence[Any]], examples: Sequence[Example], metric: str, further: dict[str, float]
) -> Scores:
    """The scores of a set, from its rows (see `toolkit.records.trained.ROW`) and their examples."""
    tokens = sum(row[AT["tokens"]] for row in rows)
    known = [row[AT["nll"]] for row in rows if row[AT["nll"]] is not None]
    scored = [row[AT["score"]] for row in rows if row[AT["score"]] is not None]
    predictions = [row[AT["prediction"]] for row in rows]
    fixed = len({frozenset(example.options) for example in examples}) == 1
    named = [
        example.options[p] if fixed and isinstance(p, int) else p
        for p, example in zip(predictions, examples, strict=False)
    ] or predictions
    return Scores(
        rows=len(rows),
        loss=math.fsum(known) / tokens if tokens else math.nan,
        metric=metric,
        score=math.fsum(scored) / len(scored) if scored else None,
        chance=chance(examples),
        constant=any(p is not None for p in named) and constant(named),
        unparsed=sum(not row[AT["parsed"]] for row in rows) / len(rows) if rows else 0.0,
        further=further,
    )


def flags(scores: dict[str, Scores], *, cut: int, shortened: int, halved: int) -> list[Flag]:
    """What makes scores doubtful, in sentences."""
    found = []

    def add(check: str, reason: str) -> None:
        found.append(Flag(check=check, severity="flag", reason=reason))

    for group, score in scores.items():
        where = f" on {group}" if group else ""
        if score.score is not None and score.chance is not None and score.score <= score.chance + 1e-12:
            add("chance", f"{score.metric} {score.score:.4f}{where} is not above chance ({score.chance:.4f})")
        if score.constant:
            add("constant", f"all {score.rows} rows{where} got the same prediction")
        if score.unparsed > UNPARSED:
            add("unparsed", f"{score.unparsed:.1%} of the answers{where} could not be parsed, and count as wrong")
    if cut:
        add("dropped", f"{cut} scored rows were left out: the whole target does not fit into the length")
    if shortened:
        add("shortened", f"the prompts of {shortened} scored rows lost their beginning, to fit into the length")
    if halved:
        add("memory", f"the evaluation's batch was cut in two {halved} times: the device's memory did not hold it")
    return found
