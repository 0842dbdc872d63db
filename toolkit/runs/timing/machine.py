"""The machine that is timed, and who else uses it: NVML for a GPU, the operating system for a CPU.

A `Watch` is opened before anything is put on the device, since a process that is there already is then another's.
Inside a container NVML may number processes otherwise than the container does, or show none: what came when we came
is taken for ours, and a label says what could not be seen.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import RunError
from toolkit.records.io import digest
from toolkit.records.session import Machine

if TYPE_CHECKING:
    import torch

JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID")
"""What batch systems call the number of a job."""

REASONS = {
    0x2: "applications clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
"""NVML's reasons for a clock below its largest; an idle device (0x1) is none of them."""

PERIOD = 0.5
"""Seconds between looks at the device while it is timed."""

PATIENCE = 20
"""Looks, a fifth of a period apart, until NVML shows that this process uses the device."""

BUSY = 10
"""Utilization in percent, of a device on which nothing of ours runs, from which on someone else does."""


@dataclass(frozen=True)
class Seen:
    """What was seen while something was timed; see `toolkit.records.session.Sample`."""

    clock: float | None = None
    temperature: float | None = None
    power: float | None = None
    throttled: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)


class Watch(Protocol):
    """The machine as a session sees it; `labels` must stand beside its results."""

    labels: list[str]

    def machine(self) -> Machine:
        """What the machine is."""
        ...

    def refuse(self, beside_others: bool) -> None:
        """Refuse to time beside another compute process (RunError)."""
        ...

    def claim(self, use: Callable[[], Any]) -> None:
        """Use the device for the first time, and know our own process by it."""
        ...

    def begin(self) -> None:
        """Begin to look."""
        ...

    def end(self) -> Seen:
        """What was seen since `begin`."""
        ...


def watch(device: torch.device) -> Watch:
    """The watch of a device."""
    if device.type != "cuda":
        from toolkit.runs.timing.cpu_watch import CpuWatch

        return CpuWatch()
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        return BlindWatch(device, f"{type(error).__name__}: {error}")
    return GpuWatch(device, pynvml)


def allocation() -> str:
    """What tells one allocation of the machine from the next: its boot, and its job where a batch system runs it.

    The boot's id is shortened to a hash. Two containers of one host and boot count as one allocation: so that
    sessions are called independent too seldom rather than too often.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = f"{platform.node()} {round(time.time() - time.monotonic(), -2):.0f}"
    jobs = [f"job {os.environ[name]}" for name in JOBS if os.environ.get(name)]
    return ", ".join([f"boot {digest(boot)[:12]}", *jobs[:1]])


class BlindWatch:
    """A GPU without NVML: nothing is seen, and the labels say so."""

    def __init__(self, device: torch.device, why: str) -> None:
        self._device = device
        self.labels = [
            f"NVML cannot be read ({' '.join(why.split())[:120]}; the extra `timing` installs nvidia-ml-py): clocks, "
            "throttling and other processes were not seen"
        ]

    def machine(self) -> Machine:
        """Name and identity as torch knows them."""
        import torch

        properties = torch.cuda.get_device_properties(self._device)
        identity = getattr(properties, "uuid", None)
        return Machine(
            host=platform.node(),
            device=properties.name,
            identity=None if identity is None else str(identity),
            allocation=allocation(),
        )

    def refuse(self, beside_others: bool) -> None:
        """Nothing can be seen, so nothing is refused; the label stands."""

    def claim(self, use: Callable[[], Any]) -> None:
        """Use the device."""
        use()

    def begin(self) -> None:
        """Nothing to look at."""

    def end(self) -> Seen:
        """Nothing was seen."""
        return Seen()


class GpuWatch:
    """One GPU through NVML.

    Args:
        nvml: the module `pynvml`, initialised.
        handle: of the device; found by its number where it is left out.
        ours_already: whether this process has used the device before.
    """

    def __init__(
        self, device: torch.device, nvml: Any, *, handle: Any = None, ours_already: bool | None = None
    ) -> None:
        import torch

        self._device, self._nvml = device, nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(_number(device)) if handle is None else handle
        self.labels: list[str] = []
        self._ours = {os.getpid()}
        self._used = torch.cuda.is_initialized() if ours_already is None else ours_already
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._reasons, self._load = 0, dict[int, int]()
        self._last: tuple[float | None, float | None, float | None] = (None, None, None)
        self._since = 0

    def machine(self) -> Machine:
        """Name, UUID, driver and largest clocks."""
        nvml, handle = self._nvml, self._handle
        clocks = {}
        for name, kind in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
            value = self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, kind)
            if value is not None:
                clocks[name] = float(value)
        return Machine(
            host=platform.node(),
            device=_text(nvml.nvmlDeviceGetName(handle)),
            identity=_maybe_text(self._ask(nvml.nvmlDeviceGetUUID, handle)),
            driver=_maybe_text(self._ask(nvml.nvmlSystemGetDriverVersion)),
            clocks=clocks,
            allocation=allocation(),
        )

    def processes(self) -> dict[int, str]:
        """Compute processes on the device: number → name, as NVML numbers them."""
        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or []
        return {p.pid: _process_name(p.pid) for p in found}

    def others(self) -> dict[int, str]:
        """Compute processes that are not ours."""
        return {pid: name for pid, name in self.processes().items() if pid not in self._ours}

    def refuse(self, beside_others: bool = False) -> None:
        """Refuse a device that another compute process uses, seen by its number or by the device being busy.

        Raises:
            RunError: naming the processes. `beside_others` does not help here: such a time means nothing.
        """
        others = self.others()
        if self._used and len(others) == 1 and os.getpid() not in self.processes():
            (own,) = others  # we use the device and are not seen under our own number: this is us
            self._ours.add(own)
            self.labels.append("this process is taken for the one compute process that NVML shows")
            others = {}
        if others:
            named = ", ".join(f"{pid} ({name})" if name else str(pid) for pid, name in sorted(others.items()))
            raise RunError(
                f"{self._device} is in use by {counted(len(others), 'other compute process', 'es')}: {named}; a time "
                "taken beside it would be its time too. Wait for it, or name another device"
            )
        if self._used:
            return
        rates = []
        for _ in range(4):
            rate = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, self._handle)
            rates.append(0 if rate is None else rate.gpu)
            time.sleep(PERIOD / 2)
        if min(rates) >= BUSY:
            raise RunError(
                f"{self._device} is {min(rates)}% busy before anything of ours runs, though NVML names no process "
                "(one of another container?); wait until it is idle, or name another device"
            )

    def claim(self, use: Callable[[], Any]) -> None:
        """Use the device for the first time, and take the process that appears with that for ours."""
        before = set(self.processes())
        use()
        for _ in range(PATIENCE):
            after = set(self.processes())
            if after - before or after & self._ours:
                break
            time.sleep(PERIOD / 5)
        self._ours |= after - before
        if not after:
            self.labels.append("NVML shows no processes here, not even this one: others were not seen")
        self._used = True

    def begin(self) -> None:
        """Look at the device from a thread, twice a second, until `end`."""
        self._reasons, self._load, self._last = 0, {}, (None, None, None)
        self._since = time.time_ns() // 1000
        self._stop.clear()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(PERIOD):
            self._once()

    def _once(self) -> None:
        nvml = self._nvml
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        self._reasons |= self._ask(ask, self._handle) or 0
        for pid in self.others():
            self._load.setdefault(pid, 0)
        clock = self._ask(nvml.nvmlDeviceGetClockInfo, self._handle, nvml.NVML_CLOCK_SM)
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, self._handle, nvml.NVML_TEMPERATURE_GPU)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, self._handle)
        self._last = (
            None if clock is None else float(clock),
            None if temperature is None else float(temperature),
            None if power is None else power / 1000,
        )

    def end(self) -> Seen:
        """What the thread saw; clock, temperature and power at its last look, when the device was still at work."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._last == (None, None, None):  # too short for the thread
            self._once()
        clock, temperature, power = self._last
        answer = self._ask(self._nvml.nvmlDeviceGetProcessUtilization, self._handle, self._since)
        for sample in answer or []:
            if sample.pid not in self._ours and sample.smUtil:
                self._load[sample.pid] = max(self._load.get(sample.pid, 0), sample.smUtil)
        load = [f"process {pid}" + (f" ({use}%)" if use else "") for pid, use in sorted(self._load.items())]
        return Seen(
            clock=clock,
            temperature=temperature,
            power=power,
            throttled=[name for bit, name in REASONS.items() if self._reasons & bit],
            load=load,
        )

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """NVML's answer; None where this device does not give it."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _number(device: torch.device) -> int:
    """NVML's number of a CUDA device: CUDA_VISIBLE_DEVICES may renumber it."""
    import torch

    index = device.index if device.index is not None else 0
    found = getattr(torch.cuda, "_get_nvml_device_index", None)
    return index if found is None else found(index)


def _process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _maybe_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun."""
    return f"{number} {noun}{plural if number != 1 else ''}"
