"""Whether what is stated is what is computed: nested plain data compared value by value, and each difference told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

TOLERANCE = 1e-12
"""Difference, relative or absolute, that a recomputed float may have: another numpy may sum in another order."""
PROSE = {"sentence", "sentences", "reason", "notes"}
"""Keys of the verdicts that hold sentences, which another version of the toolkit may word otherwise."""


class Agreement:
    """Compares nested data: numbers to within `TOLERANCE`, everything else exactly.

    Attributes:
        count: numbers compared; `rounded`, those of them that are not equal to the last bit.
        reworded: sentences that differ, where `prose` allows it.
    """

    def __init__(self, *, prose: bool = False) -> None:
        self.prose = prose
        self.count = self.rounded = self.reworded = 0

    def differences(self, found: Any, expected: Any, at: str) -> Iterator[str]:
        """Where two nested values differ, in words."""
        if isinstance(found, dict) and isinstance(expected, dict):
            for key in [*expected, *(key for key in found if key not in expected)]:
                if (key in found) != (key in expected):
                    yield f"{at}.{key} {'is missing' if key in expected else 'is additional'}"
                elif self.prose and key in PROSE:
                    self.reworded += found[key] != expected[key]
                else:
                    yield from self.differences(found[key], expected[key], f"{at}.{key}")
        elif isinstance(found, list | tuple) and isinstance(expected, list | tuple):
            if len(found) != len(expected):
                yield f"{at} has {len(found)} items, and {len(expected)} are computed"
                return
            for number, (a, b) in enumerate(zip(found, expected, strict=True)):
                yield from self.differences(a, b, f"{at}.{number}{about(b)}")
        elif type(found) in (int, float) and type(expected) in (int, float):
            self.count += 1
            if found == expected:
                return
            if float in (type(found), type(expected)) and _close(found, expected):
                self.rounded += 1
            else:
                yield f"{at} was altered: {found!r} is stated, and {expected!r} is computed"
        elif found != expected or type(found) is not type(expected):
            yield f"{at} was altered: {short(found)} is stated, and {short(expected)} is computed"


def _close(one: float, other: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond every float
        return False


def about(item: Any) -> str:
    """Which arm, control, budget and text an item is about."""
    keys = ("arm", "budget", "control", "text")
    said = [str(item[key]) for key in keys if item.get(key) is not None] if isinstance(item, dict) else []
    return f" ({', '.join(said)})" if said else ""


def short(value: Any) -> str:
    """A value for a message: a hash by its first digits, a long text by its beginning."""
    text = str(value)
    return text[:12] if len(text) == 64 else text if len(text) < 120 else f"{text[:100]} …"
