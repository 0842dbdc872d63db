"""Many reports read by several processes; few by this one.

A worker is a fresh interpreter that is given paths and answers with what it read: it neither forks a process
that may hold threads nor imports the caller's script. Where one fails, this process reads its share itself, so
that errors are always raised here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO

from toolkit.analysis.report_file import Common, Run, read_report

SHARE = 1500
"""A worker is started for every so many reports: it must save more than its start, about half a second."""
MOST = 8

START = "from toolkit.analysis.workers import answer; answer()"

Answer = list[tuple[Common, Run]]


def read_reports(paths: list[Path], processes: int | None = None) -> Answer:
    """What `read_report` gives for each path, in order.

    Args:
        paths: of report files.
        processes: how many share the work, this one included; by default as many as pay off, and at most one a
            CPU.

    Raises:
        InputError: as `read_report`, for the first path of a share that it refuses.
    """
    count = min(processes or len(paths) // SHARE, MOST, _cpus() if processes is None else MOST)
    if count < 2:
        return _read(paths)
    size = -(-len(paths) // count)
    shares = [paths[at : at + size] for at in range(0, len(paths), size)]
    with contextlib.ExitStack() as stack:
        workers = [_started(share, stack) for share in shares[1:]]
        found = _read(shares[0])
        for worker, share in zip(workers, shares[1:], strict=True):
            found += (worker and _answered(*worker, len(share))) or _read(share)
    return found


def answer() -> None:
    """A worker: read the paths on stdin, and write what is read to stdout."""
    paths = pickle.load(sys.stdin.buffer)
    pickle.dump(_read(paths), sys.stdout.buffer, protocol=5)


def _read(paths: list[Path]) -> Answer:
    commons: dict[Common, Common] = {}
    layers: dict[tuple[str, ...] | None, tuple[str, ...] | None] = {}
    found = []
    for path in paths:
        common, run = read_report(path)  # of what all reports repeat, one copy is kept
        run = replace(run, layers=layers.setdefault(run.layers, run.layers))
        found.append((commons.setdefault(common, common), run))
    return found


def _started(paths: list[Path], stack: contextlib.ExitStack) -> tuple[subprocess.Popen[bytes], IO[bytes]] | None:
    """A worker and the file that it writes to, stopped when the block is left; None where none can be started.

    Question and answer go through files without a name, so that neither side waits for the other.
    """
    try:
        question = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 — the stack closes it
        answered = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 — the stack closes it
        pickle.dump(paths, question, protocol=5)
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


def _answered(worker: subprocess.Popen[bytes], answered: IO[bytes], count: int) -> Answer | None:
    """What a worker read, or None where it failed."""
    if worker.wait() != 0:
        return None
    answered.seek(0)
    found = pickle.load(answered)
    return found if len(found) == count else None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
