"""The CPUs that a session is timed on, and how busy others keep them."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from typing import Any

from toolkit.errors import RunError
from toolkit.records.session import Machine
from toolkit.runs.timing.machine import Seen, allocation, counted

SLACK = 0.25
"""CPUs that other processes may use beyond what a session leaves free."""


class CpuWatch:
    """The CPUs, through the operating system: how many of them others keep busy, and at which clock they run.

    In a container the counts are the whole host's.
    """

    def __init__(self, window: float = 1.0) -> None:
        self.labels: list[str] = []
        self._window = window
        self._mark: tuple[float, float, float] | None = None

    def machine(self) -> Machine:
        """The processor's name and largest clock."""
        import psutil
        import torch

        from toolkit.runs.provenance import device_name

        speed = None
        with contextlib.suppress(Exception):  # not every system tells
            speed = psutil.cpu_freq()
        return Machine(
            host=platform.node(),
            device=device_name(torch.device("cpu")),
            clocks={"cpu": float(speed.max)} if speed is not None and speed.max else {},
            allocation=allocation(),
        )

    def refuse(self, beside_others: bool = False) -> None:
        """Refuse to start where others leave fewer CPUs free than this process computes with.

        Raises:
            RunError: naming the busiest processes; with `beside_others` a label says it instead.
        """
        import psutil
        import torch

        processes = {}
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                process.cpu_percent()
                processes[process.pid] = process
        self.begin()
        time.sleep(self._window)
        used = self._others()
        count, threads = psutil.cpu_count() or 1, torch.get_num_threads()
        if count - used >= threads - SLACK:
            return
        shares = []
        for pid, process in processes.items():
            with contextlib.suppress(psutil.Error):
                shares.append((process.cpu_percent(), pid, process.info["name"]))
        busiest = [f"{pid} ({name}, {share:.0f}%)" for share, pid, name in sorted(shares, reverse=True) if share >= 10]
        shown = ", ".join([one for one in busiest if not one.startswith(f"{os.getpid()} ")][:3])
        said = f"other processes keep {used:.1f} of {count} CPUs busy" + (f" ({shown})" if shown else "")
        if not beside_others:
            raise RunError(
                f"{said}, and a session computes with {counted(threads, 'thread')}: its times would be theirs too. "
                "Wait for them, or time all the same with --beside-others, which labels the session"
            )
        self.labels.append(f"timed beside others: {said}")

    def claim(self, use: Callable[[], Any]) -> None:
        """The operating system knows our own process."""

    def begin(self) -> None:
        """Mark the present counts."""
        self._mark = _cpu_counts()

    def end(self) -> Seen:
        """The clock now, and the load of others since `begin`."""
        import psutil

        speed = None
        with contextlib.suppress(Exception):
            speed = psutil.cpu_freq()
        used = self._others()
        return Seen(
            clock=float(speed.current) if speed is not None and speed.current else None,
            load=[f"others on {max(0.5, round(2 * used) / 2):g} CPUs"] if used > SLACK else [],
        )

    def _others(self) -> float:
        """CPUs that other processes kept busy since the mark, on average."""
        assert self._mark is not None, "begin() comes first"
        clock, busy, own = (now - then for now, then in zip(_cpu_counts(), self._mark, strict=True))
        return max(0.0, (busy - own) / clock) if clock > 0 else 0.0


def _cpu_counts() -> tuple[float, float, float]:
    """Seconds: of the clock, busy over all CPUs, and of this process."""
    import psutil

    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice as well
    return time.perf_counter(), sum(times) - idle - twice, own.user + own.system
