"""The timing session: every arm's cycles, interleaved in rounds, and the state of the machine beside them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from toolkit.records.dataflow import Flow
from toolkit.records.io import File, Record
from toolkit.records.levers import Levers
from toolkit.records.plan import Plan
from toolkit.records.report import Provenance
from toolkit.records.timing import Timing

TIMING = "timing"
"""Folder of the sessions in a study's results, one file each."""


class Sample(Record):
    """One arm in one round: whole cycles of the list of batches until the duration was reached.

    Attributes:
        order: place of the arm in its round.
        steps: optimizer steps; `tokens`: real ones, no padding.
        clock, temperature, power: at the last look before its end (MHz, °C, W); None where they cannot be read.
        throttled: reasons that NVML gave during the sample; empty: none.
        load: who else computed on the device meanwhile: processes that NVML saw; how many CPUs others kept busy.
    """

    round: int
    order: int
    seconds: float = Field(gt=0)
    cycles: int = Field(gt=0)
    steps: int
    tokens: int
    clock: float | None = None
    temperature: float | None = None
    power: float | None = None
    throttled: list[str] = []
    load: list[str] = []


class Memory(Record):
    """Bytes in the memory pass: after building and before the first step, and at the peak of whole steps.

    On a GPU, of tensors (allocated) and of the allocator's blocks (reserved); on a CPU all are the process's resident
    size.
    """

    base_allocated: int
    base_reserved: int
    peak_allocated: int
    peak_reserved: int


class Timed(Record):
    """One timed arm of a session.

    Attributes:
        arm: the study's arm; `duplicate` numbers its further runs, 0 the first.
        dataflow: how it computed; None where its data flow had no choice.
        profile: share of a step's wall time by where it goes, from one profiled cycle outside the samples.
    """

    arm: str
    duplicate: int = 0
    plan: Plan
    levers: Levers
    trainable: int
    dataflow: Flow | None = None
    samples: list[Sample]
    memory: Memory | None = None
    profile: dict[str, float] = {}


class Machine(Record):
    """Where a session ran: sessions of one allocation are not independent of each other.

    Attributes:
        device: name; `identity`: UUID where the device has one.
        allocation: what tells one allocation of the machine from the next: its boot and, where there is one, its job.
    """

    host: str
    device: str
    identity: str | None = None
    driver: str | None = None
    clocks: dict[str, float] = Field(default={}, description="largest clocks, MHz")
    allocation: str


class Session(File):
    """One timing session of a study: one new process.

    Attributes:
        free: samples of the baseline with kernels that need not be deterministic, in the same rounds; where its lever
            `deterministic` is on, to tell what that costs.
    """

    kind: Literal["timing-session"] = "timing-session"
    study: str
    form: Literal["full", "small"]
    session: str = Field(description="name of its file, from the time of its start")
    declaration: str = Field(description="hash of the study as declared")
    task: str
    model: str
    fingerprint: str
    baseline: str
    protocol: Timing
    seed: int
    batches: list[dict[str, int]] = Field(description="the fixed list: examples, real, target and computed tokens")
    machine: Machine
    arms: list[Timed]
    free: list[Sample] = []
    labels: list[str] = []
    provenance: Provenance
