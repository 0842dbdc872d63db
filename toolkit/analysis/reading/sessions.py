"""Reading a study's timing sessions: every one checked, alone and against the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from toolkit.analysis.reading.reports import same
from toolkit.errors import InputError
from toolkit.records.session import TIMING, Sample, Session, Timed


def read_sessions(folder: Path, study: str) -> list[Session]:
    """The timing sessions in a results folder, oldest first.

    Args:
        folder: results folder; its sessions are `timing/*.json`.
        study: the study's name.

    Raises:
        InputError: a file is damaged, foreign or of another study; the baseline has fewer than three runs; an arm
            stands twice or lacks a round; or sessions differ in form, model, weights, task, baseline, or in the
            list of batches.
    """
    paths = sorted((folder / TIMING).glob("*.json"))
    found = [Session.load(path) for path in paths]
    for path, session in zip(paths, found, strict=True):
        if session.study != study:
            raise InputError(f"{path} is a session of study {session.study!r}, and {study!r} is asked for")
        if reason := _wrong(session):
            raise InputError(f"{path}: {reason}; move it away, and `toolkit time` makes another session")
    same(paths, [s.form for s in found], "form", str)
    same(paths, [s.model for s in found], "model", str)
    same(paths, [s.fingerprint for s in found], "weights fingerprint", lambda v: v[:12])
    same(paths, [s.task for s in found], "task", str)
    same(paths, [s.baseline for s in found], "baseline", str)
    same(paths, [str(s.batches) for s in found], "the list of batches", lambda v: f"{v.count('{')} batches")
    twice = [name for name, count in Counter(s.session for s in found).items() if count > 1]
    if twice:
        raise InputError(f"two files in {folder / TIMING} tell of session {twice[0]!r}; keep one of them")
    return sorted(found, key=lambda session: (session.provenance.started, session.session))


def _wrong(session: Session) -> str | None:
    """What a session must not be, in words."""
    counts = Counter((arm.arm, arm.duplicate) for arm in session.arms)
    for (arm, duplicate), count in counts.items():
        if count > 1:
            return f"arm {arm!r}, duplicate {duplicate}, stands {count} times"
    base = sum(arm.arm == session.baseline for arm in session.arms)
    if base < 3:
        return f"the baseline {session.baseline!r} has {base} runs, and a noise floor asks for three or more"
    rounds = {sample.round for arm in session.arms for sample in arm.samples}
    for arm in session.arms:
        mine = [sample.round for sample in arm.samples]
        if not mine or set(mine) != rounds or len(mine) != len(rounds):
            return f"arm {arm.arm!r}, duplicate {arm.duplicate}, has rounds {mine} of {sorted(rounds)}"
        for sample in arm.samples:
            if not math.isfinite(sample.seconds) or sample.steps < 1 or sample.tokens < 1:
                return f"arm {arm.arm!r}, round {sample.round}: {sample.steps} steps in {sample.seconds} seconds"
    free = sorted(sample.round for sample in session.free)
    if free and free != sorted(rounds):
        return f"the baseline with kernels that need not be deterministic has rounds {free} of {sorted(rounds)}"
    return None


def speeds(timed: Timed | Sequence[Sample]) -> np.ndarray:
    """Optimizer steps a second of one arm, in the order of the rounds, float64 (rounds,)."""
    samples = timed.samples if isinstance(timed, Timed) else timed
    return np.array([s.steps / s.seconds for s in sorted(samples, key=lambda s: s.round)], dtype=np.float64)


def tokens(timed: Timed) -> np.ndarray:
    """Real tokens (no padding) a second of one arm, in the order of the rounds, float64 (rounds,)."""
    return np.array([s.tokens / s.seconds for s in sorted(timed.samples, key=lambda s: s.round)], dtype=np.float64)


def throttled(session: Session) -> list[str]:
    """What slowed the device during the samples, each reason once."""
    return sorted({reason for arm in session.arms for sample in arm.samples for reason in sample.throttled})


def load(session: Session) -> list[str]:
    """Other work on the device during the samples, each once."""
    return sorted({name for arm in session.arms for sample in arm.samples for name in sample.load})
