"""Runs side by side: so many processes on each device, and as many runs at once as its memory holds.

A process loads the model once and does run after run. A run's memory is known from the first run of its arm and task;
before that it is given its share. Where the memory is used up all the same, the run is done again, alone. A process
that dies costs the run that it had, which is done again once, where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from toolkit.errors import InputError, RunError
from toolkit.runs.finetuning.attempt import MEMORY, Planned, Setup
from toolkit.runs.finetuning.bench import Bench, Crowded, Stopped
from toolkit.runs.progress import Progress, say

FREE = 0.9
"""Share of a device's free memory that runs are given."""

MARGIN = 1.05
"""On a run's measured peak: not every run of an arm has the same longest batch."""

BEAT = 0.5
"""Seconds between a process's messages about its memory."""

ATTEMPTS = 2
"""How often a run is begun whose process dies."""


@dataclasses.dataclass
class _Job:
    planned: Planned
    attempts: int = 0
    alone: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.planned.run.arm, self.planned.run.task


@dataclasses.dataclass
class _Worker:
    """One process: its pipe, its device, and the run that it has."""

    process: Any
    pipe: Connection
    device: str
    ready: bool = False
    job: _Job | None = None
    peak: int = 0


class Pool:
    """Does planned runs side by side.

    Args:
        setup: what they share; its device is replaced by each process's own.
        devices: names.
        count: processes on each.
        finished: is told each run's name as its report is written.
    """

    def __init__(
        self, setup: Setup, devices: Sequence[str], count: int, finished: Callable[[str], None] | None = None
    ) -> None:
        import torch

        self._setup, self._devices, self._count = setup, list(devices), count
        self._finished = finished
        self._context = multiprocessing.get_context("spawn")
        self._threads = max(1, torch.get_num_threads() // (count * len(self._devices)))
        self._workers: list[_Worker] = []
        self._free: dict[str, int] = {}
        self._measured: dict[tuple[str, str], int] = {}
        self._early = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def do(self, runs: Sequence[Planned], bar: Progress) -> None:
        """Do all runs.

        Raises:
            Stopped: a run was stopped by its pacing; the others that had begun were stopped as well.
            InputError, RunError: what one run ended with, and is everyone's.
        """
        pending = [_Job(planned) for planned in runs]
        self._start(len(pending))
        stopped: str | None = None
        while pending or self._busy():
            if stopped is not None:
                pending.clear()
            self._give(pending)
            for worker, message in self._messages():
                if message is None:
                    self._buried(worker, pending, bar)
                elif message[0] == "ready":
                    worker.ready = True
                    self._free[worker.device] = min(self._free.get(worker.device, message[1]), message[1])
                elif message[0] == "memory":
                    worker.peak = max(worker.peak, message[1])
                elif message[0] == "failed":
                    raise message[1](message[2])
                elif worker.job is not None:
                    job, worker.job = worker.job, None
                    if message[0] == "crowded":
                        job.alone = True
                        pending.insert(0, job)
                        say(f"{job.planned.run.name}: out of memory beside other runs; it is done again alone")
                    elif message[0] == "stopped":
                        stopped = message[1]
                    else:
                        self._done(job, worker, message, bar)
        if stopped is not None:
            raise Stopped(stopped)

    def _done(self, job: _Job, worker: _Worker, message: tuple[Any, ...], bar: Progress) -> None:
        name, checks = message[1], message[2]
        if MEMORY not in checks:
            self._measured[job.key] = max(self._measured.get(job.key, 0), worker.peak)
        if checks:
            say(f"{name} ended early: {', '.join(checks)}; its report says at which step")
        bar.step(f"{name} done, {self._busy()} running" if self._busy() else f"{name} done")
        if self._finished is not None:
            self._finished(name)

    def _busy(self) -> int:
        return sum(worker.job is not None for worker in self._workers)

    # -- processes ---------------------------------------------------------------------------------------------

    def _start(self, jobs: int) -> None:
        """All processes that there is work for, spread over the devices."""
        wanted = min(jobs, self._count * len(self._devices))
        while len(self._workers) < wanted:
            self._workers.append(self._worker(self._devices[len(self._workers) % len(self._devices)]))

    def _worker(self, device: str) -> _Worker:
        here, there = self._context.Pipe()
        setup = dataclasses.replace(self._setup, device=device)
        process = self._context.Process(target=work, args=(there, setup, self._threads, os.getpid()), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here, device)

    def _messages(self) -> Iterator[tuple[_Worker, tuple[Any, ...] | None]]:
        """Messages that have come, each with its process; None: it is dead."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(by_pipe), timeout=1.0):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                yield worker, worker.pipe.recv()
            except (EOFError, OSError):
                yield worker, None

    def _buried(self, worker: _Worker, pending: list[_Job], bar: Progress) -> None:
        """A process died: another takes its place, and its run is done again, or marked."""
        worker.process.join()
        code = worker.process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        self._workers.remove(worker)
        if not worker.ready:
            self._early += 1
            if self._early >= ATTEMPTS:
                raise RunError(
                    f"a worker process ended {how} before its first run; try with fewer workers, and in a script start "
                    "the study under `if __name__ == '__main__':`, as worker processes read the script too"
                )
        job = worker.job
        if job is not None:
            name = job.planned.run.name
            job.attempts += 1
            if job.attempts < ATTEMPTS:
                say(f"{name}: its process ended {how}; the run goes on where it stopped")
                pending.insert(0, job)
            else:
                say(f"{name}: its process ended {how}, twice; it is marked, and the study goes on")
                reason = f"the run's process ended {how}, {ATTEMPTS} times"
                Bench(dataclasses.replace(self._setup, device=worker.device)).died(job.planned, reason)
                bar.step(name)
        if pending or job is not None:
            self._workers.append(self._worker(worker.device))

    def _end(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError, ValueError):
                worker.pipe.send(None)
        for worker in self._workers:
            if worker.job is not None:
                worker.process.terminate()
            worker.process.join(timeout=10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    # -- memory ------------------------------------------------------------------------------------------------

    def _give(self, pending: list[_Job]) -> None:
        """Give waiting runs to idle processes, in order, as far as their devices' memory goes."""
        for worker in self._workers:
            if not pending or not worker.ready or worker.job is not None:
                continue
            if any(not other.ready for other in self._workers if other.device == worker.device):
                continue  # the memory that the others take by starting is not known yet
            job = next((job for job in pending if self._fits(job, worker.device)), None)
            if job is None:
                continue
            pending.remove(job)
            worker.job, worker.peak = job, 0
            with contextlib.suppress(OSError):  # it is dead, which its pipe will tell
                worker.pipe.send((job.planned, job.alone or self._count == 1))

    def _fits(self, job: _Job, device: str) -> bool:
        busy = [worker for worker in self._workers if worker.device == device and worker.job is not None]
        if not busy:
            return True
        if job.alone or any(worker.job is not None and worker.job.alone for worker in busy):
            return False
        budget = FREE * self._free.get(device, 0)
        share = budget / self._count
        taken = sum(max(worker.peak, self._need(worker.job, share)) for worker in busy if worker.job is not None)
        return taken + self._need(job, share) <= budget

    def _need(self, job: _Job, share: float) -> float:
        measured = self._measured.get(job.key)
        return share if measured is None else MARGIN * measured


def work(pipe: Connection, setup: Setup, threads: int, parent: int) -> None:
    """What a process does: run after run, until it is sent None; it ends with its parent."""
    import signal

    setup = dataclasses.replace(setup, device=_only(setup.device))

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked, and ends its processes
    torch.set_num_threads(threads)
    sending = threading.Lock()

    def send(*message: Any) -> None:
        with sending:
            pipe.send(message)

    try:
        bench = Bench(setup)
        bench.load()
        meter = _Meter(bench.device)
        send("ready", meter.free())
        threading.Thread(target=_beat, args=(meter, send, parent), daemon=True).start()
        while True:
            got = pipe.recv()
            if got is None:
                return
            planned, alone = got
            meter.begin()
            try:
                report = bench.do(planned, alone=alone)
            except Crowded:
                send("crowded", planned.run.name)
            except Stopped:
                send("stopped", planned.run.name)
            else:
                send("memory", meter.peak())
                assert report is not None
                send("done", planned.run.name, [flag.check for flag in report.flags if flag.severity == "fatal"])
    except EOFError:
        return
    except InputError as error:
        send("failed", InputError, str(error))
    except RunError as error:
        send("failed", RunError, str(error))
    except Exception as error:
        send("failed", RunError, f"unexpected {type(error).__name__}: {error}")
        raise


def _only(device: str) -> str:
    """Make a GPU the only one that this process sees, before the first use of any; its name from then on.

    The Trainer takes all that it sees.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index:
        return device
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = index if seen is None else seen.split(",")[int(index)].strip()
    return "cuda:0"


def _beat(meter: _Meter, send: Callable[..., None], parent: int) -> None:
    """Tell the memory now and then; end the process where nobody is left to tell."""
    while True:
        time.sleep(BEAT)
        if os.getppid() != parent:
            os._exit(1)
        with contextlib.suppress(OSError, ValueError):
            send("memory", meter.peak())


class _Meter:
    """The memory of this process's runs: on a GPU what its allocator holds, on a CPU what it holds more than before."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else _resident("VmRSS")
        self._largest = 0

    def free(self) -> int:
        """Bytes that are free on the device, this process being there already."""
        if self._device.type == "cuda":
            import torch

            torch.zeros(1, device=self._device)  # the context is there now
            return int(torch.cuda.mem_get_info(self._device)[0])
        return _available()

    def begin(self) -> None:
        """A new run: peaks are counted from here."""
        self._largest = 0

    def peak(self) -> int:
        """The largest number of bytes seen since the run began; the recorder resets the counters within a run."""
        if self._device.type == "cuda":
            import torch

            now = int(torch.cuda.max_memory_reserved(self._device))
        else:
            now = _resident("VmHWM") - self._before
        self._largest = max(self._largest, now)
        return self._largest


def _resident(key: str) -> int:
    from toolkit.runs.provenance import resident

    return resident(key)


def _available() -> int:
    """Bytes of the host's memory that are free, within its control group where one limits it."""
    from pathlib import Path

    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")
        if limit != "max":
            found.append(int(limit) - int(used))
    return max(0, min(found)) if found else 2**40
