"""Where and with what a run was made: versions, device, memory, and the git commit of the working folder."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.records.report import Provenance

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "bitsandbytes", "peft", "numpy", "pydantic")


class Recorder:
    """Collects what all runs of a process share, once, and measures each run's time and peak memory.

    Args:
        folder: a folder of the working tree whose commit is recorded.
        ignore: paths that do not make the tree dirty (the results that are being written).
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        ignore: Iterable[Path] = (),
        fallbacks: Mapping[str, int] | None = None,
    ) -> None:
        import torch

        self.device = device
        self._fallbacks = dict(fallbacks or {})
        self._common = {
            "toolkit": _version("qlora-toolkit") or "unknown",
            "python": platform.python_version(),
            "packages": {name: version for name in PACKAGES if (version := _version(name))},
            "platform": " ".join((platform.system(), platform.machine(), *platform.libc_ver())).strip(),
            "device": device_name(device),
            "threads": torch.get_num_threads(),
            "compute_dtype": str(dtype).removeprefix("torch."),
        }
        self._common["commit"], self._common["dirty"] = _commit(folder, ignore)

    def start(self) -> None:
        """Begin a run: reset the peak memory and the clock."""
        self._started = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        self._clock = time.perf_counter()
        self._base = reset_memory(self.device)

    def mark(self) -> None:
        """Take the memory in use now for the base, a built model's for example, and reset the peak."""
        self._base = reset_memory(self.device)

    def memory(self) -> dict[str, int]:
        """Bytes so far: the base, and the peak since."""
        return self._base | peak_memory(self.device)

    def finish(
        self,
        fallbacks: Mapping[str, int] | None = None,
        *,
        threads: int | None = None,
        memory: Mapping[str, int] | None = None,
    ) -> Provenance:
        """The provenance of the run that began last.

        Args:
            threads: where it had another number of them than the others.
            memory: instead of what is measured now: what was measured at the right moment.
        """
        return Provenance(
            **self._common | ({} if threads is None else {"threads": threads}),
            started=self._started.isoformat(),
            seconds=round(time.perf_counter() - self._clock, 3),
            peak_memory=self.memory() if memory is None else dict(memory),
            fallbacks=self._fallbacks | {k: v for k, v in (fallbacks or {}).items() if v},
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """What the device is called: the GPU's or the processor's name."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit(folder: Path, ignore: Iterable[Path]) -> tuple[str | None, bool | None]:
    """HEAD and whether the tree differs from it, of the repository that holds a folder."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    root, commit = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
    if root is None or commit is None:
        return None, None
    inside = [Path(p).resolve() for p in ignore if Path(p).resolve().is_relative_to(Path(root).resolve())]
    skipped = [f":(exclude,top,literal){p.relative_to(Path(root).resolve()).as_posix()}" for p in inside]
    status = git("status", "--porcelain", "--", ":/", *skipped)
    return commit, None if status is None else bool(status)


def reset_memory(device: torch.device) -> dict[str, int]:
    """Reset the peak, and tell what is in use before the run."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {
            "base_allocated": torch.cuda.memory_allocated(device),
            "base_reserved": torch.cuda.memory_reserved(device),
        }
    with contextlib.suppress(OSError):  # Linux sets the peak to the present size; elsewhere it is the process's
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return {"base_resident": resident("VmRSS")}


def peak_memory(device: torch.device) -> dict[str, int]:
    """The largest sizes in use since the reset, in bytes."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {
            "peak_allocated": torch.cuda.max_memory_allocated(device),
            "peak_reserved": torch.cuda.max_memory_reserved(device),
        }
    return {"peak_resident": resident("VmHWM")}


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device's memory, or the host's, was used up."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("can't allocate memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def resident(key: str) -> int:
    """Bytes of this process in memory: now (`VmRSS`), or the most since the last reset (`VmHWM`)."""
    return _status(key) or _largest_resident()


def _status(key: str) -> int | None:
    """A size in bytes from /proc/self/status."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _largest_resident() -> int:
    if os.name != "posix":
        return 0
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
