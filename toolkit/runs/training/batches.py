"""The order of the examples: which rows stand in which micro-batch of which step, and what a batch holds.

It is a pure function of the examples' lengths, the levers and the data seed. Models, arms and devices play no part,
so all arms of a study see the same batches in the same order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError

if TYPE_CHECKING:
    from toolkit.records.levers import Levers
    from toolkit.runs.tasks.encoding import Encoded

GROUP = 50
"""Micro-batches whose examples are sorted by length together, as transformers' own sampler does."""

MULTIPLE = 8
"""Rows are padded to a multiple of so many tokens, which tensor cores ask for; on every device alike."""

COARSE = 32
"""The same under the lever `graphs`: fewer shapes, each captured once. Targets there fill a power of two."""

MOST = 5_000_000
"""Micro-batches of a run: their order is laid down before the first, in memory."""

IGNORED = -100


def order(lengths: Sequence[int], batch: int, seed: int, epoch: int, *, group: bool = True) -> list[list[int]]:
    """The micro-batches of one epoch: every example once, at random, those of like length together.

    The examples are shuffled, sorted by length within each `GROUP` micro-batches, cut, and the micro-batches shuffled.
    In the first epoch the one that needs most memory comes first, so that what does not fit fails at the first step.
    The paper says only that batches are length-grouped; the rest is our choice.

    Args:
        lengths: tokens of each example.
        batch: examples a micro-batch; the last of an epoch may hold fewer.
        group: false leaves the lengths mixed.
    """
    chance = random.Random(f"order of epoch {epoch} under seed {seed}")
    rows = list(range(len(lengths)))
    chance.shuffle(rows)
    if not group:
        return [rows[at : at + batch] for at in range(0, len(rows), batch)]
    grouped: list[int] = []
    for at in range(0, len(rows), GROUP * batch):
        grouped += sorted(rows[at : at + GROUP * batch], key=lambda row: -lengths[row])
    batches = [grouped[at : at + batch] for at in range(0, len(grouped), batch)]
    chance.shuffle(batches)
    if epoch == 0 and batches:
        widest = max(range(len(batches)), key=lambda i: len(batches[i]) * padded([lengths[r] for r in batches[i]]))
        batches[0], batches[widest] = batches[widest], batches[0]
    return batches


def padded(lengths: Sequence[int], multiple: int = MULTIPLE) -> int:
    """Tokens of each row of a batch: the longest, rounded up."""
    return math.ceil(max(lengths) / multiple) * multiple


@dataclass(frozen=True)
class Schedule:
    """All steps of a run: for each, its micro-batches of row numbers; epochs follow each other without a gap.

    Only the very last step may hold fewer micro-batches than `accumulation`.

    Attributes:
        steps: step → micro-batch → rows.
        target: step → tokens whose loss is taken.
        real: step → tokens, padding left out.
        computed: step → tokens, padding included.
        widths: step → tokens, padding included as far as the rows' own lengths ask for it.
    """

    steps: list[list[list[int]]]
    target: list[int]
    real: list[int]
    computed: list[int]
    widths: list[int]

    def waste(self, steps: int) -> float:
        """Share of padding in the first steps' tokens, without what the lever `graphs` adds to have fewer shapes."""
        asked = sum(self.widths[:steps])
        return 1 - sum(self.real[:steps]) / asked if asked else 0.0

    @property
    def examples(self) -> int:
        """Rows of all steps, a row counted as often as it comes."""
        return sum(len(micro) for step in self.steps for micro in step)

    def of_rank(self, rank: int, world: int) -> list[list[int]]:
        """The micro-batches of one of `world` processes, in order; every process gets equally many a step.

        Where the last step does not divide, some processes get an empty one, which adds nothing to the gradient.
        """
        mine: list[list[int]] = []
        for step in self.steps:
            count = math.ceil(len(step) / world)
            own = step[rank::world]
            mine += own + [[]] * (count - len(own))
        return mine


def schedule(
    data: Sequence[Encoded], levers: Levers, seed: int, *, repeated: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """The steps of a run.

    Args:
        seed: of the data order.
        repeated: micro-batches to go through again and again, in this order, instead of the shuffled epochs; for
            timing. `levers.steps` then says how long.

    Raises:
        InputError: no examples, one without a token to predict, or one longer than `levers.length`.
    """
    if not data:
        raise InputError("there are no examples to train on")
    lengths = [len(row.ids) for row in data]
    targets = [sum(row.target[1:]) for row in data]  # nothing comes before the first token to predict it from
    for number, (length, count) in enumerate(zip(lengths, targets, strict=True)):
        if not count:
            raise InputError(f"example {number} has no token to predict: its target was cut away, or is empty")
        if length > levers.length:
            raise InputError(f"example {number} has {length} tokens, and the lever length allows {levers.length}")

    def epoch(number: int) -> list[list[int]]:
        if repeated is not None:
            return [list(micro) for micro in repeated]
        return order(lengths, levers.batch, seed, number, group=levers.group_by_length)

    one = len(repeated) if repeated is not None else math.ceil(len(data) / levers.batch)
    count = one * levers.epochs if levers.steps is None else levers.steps * levers.accumulation
    if count > MOST:
        raise InputError(
            f"{count:.3g} micro-batches are asked for (steps × accumulation, or those of all epochs); at most {MOST:,}"
        )
    micro: list[list[int]] = []
    if levers.steps is None:
        for number in range(levers.epochs):
            micro += epoch(number)
    else:
        number = 0
        while len(micro) < levers.steps * levers.accumulation:
            micro += epoch(number)
            number += 1
        del micro[levers.steps * levers.accumulation :]
    steps = [micro[at : at + levers.accumulation] for at in range(0, len(micro), levers.accumulation)]

    def tokens(step: list[list[int]], multiple: int) -> int:
        return sum(len(rows) * padded([lengths[row] for row in rows], multiple) for rows in step)

    return Schedule(
        steps=steps,
        target=[sum(targets[row] for rows in step for row in rows) for step in steps],
        real=[sum(lengths[row] for rows in step for row in rows) for step in steps],
        computed=[tokens(step, COARSE if levers.graphs else MULTIPLE) for step in steps],
        widths=[tokens(step, MULTIPLE) for step in steps],
    )


def collate(rows: Sequence[Encoded], pad: int, *, coarse: bool = False) -> dict[str, Any]:
    """One micro-batch: token ids padded on the right, and where the target tokens stand.

    No attention mask: under causal attention no real token sees the padding to its right, and the loss is taken at
    real tokens only, so loss and gradient are those of the masked batch, and attention keeps its fast causal kernels.

    Args:
        coarse: pad the rows to a multiple of `COARSE`, and the targets with ignored ones to a power of two of at least
            twice that.

    Returns:
        `input_ids` int64 (rows, length); `positions` int64 (targets,), into the flattened batch, of the tokens before
        the target tokens; `targets` int64 (targets,), their ids. An empty micro-batch holds one ignored position.
    """
    import torch

    if not rows:
        ids = torch.full((1, MULTIPLE), pad)
        return {"input_ids": ids, "positions": torch.zeros(1, dtype=torch.long), "targets": torch.tensor([IGNORED])}
    width = padded([len(row.ids) for row in rows], COARSE if coarse else MULTIPLE)
    positions, targets = [], []
    for number, row in enumerate(rows):
        for at in range(1, len(row.ids)):
            if row.target[at]:
                positions.append(number * width + at - 1)
                targets.append(row.ids[at])
    if coarse:
        more = max(2 * COARSE, 1 << (len(targets) - 1).bit_length()) - len(targets)
        positions += [0] * more
        targets += [IGNORED] * more
    ids = torch.tensor([[*row.ids, *[pad] * (width - len(row.ids))] for row in rows])
    return {"input_ids": ids, "positions": torch.tensor(positions), "targets": torch.tensor(targets)}
