"""The fixed list of batches: the task's training rows, encoded, length-grouped; the same for every arm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit.records.levers import Levers

if TYPE_CHECKING:
    from toolkit.runs.tasks.encoding import Encoded

SHARED = ("batch", "accumulation", "length", "group_by_length")
"""Levers that decide the list: no arm may have its own."""


@dataclasses.dataclass(frozen=True)
class Batches:
    """Micro-batches of examples, in order.

    Attributes:
        rows: the list; as many as fill whole optimizer steps.
        widest: of a whole epoch, the one that needs most memory.
    """

    rows: list[list[Encoded]]
    widest: list[Encoded]

    @property
    def real(self) -> int:
        """Tokens of one cycle, padding left out."""
        return sum(len(row.ids) for batch in self.rows for row in batch)

    @property
    def record(self) -> list[dict[str, int]]:
        """The list as numbers; see `toolkit.records.session.Session`."""
        return [_numbers(batch) for batch in self.rows]


def _numbers(batch: Sequence[Encoded]) -> dict[str, int]:
    from toolkit.runs.training.batches import padded

    return {
        "examples": len(batch),
        "real": sum(len(row.ids) for row in batch),
        "target": sum(sum(row.target[1:]) for row in batch),
        "computed": len(batch) * padded([len(row.ids) for row in batch]),
    }


def shared(levers: dict[str, Levers]) -> Levers:
    """Levers that stand for every arm's, as far as the list goes.

    Raises:
        InputError: two arms would need different lists; the lever and both arms are named.
    """
    (first, reference), *others = levers.items()
    for arm, found in others:
        for name in SHARED:
            if getattr(found, name) != getattr(reference, name):
                raise InputError(
                    f"timing: arm {arm!r} has lever {name} {getattr(found, name)!r} and arm {first!r} "
                    f"{getattr(reference, name)!r}, and every arm is timed on the same batches; name the arms that "
                    "agree under timing.arms"
                )
    return reference


def fixed(data: Sequence[Encoded], levers: Levers, count: int, seed: int) -> Batches:
    """The first `count` whole micro-batches of an epoch's order, rounded up to whole optimizer steps.

    The order is that of training's second epoch, since the first one begins with its widest batch. The paper times
    200 steps of running training; a fixed list, so that all arms do the same work, is our choice.

    Raises:
        InputError: too few examples; how many there are and are needed.
    """
    from toolkit.runs.training.batches import order, padded

    lengths = [len(row.ids) for row in data]
    count = math.ceil(count / levers.accumulation) * levers.accumulation
    if len(data) < count * levers.batch:
        raise InputError(
            f"timing asks for {count} batches of {levers.batch} examples, {count * levers.batch} in all, and the task "
            f"gives {len(data)} that can be used: lower timing.batches, or the levers batch and accumulation"
        )
    epoch = order(lengths, levers.batch, seed, 1, group=levers.group_by_length)
    whole = [rows for rows in epoch if len(rows) == levers.batch]
    widest = max(whole, key=lambda rows: padded([lengths[row] for row in rows]))
    return Batches([[data[row] for row in rows] for rows in whole[:count]], [data[row] for row in widest])
