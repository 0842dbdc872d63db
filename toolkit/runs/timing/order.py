"""Who is timed, and in which order: the arms, the duplicates that give the floor, and their random rounds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from random import Random

from toolkit.errors import InputError, closest
from toolkit.records.finetuning import FineTuning
from toolkit.records.plan import Plan
from toolkit.records.session import Session

LEAST = 2
"""Samples an arm needs before its spread is looked at."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One timed model: an arm, and which of its duplicates (0: the first).

    `free`: its kernels need not be deterministic, whatever the lever says; for what the lever costs.
    """

    arm: str
    duplicate: int = 0
    free: bool = False

    def __str__(self) -> str:
        if self.free:
            return f"{self.arm} (kernels not deterministic)"
        return self.arm if self.duplicate == 0 else f"{self.arm} (duplicate {self.duplicate})"


def timed_arms(study: FineTuning, only: Sequence[str] | None = None) -> list[str]:
    """The arms to time, in the study's order; the baseline, which the others are compared with, is always one.

    Raises:
        InputError: `only` names an arm that the study does not have or does not time.
    """
    declared = study.timing.arms or [arm.name for arm in study.arms]
    for name in only or []:
        if name not in declared:
            raise InputError(f"no arm {name!r} is timed; {closest(name, declared)}")
    wanted = {*(only or declared), study.analysis.baseline}
    return [arm.name for arm in study.arms if arm.name in wanted]


def entries(
    arms: Sequence[str], baseline: str, duplicates: int, noisiest: str | None, *, deterministic: bool = False
) -> list[Entry]:
    """Every arm once, the baseline `duplicates` times more, and the noisiest arm once more.

    Where the baseline's kernels are deterministic, also once as they would be without that lever.
    """
    further = [Entry(baseline, number) for number in range(1, duplicates + 1)]
    if noisiest is not None and noisiest != baseline:
        further.append(Entry(noisiest, 1))
    if deterministic:
        further.append(Entry(baseline, free=True))
    return [*(Entry(arm) for arm in arms), *further]


def noisiest(
    arms: Sequence[str], baseline: str, quantized: Mapping[str, int], earlier: Sequence[Session] = ()
) -> str | None:
    """The arm beside the baseline whose samples spread most in earlier sessions, relative to their mean.

    Without earlier sessions that is not known: the one with most quantized layers is taken, since what they add to
    a step is many short kernels, and launching them is what another process disturbs. The choice is ours.
    """
    others = [arm for arm in arms if arm != baseline]
    if not others:
        return None
    spreads: dict[str, list[float]] = {}
    for session in earlier:
        for timed in session.arms:
            paces = [s.steps / s.seconds for s in timed.samples]
            if timed.arm in others and len(paces) >= LEAST:
                spreads.setdefault(timed.arm, []).append(statistics.stdev(paces) / statistics.fmean(paces))
    if len(spreads) == len(others):
        return max(others, key=lambda arm: statistics.fmean(spreads[arm]))
    return max(others, key=lambda arm: quantized[arm])


def quantized_layers(plan: Plan, layers: Sequence[str], dense: set[str]) -> int:
    """How many of a model's layers a plan quantizes; `dense` are the keys of quantizers that keep 16 bit."""
    return sum(plan.of(name).quantizer not in dense for name in layers)


def rounds(entries: Sequence[Entry], count: int, seed: int) -> list[list[Entry]]:
    """Each round holds every entry once, in an order of its own (Mersenne Twister, Fisher-Yates)."""
    rng = Random(f"timing {seed}")
    made = []
    for _ in range(count):
        order = list(entries)
        rng.shuffle(order)
        made.append(order)
    return made
