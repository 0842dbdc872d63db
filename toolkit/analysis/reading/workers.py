"""Many files read by several processes; few by this one.

A worker is a fresh interpreter that is given a function and paths, and answers with what it read: it neither
forks a process that may hold threads nor imports the caller's script. Where one fails, this process reads its
share itself, so that errors are always raised here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

from toolkit.analysis.reading.report_file import Common, Run, read_report

SHARE = 1500
"""A worker is started for every so many reports: it must save more than its start, about half a second."""
MOST = 8

START = "from toolkit.analysis.reading.workers import answer; answer()"

T = TypeVar("T")
Reader = Callable[[list[Path]], list[T]]


def read_reports(paths: list[Path], processes: int | None = None) -> list[tuple[Common, Run]]:
    """What `read_report` gives for each path, in order; `processes` as in `shared_out`.

    Raises:
        InputError: as `read_report`, for the first path of a share that it refuses.
    """
    return shared_out(_reports, paths, processes)


def shared_out(read: Reader[T], paths: list[Path], processes: int | None = None, share: int = SHARE) -> list[T]:
    """What a function reads, one thing a path, in order.

    Args:
        read: paths → one thing a path; a function of a module, so that a worker finds it.
        processes: how many share the work, this one included; by default one for every `share` paths, and at most
            one a CPU.
    """
    count = min(processes or len(paths) // share, MOST, _cpus() if processes is None else MOST)
    if count < 2:
        return read(paths)
    size = -(-len(paths) // count)
    shares = [paths[at : at + size] for at in range(0, len(paths), size)]
    with contextlib.ExitStack() as stack:
        workers = [_started(read, share, stack) for share in shares[1:]]
        found = read(shares[0])
        for worker, part in zip(workers, shares[1:], strict=True):
            found += (worker and _answered(*worker, len(part))) or read(part)
    return found


def answer() -> None:
    """A worker: take function and paths from stdin, and write what is read to stdout."""
    read, paths = pickle.load(sys.stdin.buffer)
    pickle.dump(read(paths), sys.stdout.buffer, protocol=5)


def _reports(paths: list[Path]) -> list[tuple[Common, Run]]:
    commons: dict[Common, Common] = {}
    layers: dict[tuple[str, ...] | None, tuple[str, ...] | None] = {}
    found = []
    for path in paths:
        common, run = read_report(path)  # of what all reports repeat, one copy is kept
        run = replace(run, layers=layers.setdefault(run.layers, run.layers))
        found.append((commons.setdefault(common, common), run))
    return found


def _started(
    read: Reader[T], paths: list[Path], stack: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], IO[bytes]] | None:
    """A worker and the file that it writes to, stopped when the block is left; None where none can be started.

    Question and answer go through files without a name, so that neither side waits for the other.
    """
    try:
        question = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 — the stack closes it
        answered = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 — the stack closes it
        pickle.dump((read, paths), question, protocol=5)
        question.seek(0)
        worker = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=question,
            stdout=answered,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    except OSError:
        return None
    stack.enter_context(worker)
    stack.callback(worker.kill)
    return worker, answered


def _answered(worker: subprocess.Popen[bytes], answered: IO[bytes], count: int) -> list[Any] | None:
    """What a worker read, or None where it failed."""
    if worker.wait() != 0:
        return None
    answered.seek(0)
    found = pickle.load(answered)
    return found if len(found) == count else None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
