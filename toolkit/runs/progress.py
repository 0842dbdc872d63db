"""Progress on stderr: a bar with the time left on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from toolkit.weights.reporting import Progress as Report

EVERY = 30.0
"""Seconds between lines where stderr is no terminal."""


class Progress:
    """Counts steps towards a total, of which some were done before; silent where `shown` is false."""

    def __init__(self, total: int, *, done: int = 0, shown: bool = True) -> None:
        self.total, self.done, self.shown = total, done, shown
        self._before = done
        self._bar: Any = None
        self._started = self._spoken = time.monotonic()

    def __enter__(self) -> Self:
        if self.shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), speed_estimate_period=300)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total, completed=self.done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, description: str, count: int = 1) -> None:
        """One more step done, and what comes to be done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, advance=count, description=description)
            return
        now = time.monotonic()
        if self.shown and (now - self._spoken >= EVERY or self.done == self.total):
            self._say(description, now)

    def begin(self, description: str) -> None:
        """What comes to be done, said at once: it may be long before its first step."""
        if self._bar is not None or not self.shown:
            self.step(description, 0)
        else:
            self._say(description, time.monotonic())

    def _say(self, description: str, now: float) -> None:
        seconds = now - self._started
        now_done, left = self.done - self._before, self.total - self.done
        when = f", {spell(seconds / now_done * left)} left" if left and now_done else ""
        say(f"{description}: {self.done} of {self.total}{when if left else f', in {spell(seconds)}'}")
        self._spoken = now


@contextlib.contextmanager
def reporting(progress: Report | bool | None, total: int, title: str) -> Iterator[Report]:
    """The function to call after each step: the caller's own, or one that counts on a `Progress`; False: silent."""
    if callable(progress):
        yield progress
        return
    with Progress(total, shown=progress is not False) as bar:
        bar.begin(title)
        yield lambda done, total, name: bar.step(f"{title}: {name}", done - bar.done)


def spell(seconds: float) -> str:
    """A duration in the two units that matter: `40 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def say(text: str) -> None:
    """A line for the user, on stderr."""
    print(text, file=sys.stderr, flush=True)
