"""What timing sessions say in words."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.trained.cells import faster, percent
from toolkit.analysis.printing.trained.timing_grids import WITHIN


def sentences(timing: dict[str, Any]) -> list[str]:
    """One sentence an arm, then what the sessions are."""
    said = [_arm(timing, arm) for arm in timing["arms"]]
    said += [_cost(timing["baseline"], s) for s in timing["sessions"] if s["deterministic"] is not None]
    out = [s for s in timing["sessions"] if not s["kept"]]
    if out:
        floors = ", ".join(f"{s['session']}: {percent(s['floor'])}" for s in out)
        said.append(
            f"Kept out, because the floor is not below {percent(timing['limit'], 0)}: {floors}. There the floor is the "
            "size of the effects that are measured."
        )
    shared = [s["session"] for s in timing["sessions"] if not s["independent"]]
    if shared:
        said.append(
            f"Not independent: sessions {', '.join(shared)} share an allocation of the machine with another one; other "
            "allocations may differ by more."
        )
    return said


def _cost(baseline: str, session: dict[str, Any]) -> str:
    """What deterministic kernels cost, in one session."""
    found, floor = session["deterministic"], percent(session["floor"])
    where = f"in session {session['session']}" + ("" if session["kept"] else ", which is kept out")
    if found["verdict"] == WITHIN:
        return f"Deterministic kernels cost {baseline} no time beyond the floor of {floor} {where}."
    return (
        f"Deterministic kernels cost: {baseline} is {percent(abs(found['faster_without']))} {found['verdict']} without "
        f"them {where} (floor {floor})."
    )


def _arm(timing: dict[str, Any], arm: dict[str, Any]) -> str:
    name, base = arm["arm"], timing["baseline"]
    if arm["sessions"] == 0:
        return f"Speed of {name} against {base}: no session was kept, and nothing is claimed."
    count = f"{arm['sessions']} session{'s' if arm['sessions'] > 1 else ''}"
    notes = "; ".join(arm["notes"])
    if arm["verdict"] == WITHIN:
        return (
            f"{name} is not told from {base} in speed over {count}: the gap is within the floor in at least one, or "
            f"its interval holds zero (largest floor {percent(arm['floor'])}){'; ' + notes if notes else ''}."
        )
    bounds = {"t": "95% interval ", "range": "range "}.get(arm["form"])
    over = f" ({bounds}{faster(arm['low'])} to {faster(arm['high'])})" if bounds else ""
    return (
        f"{name} is {percent(abs(arm['faster']))} {arm['verdict']} than {base} over {count}{over}, beyond every "
        f"session's floor (largest {percent(arm['floor'])}){'; ' + notes if notes else ''}."
    )
