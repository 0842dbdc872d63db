"""A fine-tuning study's table as CSV lines: runs, arms, averages, contrasts, noise, trials, timing."""

from __future__ import annotations

from typing import Any

COLUMNS = (
    *("study", "form", "model", "fingerprint", "part", "task", "group", "arm", "own", "run", "role", "seeds", "draw"),
    *("value", "finished", "runs", "rows", "outcome", "metric", "loss", "loss_sd", "score", "score_sd", "chance"),
    *("unparsed", "trainable", "base_bytes", "peak_bytes", "memory_kind", "padding", "seconds", "flags"),
    *("first", "second", "why", "paired", "difference", "low", "high", "error", "df", "p", "corrected_p"),
    *("seeds_low", "seeds_high", "seeds_p", "rows_low", "rows_high", "permutation_p", "attainable_p"),
    *("detectable", "seeds_asked", "margin", "equivalent", "equivalence_p", "smallest_margin", "spread_known"),
    *("this_draw_only", "verdict", "gained", "lost", "mcnemar_p", "repeat_sd", "total_sd", "seed_sd"),
    *("session", "duplicate", "fastest_half", "median", "mean", "best", "tokens_per_second", "faster"),
    *("paired_ratio", "floor", "single_gap", "kept", "independent", "sessions"),
)


def lines(data: dict[str, Any]) -> list[dict[str, Any]]:
    """One dictionary a line; what does not apply is left out."""
    head = {key: data[key] for key in ("study", "form", "model", "fingerprint")}
    found = [_run(run) for run in data["runs"]] + [_arm(entry) for entry in data["arms"]]
    for entry in data["averages"]:
        for part, what in (("average", "all"), ("average-unflagged", "unflagged")):
            if entry[what] is not None:
                found.append({"part": part} | {k: entry[k] for k in ("arm", "own", "metric")} | _spreads(entry[what]))
    found += [_contrast(entry) for entry in data["contrasts"]]
    for entry in data["noise"]:
        names = ("task", "arm", "outcome", "repeat_sd", "total_sd", "seed_sd", "p")
        found.append({"part": "noise"} | {name: entry[name] for name in names})
    for entry in (data["tune"] or {"arms": []})["arms"]:
        for trial in entry["trials"]:
            found.append({"part": "trial", "task": entry["task"], "arm": entry["arm"]} | trial)
    found += _timing(data["timing"])
    return [head | line for line in found]


def _run(run: dict[str, Any]) -> dict[str, Any]:
    names = ("task", "arm", "own", "run", "role", "draw", "value", "finished", "loss", "score")
    seeds = run["seeds"]
    return (
        {"part": "run"}
        | {name: run[name] for name in (*names, "trainable", "padding", "seconds")}
        | {"seeds": "/".join(str(seeds[name]) for name in ("adapter", "data", "draw", "repeat"))}
    )


def _arm(entry: dict[str, Any]) -> dict[str, Any]:
    names = ("task", "group", "arm", "own", "value", "runs", "rows", "metric", "chance", "unparsed", "padding")
    held = entry["memory"] or {}
    return (
        {"part": "arm"}
        | {name: entry[name] for name in (*names, "seconds")}
        | _spreads(entry)
        | {"trainable": max(entry["trainable"]), "flags": "; ".join(f["flag"] for f in entry["flags"])}
        | {"base_bytes": held.get("base"), "peak_bytes": held.get("peak"), "memory_kind": held.get("kind")}
    )


def _spreads(entry: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in ("loss", "score"):
        if entry[name] is not None:
            found |= {name: entry[name]["mean"], f"{name}_sd": entry[name]["sd"]}
    return found | {"runs": entry["runs"]}


def _contrast(entry: dict[str, Any]) -> dict[str, Any]:
    names = ("task", "outcome", "own", "first", "second", "why", "rows", "paired", "difference", "permutation_p")
    both, equal, power, flips = entry["both"], entry["equivalence"], entry["power"], entry.get("flips")
    return (
        {"part": "contrast"}
        | {name: entry[name] for name in (*names, "spread_known", "this_draw_only", "verdict")}
        | {name: both[name] for name in ("low", "high", "error", "df")}
        | {"p": entry["p"], "runs": "+".join(map(str, entry["runs"])), "corrected_p": entry["adjusted"]}
        | {f"seeds_{name}": entry["seeds"][name] for name in ("low", "high", "p")}
        | {f"rows_{name}": entry["rows_only"][name] for name in ("low", "high")}
        | {"attainable_p": entry["attainable"], "detectable": power["detectable_both"], "seeds_asked": power["seeds"]}
        | {"margin": equal["margin"], "equivalent": equal["passed"], "equivalence_p": equal["p"]}
        | {"smallest_margin": equal["smallest"]}
        | ({} if flips is None else {name: flips[name] for name in ("gained", "lost")})
        | ({} if flips is None else {"mcnemar_p": flips["pooled"]["p"]})
    )


def _timing(timing: dict[str, Any] | None) -> list[dict[str, Any]]:
    if timing is None:
        return []
    found = []
    for session in timing["sessions"]:
        shared = {name: session[name] for name in ("session", "floor", "single_gap", "kept", "independent")}
        for arm in session["arms"]:
            names = ("arm", "duplicate", "fastest_half", "median", "mean", "best", "tokens_per_second", "faster")
            memory = arm["memory"] or {}
            found.append(
                {"part": "timing", "task": timing["task"]}
                | shared
                | {name: arm[name] for name in (*names, "paired_ratio", "verdict")}
                | {"base_bytes": memory.get("base_allocated"), "peak_bytes": memory.get("peak_allocated")}
            )
    for arm in timing["arms"]:
        names = ("arm", "sessions", "faster", "low", "high", "floor", "verdict")
        found.append({"part": "timing-sessions", "task": timing["task"]} | {name: arm[name] for name in names})
    return found
