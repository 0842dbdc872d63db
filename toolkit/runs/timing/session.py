"""One timing session: every arm of a model on one list of batches, in rounds of random order, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import RunError
from toolkit.records.dataflow import Flow
from toolkit.records.finetuning import FineTuning
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.records.session import Memory, Sample, Session, Timed
from toolkit.runs.timing import machine, memory, order
from toolkit.runs.timing.batches import Batches
from toolkit.runs.timing.order import Entry

if TYPE_CHECKING:
    import torch

    from toolkit.runs.timing.cycling import Driver

_made_here = 0
"""Sessions that this process has made."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """What an arm is built from and trained with; `start`: the folder of its starts, None where they are plain."""

    name: str
    plan: Plan
    levers: Levers
    start: Path | None = None


@dataclasses.dataclass
class Bench:
    """Builds arms and drives their Trainers.

    Attributes:
        model: where each arm's weights are read, anew for every arm.
        seeds: of the adapters, and of the data order.
    """

    model: str
    arms: Mapping[str, Arm]
    batches: Batches
    seeds: Seeds
    device: torch.device
    dtype: torch.dtype
    pad: int
    folder: Path
    trainable: dict[str, int] = dataclasses.field(default_factory=dict)
    flows: dict[str, Flow | None] = dataclasses.field(default_factory=dict)

    def build(self, arm: str) -> Any:
        """The arm's model, ready to train."""
        from toolkit.runs.building import build

        plan, levers = self.arms[arm].plan, self.arms[arm].levers
        built = build(
            self.model,
            plan,
            device=str(self.device),
            dtype=self.dtype,
            seed=self.seeds.adapter,
            attention=levers.attention,
            start=self.arms[arm].start,
        )
        self.flows[arm] = getattr(built, "dataflow", None)
        self.trainable[arm] = sum(p.numel() for p in built.parameters() if p.requires_grad)
        return built

    def driver(self, arm: str, model: Any, rows: Sequence[Any] | None = None, *, free: bool = False) -> Driver:
        """The arm's Trainer on the list, or on other rows; `free`: its kernels need not be deterministic."""
        from toolkit.runs.timing.cycling import driver

        levers = self.arms[arm].levers
        if free:
            levers = levers.model_copy(update={"deterministic": False})
        return driver(model, self.batches.rows if rows is None else rows, levers, self.seeds, self.folder, self.pad)

    def memory(self, arm: str) -> Memory:
        """The arm alone, over whole steps at the widest batch."""

        def train(built: Any) -> None:
            widest = [self.batches.widest] * self.arms[arm].levers.accumulation
            driver = self.driver(arm, built, widest)
            driver.run(lead=memory.STEPS - 1, cycles=1)
            driver.close()

        return memory.measure(self.device, lambda: self.build(arm), train)


@contextlib.contextmanager
def out_of_memory(entry: object, doing: str) -> Iterator[None]:
    """An out-of-memory error of the device, named after the arm.

    Raises:
        RunError: in its place.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"arm {entry}: the device ran out of memory {doing}: {reason}") from error


class Rounds:
    """The measurements: memory, samples and profiles of all entries.

    Args:
        say: tells of what is done next, and how far it is.
    """

    def __init__(
        self,
        bench: Bench,
        protocol: Any,
        entries: Sequence[Entry],
        watch: machine.Watch,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self._bench, self._protocol, self._watch, self._say = bench, protocol, watch, say
        self.entries = list(entries)
        self._seed = seed
        self.labels: list[str] = []
        self.memories: dict[str, Memory] = {}
        self.samples: dict[Entry, list[Sample]] = {entry: [] for entry in entries}
        self.profiles: dict[str, dict[str, float]] = {}

    def run(self, baseline: str) -> None:
        """Memory first, each arm alone; then warm-up and the rounds; then one profiled cycle an arm.

        Raises:
            RunError: the baseline, or an arm that did fit alone, ran out of memory.
        """
        self._measure_memory(baseline)
        resident = self._fit()
        if resident:
            drivers = {entry: self._ready(entry) for entry in self.entries}
            with self._bench_of(drivers) as get:
                self._rounds(get)
                self._profile(get)
        else:
            self.labels.append(
                "the arms do not fit on the device together: each was built anew for each of its samples"
            )
            with self._in_turn() as get:
                self._rounds(get)
                self._profile(get)

    def _measure_memory(self, baseline: str) -> None:
        if self._bench.device.type != "cuda":  # what a process keeps from its first steps counts as resident
            self._say("first steps of the process")
            with out_of_memory(baseline, "in its first steps, alone, at the widest batch"):
                self._bench.memory(baseline)
        for arm in dict.fromkeys(entry.arm for entry in self.entries):
            self._say(f"memory of {arm}")
            try:
                with out_of_memory(arm, "in the memory pass, alone, at the widest batch"):
                    self.memories[arm] = self._bench.memory(arm)
            except RunError as error:
                if arm == baseline:
                    raise
                memory.free(self._bench.device)
                self.labels.append(f"not timed: {error}")
                self._say(f"warning: {error}")
                self.entries = [entry for entry in self.entries if entry.arm != arm]

    def _fit(self) -> bool:
        """Whether all entries' models fit at once."""
        device = self._bench.device
        memory.free(device)
        if device.type == "cuda":
            process = 0
        else:
            from toolkit.runs.provenance import reset_memory

            process = reset_memory(device)["base_resident"]
        return memory.fits([self.memories[entry.arm] for entry in self.entries], process, memory.room(device))

    def _ready(self, entry: Entry) -> Driver:
        """A built entry after its warm-up."""
        self._say(f"building and warming up {entry}")
        with out_of_memory(entry, "while it was built beside the others"):
            driver = self._bench.driver(entry.arm, self._bench.build(entry.arm), free=entry.free)
            driver.run(lead=0, cycles=self._protocol.warmup)
        return driver

    @contextlib.contextmanager
    def _bench_of(self, drivers: dict[Entry, Driver]) -> Iterator[Callable[[Entry], Driver]]:
        yield drivers.__getitem__
        for driver in drivers.values():
            driver.close()
        drivers.clear()
        memory.free(self._bench.device)

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[Callable[[Entry], Driver]]:
        held: dict[Entry, Driver] = {}

        def get(entry: Entry) -> Driver:
            if entry not in held:
                clear()
                held[entry] = self._ready(entry)
            return held[entry]

        def clear() -> None:
            for driver in held.values():
                driver.close()
            held.clear()
            memory.free(self._bench.device)

        yield get
        clear()

    def _rounds(self, get: Callable[[Entry], Driver]) -> None:
        count = self._protocol.rounds
        for number, entries in enumerate(order.rounds(self.entries, count, self._seed)):
            for place, entry in enumerate(entries):
                self._say(f"round {number + 1} of {count}: {entry}")
                driver = get(entry)
                seen: list[machine.Seen] = []
                with out_of_memory(entry, f"in round {number + 1}"):
                    ran = driver.run(
                        seconds=self._protocol.seconds,
                        begin=self._watch.begin,
                        end=lambda into=seen: into.append(self._watch.end()),
                    )
                self.samples[entry].append(
                    Sample(
                        round=number,
                        order=place,
                        seconds=ran.seconds,
                        cycles=ran.cycles,
                        steps=ran.cycles * driver.steps,
                        tokens=ran.cycles * self._bench.batches.real,
                        **dataclasses.asdict(seen[0]),
                    )
                )

    def _profile(self, get: Callable[[Entry], Driver]) -> None:
        from toolkit.runs.timing.profiling import shares

        for entry in self.entries:
            if entry.duplicate or entry.free:
                continue
            self._say(f"profile of {entry}")
            step = statistics.median(s.seconds / s.steps for s in self.samples[entry])
            try:
                self.profiles[entry.arm] = shares(self._bench.device, get(entry), step)
            except Exception as error:  # whatever the profiler meets costs the profile, not the samples
                reason = " ".join(str(error).split())[:120]
                self.labels.append(f"arm {entry.arm}: no profile ({type(error).__name__}: {reason})")


def make(
    study: FineTuning,
    bench: Bench,
    *,
    task: str,
    fingerprint: str,
    quantized: Mapping[str, int],
    watch: machine.Watch,
    recorder: Any,
    seed: int | None,
    earlier: Sequence[Session],
    name: str,
    say: Callable[[str], None],
) -> Session:
    """Run the session, and tell of it."""
    global _made_here
    protocol, baseline = study.timing, study.analysis.baseline
    seed = secrets.randbelow(2**31) if seed is None else seed
    noisy = protocol.noisiest or order.noisiest(list(bench.arms), baseline, quantized, earlier)
    if noisy not in bench.arms:
        noisy = None
    deterministic = bench.arms[baseline].levers.deterministic
    entries = order.entries(list(bench.arms), baseline, protocol.duplicates, noisy, deterministic=deterministic)
    rounds = Rounds(bench, protocol, entries, watch, seed, say)
    recorder.start()
    rounds.run(baseline)
    labels = [*watch.labels, *rounds.labels]
    if _made_here:
        labels.append("not the first session of its process: not independent of the one before")
    if bench.device.type == "cuda":
        if allocator := os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
            labels.append(f"allocator: {allocator}")
    else:
        labels.append("memory: resident sizes of the process; on a CPU nothing is reserved apart")
    _made_here += 1
    return Session(
        study=study.name,
        form=study.form,
        session=name,
        declaration=study.declaration,
        task=task,
        model=study.published.model,
        fingerprint=fingerprint,
        baseline=baseline,
        protocol=protocol,
        seed=seed,
        batches=bench.batches.record,
        machine=watch.machine(),
        arms=[
            Timed(
                arm=entry.arm,
                duplicate=entry.duplicate,
                plan=bench.arms[entry.arm].plan,
                levers=bench.arms[entry.arm].levers,
                trainable=bench.trainable[entry.arm],
                dataflow=bench.flows.get(entry.arm),
                samples=rounds.samples[entry],
                memory=rounds.memories[entry.arm] if entry.duplicate == 0 else None,
                profile=rounds.profiles.get(entry.arm, {}) if entry.duplicate == 0 else {},
            )
            for entry in rounds.entries
            if not entry.free
        ],
        free=[sample for entry in rounds.entries if entry.free for sample in rounds.samples[entry]],
        labels=labels,
        provenance=recorder.finish(),
    )
