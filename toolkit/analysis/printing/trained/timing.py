"""Timing sessions as plain data: every arm's speed, each session's noise floor, and margins over sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from toolkit.analysis.reading import sessions as reading
from toolkit.analysis.statistics import timing as statistics
from toolkit.records.finetuning import FineTuning
from toolkit.records.session import Session, Timed

ESTIMATORS = ("fastest_half", "median", "mean", "best")
"""Of an arm's rounds; the first is the paper's, and the one that verdicts rest on."""


def timing(sessions: Sequence[Session], study: FineTuning) -> dict[str, Any]:
    """The sessions, oldest first, and each arm over the kept ones.

    Speeds are optimizer steps a second on the fixed list of batches, so that a ratio of speeds is also one of tokens.

    Raises:
        InputError: as `toolkit.analysis.statistics.timing`.
    """
    shared = Counter(session.machine.allocation for session in sessions)
    made = [_session(session, shared[session.machine.allocation] > 1, study) for session in sessions]
    names = list(dict.fromkeys(arm.arm for session in sessions for arm in session.arms))
    base = sessions[0].baseline
    return {
        "task": sessions[0].task,
        "baseline": base,
        "limit": max(session.protocol.floor for session in sessions),
        "kept": sum(s["kept"] for s in made),
        "allocations": len(shared),
        "sessions": made,
        "arms": [found for name in names if name != base and (found := _over_sessions(made, name)) is not None],
    }


def _session(session: Session, shared: bool, study: FineTuning) -> dict[str, Any]:
    base = [arm for arm in session.arms if arm.arm == session.baseline]
    twice = next((a.arm for a in session.arms if a.arm != session.baseline and a.duplicate > 0), None)
    noisiest = [arm for arm in session.arms if arm.arm == twice]
    floors = {
        name: statistics.floor(
            [_estimate(arm, name) for arm in base],
            [_estimate(arm, name) for arm in noisiest] or None,
            limit=session.protocol.floor,
            what=f"{session.baseline} in session {session.session}",
        )
        for name in ESTIMATORS
    }
    floor = floors[ESTIMATORS[0]]
    machine = session.machine
    labels = list(session.labels)
    if session.declaration != study.declaration:
        labels.append("timed under another version of the study's file")
    return {
        "session": session.session,
        "started": session.provenance.started,
        "host": machine.host,
        "device": machine.device,
        "identity": machine.identity,
        "allocation": machine.allocation,
        "independent": not shared,
        "rounds": len(base[0].samples),
        "seconds": session.protocol.seconds,
        "floor": floor.bound,
        "single_gap": floor.single,
        "largest_gap": floor.largest,
        "noisiest": None if twice is None else {"arm": twice, "gap": floor.noisiest},
        "duplicates": floor.duplicates,
        "kept": floor.kept,
        "limit": floor.limit,
        "sentence": floor.sentence,
        "throttled": reading.throttled(session),
        "load": reading.load(session),
        "clocks": _clocks(session),
        "labels": labels,
        "deterministic": _deterministic(session, base, floor),
        "arms": [_arm(arm, base, floors) | {"levers": _differing(arm, base[0])} for arm in _in_order(session.arms)],
    }


def _deterministic(session: Session, base: list[Timed], floor: statistics.Floor) -> dict[str, Any] | None:
    """What deterministic kernels cost the baseline: the speed that it has without them, beside the floor."""
    if not session.free:
        return None
    name, what = ESTIMATORS[0], f"{session.baseline} without deterministic kernels"
    free = reading.speeds(session.free)
    found = statistics.margin(
        float(getattr(statistics.speed(free, what), name)), [_estimate(arm, name) for arm in base], floor.bound
    )
    ratio = statistics.paired_ratio(free, [list(reading.speeds(arm)) for arm in base], what=what)
    return {
        "faster_without": found.value,
        "verdict": found.verdict,
        "paired_ratio": ratio.value,
        "paired_low": ratio.low,
        "paired_high": ratio.high,
    }


def _in_order(arms: Sequence[Timed]) -> list[Timed]:
    """Each arm's duplicates after its first run."""
    names = list(dict.fromkeys(arm.arm for arm in arms))
    return sorted(arms, key=lambda arm: (names.index(arm.arm), arm.duplicate))


def _differing(arm: Timed, base: Timed) -> dict[str, Any]:
    """The levers that an arm has otherwise than the baseline, such as deterministic kernels, whose cost this shows."""
    mine, theirs = arm.levers.model_dump(mode="json"), base.levers.model_dump(mode="json")
    return {name: value for name, value in mine.items() if value != theirs[name]}


def _estimate(arm: Timed, name: str) -> float:
    speed = statistics.speed(reading.speeds(arm), f"arm {arm.arm}")
    return float(getattr(speed, name))


def _clocks(session: Session) -> list[float] | None:
    clocks = [s.clock for arm in session.arms for s in arm.samples if s.clock is not None]
    return [min(clocks), max(clocks)] if clocks else None


def _arm(arm: Timed, base: list[Timed], floors: dict[str, statistics.Floor]) -> dict[str, Any]:
    estimates = {name: _estimate(arm, name) for name in ESTIMATORS}
    margins = {
        name: statistics.margin(estimates[name], [_estimate(b, name) for b in base], floors[name].bound)
        for name in ESTIMATORS
    }
    main = margins[ESTIMATORS[0]]
    rest = [other for other in base if other is not arm]
    ratio = statistics.paired_ratio(
        reading.speeds(arm), [list(reading.speeds(other)) for other in rest], what=f"arm {arm.arm}"
    )
    tokens = statistics.speed(reading.tokens(arm), f"arm {arm.arm}")
    return {
        "arm": arm.arm,
        "duplicate": arm.duplicate,
        **estimates,
        "tokens_per_second": tokens.fastest_half,
        "rounds": [float(v) for v in reading.speeds(arm)],
        "faster": main.value,
        "verdict": main.verdict,
        "margins": {name: {"faster": m.value, "floor": m.floor, "verdict": m.verdict} for name, m in margins.items()},
        "paired_ratio": ratio.value,
        "paired_low": ratio.low,
        "paired_high": ratio.high,
        "trainable": arm.trainable,
        "memory": None if arm.memory is None else arm.memory.model_dump(mode="json"),
        "profile": dict(arm.profile),
    }


def _margin(found: dict[str, Any]) -> statistics.Margin:
    return statistics.Margin(found["faster"], found["floor"], found["verdict"])


def _over_sessions(sessions: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """An arm's first run over the kept sessions; where none is kept, that is said."""
    timed = [s for s in sessions if any(a["arm"] == name for a in s["arms"])]
    kept = [s for s in timed if s["kept"]]
    firsts = [next(a for a in s["arms"] if a["arm"] == name) for s in kept]
    if not kept:
        return {
            **{"arm": name, "sessions": 0, "kept_out": len(timed), "faster": None, "sd": None, "low": None},
            **{"high": None, "form": None, "floor": None, "smallest": None, "independent": None, "notes": []},
            **{"verdict": "no session was kept", "estimators": {}},
        }
    across = {
        e: statistics.across(
            [_margin(a["margins"][e]) for a in firsts],
            [s["allocation"] for s in kept],
            what=f"arm {name}",
        )
        for e in ESTIMATORS
    }
    main = across[ESTIMATORS[0]]
    return {
        "arm": name,
        "sessions": main.sessions,
        "kept_out": len(timed) - len(kept),
        "faster": main.mean,
        "sd": main.sd,
        "low": main.low,
        "high": main.high,
        "form": main.form,
        "floor": max(s["floor"] for s in kept),
        "smallest": min((a["faster"] for a in firsts), key=abs),
        "independent": main.independent,
        "verdict": main.verdict,
        "notes": list(main.notes),
        "estimators": {e: {"faster": found.mean, "verdict": found.verdict} for e, found in across.items()},
    }
