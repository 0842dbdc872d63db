"""Pacing: a background run waits while the device is hot, outside its hours, or while a file asks it to."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import InputError

STOP = "stop"
"""A stop file with this word in it ends the run, which the same command then resumes; any other makes it wait."""


@dataclasses.dataclass(frozen=True)
class Pacing:
    """When a run waits. It is asked after every step; what was done so far is saved before it waits.

    Attributes:
        window: local hours in which it may run, as `22:00-07:00`.
        pause_above: °C; hotter than this it waits …
        resume_below: °C; … until it is cooler than this; by default 10 below `pause_above`.
        stop_file: while this file exists it waits; with the word `stop` in it, it saves and ends.
        poll: seconds between two looks while it waits.
        temperature: gives °C; by default the GPU's own sensor, on a CPU the hottest thermal zone.
    """

    window: str | None = None
    pause_above: float | None = None
    resume_below: float | None = None
    stop_file: Path | None = None
    poll: float = 5.0
    temperature: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            _hours(self.window)
        if not 0 < self.poll < math.inf:
            raise InputError(f"poll is {self.poll} s; a number above 0 is needed")
        if self.stop_file is not None and Path(self.stop_file).is_dir():
            raise InputError(f"stop_file {self.stop_file} is a folder, and a run would wait for ever: name a file")
        for name in ("pause_above", "resume_below"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise InputError(f"{name} is {value}; a temperature in °C is asked for")
        if self.resume_below is not None:
            if self.pause_above is None:
                raise InputError("resume_below without pause_above: say above which temperature the run waits")
            if self.resume_below > self.pause_above:
                raise InputError(
                    f"resume_below {self.resume_below} is above pause_above {self.pause_above}: the run would resume "
                    "while it is too hot"
                )


def _hours(window: str) -> tuple[datetime.time, datetime.time]:
    match = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\s*", window)
    try:
        first, second, third, fourth = (int(part) for part in match.groups())
        begin, end = datetime.time(first, second), datetime.time(third, fourth)
    except (AttributeError, ValueError):
        raise InputError(f"window {window!r} is no pair of times; write it as 22:00-07:00") from None
    if begin == end:
        raise InputError(f"window {window!r} is empty: it begins and ends at {begin:%H:%M}")
    return begin, end


class Pacer:
    """Says why a run should wait now, or None; remembers that it waits for the device to cool.

    Args:
        pacing: when.
        device: whose temperature counts, where `pacing.temperature` is not given.

    Raises:
        InputError: a temperature is asked for, and no sensor can be read.
    """

    def __init__(self, pacing: Pacing, device: str = "cpu") -> None:
        self.pacing = pacing
        self._hot = False
        self._read = pacing.temperature or (lambda: sensor(device))
        if pacing.pause_above is not None:
            self._read()

    @property
    def ended(self) -> bool:
        """Whether the stop file asks the run to save and end."""
        path = self.pacing.stop_file
        try:
            return path is not None and path.read_text(encoding="utf-8").strip().lower() == STOP
        except (OSError, UnicodeDecodeError):
            return False

    def reason(self, now: datetime.datetime | None = None) -> str | None:
        """Why the run should wait."""
        pacing = self.pacing
        if pacing.stop_file is not None and pacing.stop_file.exists():
            return f"{pacing.stop_file} exists"
        if pacing.window is not None:
            begin, end = _hours(pacing.window)
            clock = (now or datetime.datetime.now()).time()
            inside = begin <= clock < end if begin < end else clock >= begin or clock < end
            if not inside:
                return f"it is {clock:%H:%M}, outside {pacing.window}"
        if pacing.pause_above is not None:
            found = self._read()
            limit = pacing.resume_below if pacing.resume_below is not None else pacing.pause_above - 10
            self._hot = found >= limit if self._hot else found > pacing.pause_above
            if self._hot:
                return f"{found:.0f} °C, waiting for less than {limit:.0f} °C"
        return None


def sensor(device: str) -> float:
    """°C of a GPU by its own sensor, or of the hottest thermal zone of the machine.

    Raises:
        InputError: there is none that can be read.
    """
    if device.startswith("cuda"):
        import torch

        try:
            return float(torch.cuda.temperature(device))
        except (ModuleNotFoundError, RuntimeError) as error:
            raise InputError(
                f"the temperature of {device} cannot be read ({error}); install nvidia-ml-py, or leave out pause_above"
            ) from None
    zones = []
    for path in Path("/sys/class/thermal").glob("thermal_zone*/temp"):
        try:
            zones.append(int(path.read_text()) / 1000)
        except (OSError, ValueError):
            continue
    if not zones:
        raise InputError("this machine shows no thermal zone under /sys/class/thermal; leave out pause_above")
    return max(zones)
