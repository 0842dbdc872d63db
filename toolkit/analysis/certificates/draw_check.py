"""Which draws of a certificate are altered, missing or additional, and whether its laws are what the profile gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from toolkit.analysis.certificates.regeneration import Regeneration
from toolkit.analysis.reading.evidence import mismatch
from toolkit.records.certificate import CertifiedDraws, tied
from toolkit.records.selection import Selection
from toolkit.records.study import Control
from toolkit.registry import registry
from toolkit.selection import laws
from toolkit.selection.studies import together

SEARCHES = 200
"""Draws out of place that are looked for among all others; past that, the control as a whole is another."""


def draw_complaints(item: CertifiedDraws, expected: Sequence[str], where: str) -> Iterator[str]:
    """What is wrong with the draws of one control, draw by draw.

    A draw's hash ties its layers to its outcomes, so that draw i of the law fits place j of the certificate where the
    hash there is that of i's layers and j's outcomes. Places that no draw fits are altered draws, where the draw
    that belongs between their neighbours is missing, and else additional ones.

    Args:
        expected: `layers_hash` of each draw that the law gives.
    """
    lengths = {text: len(values) for text, values in item.outcomes.items()}
    count, hashes = min([len(item.hashes), *lengths.values()]), item.hashes
    outcomes = [{text: values[at] for text, values in item.outcomes.items()} for at in range(count)]
    if any(length != len(hashes) for length in lengths.values()):
        fits = (at for at in range(min(count, len(expected))) if tied(expected[at], outcomes[at]) != hashes[at])
        first = next(fits, count)
        said = ", ".join(f"{length} outcomes on {text}" for text, length in lengths.items())
        yield f"draw {first} of {where} lacks its hash or an outcome, or has one too many: {len(hashes)} hashes, {said}"
        return
    places = _places(expected, outcomes, hashes)
    if places is None:
        yield (
            f"the {count} draws of {where} are not those that its law gives from this profile and seed, none or hardly "
            "any of them: another law, seed, profile or version of the law drew them"
        )
        return
    missing = [i for i in range(len(expected)) if i not in set(places)]
    for place, draw in enumerate(places):
        if draw is None:
            before = next((d for d in reversed(places[:place]) if d is not None), -1)
            after = next((d for d in places[place + 1 :] if d is not None), len(expected))
            own = next((i for i in missing if before < i < after), None)
            if own is None:
                yield f"{where} has an additional draw, at place {place}, which its law does not give"
            else:
                missing.remove(own)
                yield (
                    f"draw {own} of {where} was altered: its hash {hashes[place]} is not that of the law's draw with "
                    "these outcomes"
                )
        elif draw in places[:place]:
            yield f"{where} has an additional draw: draw {draw} stands again at place {place}"
    for draw in missing:
        yield f"draw {draw} of {where} is missing"
    kept = [draw for draw in places if draw is not None]
    for one, other in itertools.pairwise(kept):
        if other < one:
            yield f"draw {other} of {where} stands after draw {one}: the draws were put in another order"
            return


def _places(
    expected: Sequence[str], outcomes: Sequence[dict[str, float]], hashes: Sequence[str]
) -> list[int | None] | None:
    """For each place of the certificate the draw that fits it; None instead of the list where most are others."""
    places: list[int | None] = []
    shift, searches = 0, 0
    used: set[int] = set()
    for place, (scores, found) in enumerate(zip(outcomes, hashes, strict=True)):
        near = place + shift
        draw = near if 0 <= near < len(expected) and tied(expected[near], scores) == found else None
        if draw is None:
            searches += 1
            if searches > SEARCHES:
                return None
            fitting = [i for i, layers in enumerate(expected) if tied(layers, scores) == found]
            draw = next((i for i in fitting if i not in used), fitting[0] if fitting else None)
            if draw is not None:
                shift = draw - place
        if draw is not None:
            used.add(draw)
        places.append(draw)
    return places if used or len(hashes) < 2 else None


def law_complaints(
    item: CertifiedDraws,
    expected: Sequence[Selection],
    like: Selection,
    declared: Control,
    made: Regeneration,
    where: str,
) -> Iterator[str]:
    """What of a control's law, counts and mismatch is not what the profile gives."""
    first = expected[0]
    law, family = item.law, together(declared)
    roles = None if law.expected is None or first.inclusion is None else laws.expected(first.inclusion, made.profile)
    own = laws.declared(registry.make("selector", declared.selector))
    mean, largest = mismatch(np.array([s.parameters for s in expected], dtype=np.int64), like.parameters)
    facts = [
        ("selector", law.selector, first.selector),
        ("options", law.options, first.options),
        ("like", law.like, item.arm),
        ("feasible subsets", law.feasible_subsets, first.feasible_subsets),
        ("inclusion", law.inclusion, first.inclusion),
        ("inclusion draws", law.inclusion_draws, first.inclusion_draws),
        ("expected count per role", law.expected, roles),
        ("single total", law.single_total, first.single_total),
        ("chain", law.chain, family),
        *((key, getattr(law, key), given) for key, given in own.items()),
        ("family", item.family, list(made.budgets) if family else None),
        ("mismatch", item.mismatch, {"mean": mean, "largest": largest}),
    ]
    for key, found, given in facts:
        if not _same(found, given):
            yield f"{where} was altered: its {key} is {found!s:.80}, and the law gives {given!s:.80}"


def _same(found: object, given: object) -> bool:
    """Equal; floats to within 1e-12, relative, or 1e-15."""
    if isinstance(found, dict) and isinstance(given, dict):
        return found.keys() == given.keys() and all(_same(found[key], given[key]) for key in found)
    if isinstance(found, list) and isinstance(given, list):
        return len(found) == len(given) and all(map(_same, found, given))
    if isinstance(found, float) and isinstance(given, float):
        return math.isclose(found, given, rel_tol=1e-12, abs_tol=1e-15)
    return found == given
