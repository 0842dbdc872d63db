"""The tables of timing sessions: each session's speeds and floor, margins over sessions, memory, where time goes."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.grid import NOTHING, Grid
from toolkit.analysis.printing.trained.cells import faster, gib, number, percent, span

NAMES = {"fastest_half": "fastest half", "median": "median", "mean": "mean", "best": "best"}
WITHIN = "within the floor"


def grids(timing: dict[str, Any]) -> list[Grid]:
    """Over sessions first, then each session, its speeds, memory and profile."""
    return [_over(timing), _estimators(timing), _sessions(timing), _speeds(timing), _memory(timing), _profile(timing)]


def gain(value: float | None, verdict: str) -> str:
    """A margin as a signed percentage; inside the floor it has no sign, because it is neither gain nor loss."""
    if value is None:
        return NOTHING
    return f"{WITHIN} ({percent(abs(value))})" if verdict == WITHIN else faster(value)


def _over(timing: dict[str, Any]) -> Grid:
    rows = []
    for arm in timing["arms"]:
        form = {"t": "95% interval", "range": "range", "one": "one session", None: NOTHING}[arm["form"]]
        inside = arm["verdict"] == WITHIN
        bounds = NOTHING if arm["low"] is None else f"{faster(arm['low'])} to {faster(arm['high'])}"
        if inside and arm["low"] is not None:
            bounds = f"within {percent(max(abs(arm['low']), abs(arm['high'])))}"
        rows.append(
            [
                arm["arm"],
                str(arm["sessions"]),
                str(arm["kept_out"]),
                gain(arm["faster"], arm["verdict"]),
                bounds,
                form,
                NOTHING if arm["smallest"] is None else percent(abs(arm["smallest"])),
                percent(arm["floor"]),
                {True: "yes", False: "no: one allocation", None: NOTHING}[arm["independent"]],
                arm["verdict"],
            ]
        )
    heading = ["arm", "sessions kept", "kept out", f"faster than {timing['baseline']}", "over sessions", "which is"]
    heading += ["smallest gap", "largest floor", "independent", "verdict"]
    title = (
        f"Speed over sessions, percent faster than {timing['baseline']} (fastest half of the rounds); two or three "
        f"sessions as a range, four or more as a t-interval; sessions with a floor of {percent(timing['limit'], 0)} or "
        "more are kept out; no margin inside its floor is a gain"
    )
    return Grid(title, heading, rows)


def _estimators(timing: dict[str, Any]) -> Grid:
    rows = [
        [arm["arm"], *(gain(arm["estimators"][e]["faster"], arm["estimators"][e]["verdict"]) for e in NAMES)]
        for arm in timing["arms"]
        if arm["estimators"]
    ]
    title = "The same margins under other estimators of an arm's speed, each beside that estimator's own floor"
    return Grid(title, ["arm", *NAMES.values()], rows)


def _sessions(timing: dict[str, Any]) -> Grid:
    rows = []
    for s in timing["sessions"]:
        twice = s["noisiest"]
        state = "; ".join(
            [*s["labels"], *(f"throttled: {t}" for t in s["throttled"]), *(f"other load: {t}" for t in s["load"])]
        )
        rows.append(
            [
                s["session"],
                s["host"],
                s["device"] + (f" {s['identity']}" if s["identity"] else ""),
                str(s["rounds"]),
                f"{s['seconds']:g}",
                percent(s["floor"]),
                f"{percent(s['single_gap'])}",
                percent(s["largest_gap"]),
                NOTHING if twice is None else f"{twice['arm']} {percent(twice['gap'])}",
                NOTHING if s["clocks"] is None else span([int(c) for c in s["clocks"]]),
                "yes" if s["kept"] else "no",
                "yes" if s["independent"] else "no: shares its allocation",
                state,
            ]
        )
    heading = ["session", "host", "device", "rounds", "seconds", "floor", "one gap", "largest gap", "noisiest's gap"]
    heading += ["clock MHz", "kept", "independent", "state"]
    title = (
        f"Timing sessions on task {timing['task']}: the floor is the upper 95% bound of the gap between two runs of "
        "one configuration, from the baseline's duplicates; one gap is the paper's floor; seconds of each arm in "
        "each round"
    )
    return Grid(title, heading, rows)


def _speeds(timing: dict[str, Any]) -> Grid:
    rows, breaks = [], []
    for s in timing["sessions"]:
        if rows:
            breaks.append(len(rows))
        for at, arm in enumerate(s["arms"]):
            own = arm["arm"] == timing["baseline"]
            verdict = arm["verdict"]
            ratio = number(arm["paired_ratio"], 3)
            if arm["paired_low"] is not None:
                ratio += f" ({number(arm['paired_low'], 3)} to {number(arm['paired_high'], 3)})"
            rows.append(
                [
                    s["session"] if at == 0 else "",
                    arm["arm"] + (f", duplicate {arm['duplicate']}" if arm["duplicate"] else ""),
                    *(_speed(arm[name]) for name in NAMES),
                    f"{arm['tokens_per_second']:,.0f}",
                    NOTHING if own else gain(arm["faster"], verdict),
                    ratio,
                    "; ".join(
                        ["baseline" if own else verdict]
                        + ([] if s["kept"] or own else ["session kept out"])
                        + [f"{name} = {value}" for name, value in arm["levers"].items()]
                    ),
                ]
            )
    heading = ["session", "arm", *NAMES.values(), "tokens/s", f"faster than {timing['baseline']}"]
    heading += ["ratio within rounds", "verdict"]
    title = (
        "Optimizer steps a second of every arm and session (mean of the fastest half of the rounds, median, mean, "
        "best), real tokens a second, margin over the mean of the baseline's runs, and the geometric mean of the ratio "
        "to the baseline's other runs within rounds, with its 95% interval"
    )
    return Grid(title, heading, rows, breaks)


def _speed(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _memory(timing: dict[str, Any]) -> Grid:
    found: dict[str, list[dict[str, int]]] = {}
    for s in timing["sessions"]:
        for arm in s["arms"]:
            if arm["memory"] is not None and arm["duplicate"] == 0:
                found.setdefault(arm["arm"], []).append(arm["memory"])
    base = found.get(timing["baseline"])
    least = None if base is None else max(m["peak_allocated"] for m in base)
    rows = []
    for arm, sizes in found.items():
        largest = {name: max(m[name] for m in sizes) for name in sizes[0]}
        more = NOTHING
        if least is not None and arm != timing["baseline"]:
            gap = largest["peak_allocated"] - least
            more = ("+" if gap > 0 else "−" if gap < 0 else "") + gib(abs(gap))
        names = ("base_allocated", "base_reserved", "peak_allocated", "peak_reserved")
        rows.append([arm, *(gib(largest[name]) for name in names), more])
    heading = ["arm", "base, allocated", "base, reserved", "peak, allocated", "peak, reserved"]
    heading.append(f"peak over {timing['baseline']}")
    title = (
        "Memory in a pass of its own, GiB (resident on a CPU): after building, and at the peak; largest of the sessions"
    )
    return Grid(title, heading, rows)


def _profile(timing: dict[str, Any]) -> Grid:
    latest: dict[str, dict[str, float]] = {}
    for s in timing["sessions"]:
        for arm in s["arms"]:
            if arm["profile"] and arm["duplicate"] == 0:
                latest[arm["arm"]] = arm["profile"]
    parts = list(dict.fromkeys(part for profile in latest.values() for part in profile))
    rows = [
        [arm, *(percent(profile[part], 0) if part in profile else NOTHING for part in parts)]
        for arm, profile in latest.items()
    ]
    title = "Where a step's wall time goes, one profiled cycle outside the samples, latest session that has one"
    return Grid(title, ["arm", *parts], rows)
