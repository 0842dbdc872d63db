"""Progress of a pass over layers or batches, for the caller or on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]
"""Called once a step with (steps done, steps in all, what was done)."""


@contextmanager
def reporting(progress: Progress | bool | None, total: int, title: str) -> Iterator[Progress]:
    """The function to call after each step: the caller's, a bar's (on a terminal), or one that does nothing."""
    if progress is None:
        progress = sys.stderr.isatty()
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda done, total, name: None
    else:
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done, total, name: bar.update(task, advance=1)
