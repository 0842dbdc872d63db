"""The Trainer that trains, on one fixed list of batches, timed in whole cycles of that list.

The clock starts at the end of a step and stops at the end of a step, the device synchronised at both and nowhere
between: everything that a step of the Trainer does is inside, its fetching of the next batches too, and nothing
of `train()`'s own beginning and end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from toolkit.runs.training.batches import Schedule
from toolkit.runs.training.deterministic import deterministic
from toolkit.runs.training.fair_trainer import FairTrainer, trainer

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from toolkit.records.levers import Levers, Seeds
    from toolkit.runs.tasks.encoding import Encoded

STEPS = 1_000_000_000
"""Planned optimizer steps of a timed Trainer: its schedule then stands still, and it ends when it is told to."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """Whole cycles of the list, and the seconds that they took."""

    seconds: float
    cycles: int


class Again(Sequence[Any]):
    """A list again and again: item i is item i modulo its length."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = list(items)

    def __getitem__(self, at: Any) -> Any:
        return self._items[at % len(self._items)]

    def __len__(self) -> int:
        return STEPS


class Endless(Schedule):
    """The list as a schedule without an end: one epoch, so that no cycle holds an epoch's beginning."""

    def of_rank(self, rank: int, world: int) -> Any:
        """The micro-batches of one process, again and again; a sampler without a length."""
        mine = super().of_rank(rank, world)

        class Sampler:
            def __iter__(self) -> Iterator[list[int]]:
                return itertools.cycle(mine)

        return Sampler()


class Clock(TrainerCallback):
    """Lets `lead` steps pass, then measures whole cycles until they have lasted `seconds`, or `cycles` are done.

    Args:
        cycle: optimizer steps a cycle.
        begin, end: called beside the first and the last reading of the clock, outside what is measured.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        lead: int,
        cycle: int,
        seconds: float = 0.0,
        cycles: int = 1,
        begin: Callable[[], Any] | None = None,
        end: Callable[[], Any] | None = None,
    ) -> None:
        self._device, self._lead, self._cycle = device, lead, cycle
        self._seconds, self._cycles = seconds, cycles
        self._begin, self._end = begin, end
        self._steps = 0
        self._started = 0.0
        self.ran: Ran | None = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> TrainerControl:
        """Read the clock where a cycle ends; the host's own, so that nothing waits for the device before the last."""
        self._steps += 1
        done = self._steps - self._lead
        if done == 0:
            if self._begin is not None:
                self._begin()
            synchronize(self._device)
            self._started = time.perf_counter()
        elif done > 0 and done % self._cycle == 0 and self.ran is None:
            cycles = done // self._cycle
            if cycles >= self._cycles and time.perf_counter() - self._started >= self._seconds:
                synchronize(self._device)
                self.ran = Ran(time.perf_counter() - self._started, cycles)
                if self._end is not None:
                    self._end()
                control.should_training_stop = True
        return control


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Driver:
    """One arm's Trainer, run again and again over the list; made by `driver`.

    Attributes:
        steps: optimizer steps a cycle.
    """

    def __init__(self, trainer: FairTrainer, steps: int) -> None:
        self._trainer, self.steps = trainer, steps
        self._open = contextlib.ExitStack()
        self._open.enter_context(trainer.ready())

    def run(self, *, lead: int | None = None, **how: Any) -> Ran:
        """Train until the clock says stop; the first cycle (or `lead` steps) is not timed.

        It brings back what the beginning of `train()` gave away: the allocator's blocks above all.
        """
        clock = Clock(self._trainer.args.device, lead=self.steps if lead is None else lead, cycle=self.steps, **how)
        self._trainer.add_callback(clock)
        try:
            with deterministic(self._trainer.levers.deterministic):
                self._trainer.train()
        finally:
            self._trainer.remove_callback(clock)
            self._trainer.losses.clear()
            self._trainer.norms.clear()
        assert clock.ran is not None, "the Trainer ended before the clock told it to"
        return clock.ran

    def close(self) -> None:
        """Leave the model as it was built."""
        self._open.close()


def driver(
    model: nn.Module, batches: Sequence[Sequence[Encoded]], levers: Levers, seeds: Seeds, folder: Path, pad: int
) -> Driver:
    """The very Trainer that trains an arm, on the list.

    Args:
        batches: micro-batches of examples, as many as fill whole optimizer steps.
        folder: which Trainer may write to; it does not.
    """
    rows = [row for batch in batches for row in batch]
    starts = list(itertools.accumulate((len(batch) for batch in batches), initial=0))
    micro = [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]
    steps = len(batches) // levers.accumulation
    assert steps * levers.accumulation == len(batches), "the list fills whole optimizer steps"
    made = trainer(
        model,
        rows,
        levers.model_copy(update={"steps": steps}),
        seeds,
        folder=folder,
        pad=pad,
        repeated=micro,
    )
    plan = made.plan
    made.plan = Endless(plan.steps, *map(Again, (plan.target, plan.real, plan.computed, plan.widths)))
    made.args.max_steps = STEPS
    return Driver(made, steps)
