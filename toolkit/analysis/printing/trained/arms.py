"""What each arm came to on each task, over its runs: losses, scores, health, memory; and averages over tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from toolkit.analysis.reading.trained import TrainedResults, once
from toolkit.analysis.reading.trained_file import ALL, Layers, TrainedRun

ONCE = "this draw only"
NOT_ABOVE = "not above chance"
CONSTANT = "constant prediction"
FLAGGING = (NOT_ABOVE, CONSTANT)
"""Flags that take a set out of the second average."""
HOW = ("not-graphed", "optimizer-not-fused")
"""Flags of how the machine computed; they make no score doubtful, and are said once for all arms."""
BY_SET = ("chance", "constant")
"""A report's own flags that its scores tell of, set by set."""


def entries(results: TrainedResults) -> list[dict[str, Any]]:
    """One entry a task, set of rows and arm, shared levers first, then each arm's own."""
    found = []
    for task in results.tasks:
        for own in (False, True):
            for arm in results.study.arms:
                runs = results.of(task, arm.name, own=own)
                if runs:
                    found += [_entry(results, runs, group, own) for group in groups(runs)]
    return found


def groups(runs: Sequence[TrainedRun]) -> list[str]:
    """The sets that a task's rows belong to, all rows together first."""
    names = list(dict.fromkeys(name for run in runs for name in run.scores if name != ALL))
    return [ALL, *names] if len(names) > 1 else [ALL]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation over the runs (n − 1; null for one) and the values themselves."""
    array = np.asarray(values, dtype=np.float64)
    return {
        "mean": float(array.mean()),
        "sd": float(array.std(ddof=1)) if len(array) > 1 else None,
        "values": [float(v) for v in array],
    }


def finite(value: float) -> float | None:
    """The value, or null where it was not measured."""
    return value if math.isfinite(value) else None


def _entry(results: TrainedResults, runs: list[TrainedRun], group: str, own: bool) -> dict[str, Any]:
    first, arm = runs[0], results.study.arm(runs[0].arm)
    scores = [run.scores[group] for run in runs]
    counted = [s.score for s in scores if s.score is not None]
    labels = list(dict.fromkeys(label for run in runs for label in run.labels))
    if once(arm) and not any(label.startswith(ONCE) for label in labels):
        labels.insert(0, ONCE)
    labels += [f"{lever} = {value}" for lever, value in arm.levers.items()]
    flows = (run.dataflow for run in runs if run.dataflow is not None)
    labels += dict.fromkeys(f"data flow {flow.key}, computed by {flow.execution}" for flow in flows)
    return {
        "task": first.task,
        "group": group,
        "arm": first.arm,
        "own": own,
        "runs": len(runs),
        "seeds": [str(run.seeds) for run in runs],
        "draws": results.study.draws_of(arm.name),
        "rows": scores[0].rows,
        "loss": spread([s.loss for s in scores]) if _measured(scores) else None,
        "metric": scores[0].metric,
        "score": spread(counted) if len(counted) == len(scores) else None,
        "chance": _one([s.chance for s in scores]),
        "unparsed": float(np.mean([s.unparsed for s in scores])),
        "further": {name: spread([s.further[name] for s in scores]) for name in _shared(scores)},
        "flags": flags(runs, group),
        "labels": labels,
        "train_rows": first.train.rows,
        "dropped": {"unusable": first.train.unusable, "cut": first.train.cut},
        "trainable": _range([run.course.trainable for run in runs]),
        "memory": memory(runs),
        "padding": float(np.mean([run.course.padding for run in runs])),
        "seconds": float(np.mean([run.course.seconds for run in runs])),
        "protect": _chosen(runs, "protect"),
        "adapt": _chosen(runs, "adapt"),
        "value": results.chosen(first.task, first.arm) if own else None,
    }


def _measured(scores: Sequence[Any]) -> bool:
    return all(math.isfinite(s.loss) for s in scores)


def _shared(scores: Sequence[Any]) -> list[str]:
    return [name for name in scores[0].further if all(name in s.further for s in scores)]


def _one(values: Sequence[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _range(values: Sequence[int]) -> list[int]:
    return [min(values), max(values)]


def flags(runs: Sequence[TrainedRun], group: str) -> list[dict[str, Any]]:
    """Health checks that did not pass: name, in how many of the runs, and one reason.

    Not above chance: the mean over the runs is not, by an exact one-sided test at .05 that counts rows once, or a run
    scores chance or less.
    """
    counts: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for run in runs:
        names = {CONSTANT} if run.scores[group].constant else set()
        if group == ALL:
            for flag in run.flags:
                if flag.severity == "flag" and flag.check not in (*BY_SET, *HOW):
                    names.add(flag.check)
                    reasons.setdefault(flag.check, f"{run.name}: {flag.reason}")
        counts.update(names)
    low = _not_above(runs, group)
    if low is not None:
        counts[NOT_ABOVE], reasons[NOT_ABOVE] = low
    return [{"flag": name, "runs": n, "of": len(runs), "reason": reasons.get(name)} for name, n in counts.items()]


def computed(runs: Sequence[TrainedRun]) -> list[str]:
    """How the machine computed otherwise than it was asked to: each reason, and in how many runs."""
    counts = Counter(flag.reason for run in runs for flag in run.flags if flag.check in HOW)
    return [f"{reason} ({count} of {len(runs)} runs)" for reason, count in counts.items()]


def _not_above(runs: Sequence[TrainedRun], group: str) -> tuple[int, str] | None:
    """How many runs are not above chance, and what the mean is, where that is flagged."""
    from toolkit.analysis.statistics.chance import above_chance

    scores = [run.scores[group] for run in runs]
    chance = _one([s.chance for s in scores])
    values = [s.score for s in scores if s.score is not None]
    if chance is None or len(values) < len(scores):
        return None
    rows, mean = scores[0].rows, math.fsum(values) / len(values)
    found = above_chance(mean * rows, rows, chance)
    if found.above and all(value > chance for value in values):
        return None
    low = sum(not above_chance(value * rows, rows, chance).above for value in values)
    return low, f"mean {scores[0].metric} {mean:.4f} of {rows} rows, chance {chance:.4f}, p = {found.p:.3f}"


def doubtful(entry: dict[str, Any]) -> bool:
    """Whether an entry's score is not above chance, or of constant predictions, in a run."""
    return any(flag["flag"] in FLAGGING for flag in entry["flags"])


def memory(runs: Sequence[TrainedRun]) -> dict[str, int | str] | None:
    """Bytes of the base and of the peak, the largest of the runs: allocated on a GPU, else resident."""
    for kind in ("allocated", "resident"):
        base, peak = f"base_{kind}", f"peak_{kind}"
        if all(base in run.memory and peak in run.memory for run in runs):
            found = {name: max(run.memory[f"{name}_{kind}"] for run in runs) for name in ("base", "peak")}
            return found | {"kind": kind}
    return None


def _chosen(runs: Sequence[TrainedRun], use: str) -> dict[str, Any] | None:
    """What the runs' layers have in common, and how far their draws are from what they are matched to."""
    chosen: list[Layers] = [c for c in (getattr(run, use) for run in runs) if c is not None]
    if not chosen:
        return None
    off = [c.mismatch for c in chosen if c.mismatch is not None]
    return {
        "selector": chosen[0].selector,
        "layers": _range([c.layers for c in chosen]),
        "parameters": _range([c.parameters for c in chosen]),
        "share": float(np.mean([c.parameters / c.of["parameters"] for c in chosen])),
        "of": chosen[0].of["layers"],
        "sets": len({c.hash for c in chosen}),
        "mismatch": max(off, key=abs) if off else None,
    }


def sets(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The sets that averages run over: a task's own sets where it has several, else all of its rows."""
    several = {e["task"] for e in found if e["group"] != ALL}
    keys = dict.fromkeys((e["task"], e["group"]) for e in found)
    return [(task, group) for task, group in keys if (group != ALL) == (task in several)]


def averages(results: TrainedResults, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each arm's unweighted average over the sets, over all of them and without those that are flagged in any arm.

    A run's average is over the sets, and the spread is that of the runs of one seed; arms that lack a task have none.
    """
    over = sets(found)
    if len(over) < 2:
        return []
    flagged = {(e["task"], e["group"]) for e in found if doubtful(e) and (e["task"], e["group"]) in over}
    kept = [key for key in over if key not in flagged]
    metrics = {e["metric"] for e in found if e["score"] is not None and (e["task"], e["group"]) in over}
    lines = []
    for own in (False, True):
        for arm in results.study.arms:
            whole = _average(results, arm.name, over, own)
            if whole is None:
                continue
            part = _average(results, arm.name, kept, own) if flagged and kept else None
            lines.append(
                {
                    "arm": arm.name,
                    "own": own,
                    "sets": [_named(*key) for key in over],
                    "flagged": [_named(*key) for key in over if key in flagged],
                    "metric": next(iter(metrics)) if len(metrics) == 1 else None,
                    "all": whole if len(metrics) == 1 else whole | {"score": None},
                    "unflagged": part if part is None or len(metrics) == 1 else part | {"score": None},
                }
            )
    return lines


def _named(task: str, group: str) -> str:
    return f"{task}/{group}" if group else task


def _average(results: TrainedResults, arm: str, over: list[tuple[str, str]], own: bool) -> dict[str, Any] | None:
    by_run: dict[Any, list[Any]] = {}
    for task, group in over:
        for run in results.of(task, arm, own=own):
            if group in run.scores:
                by_run.setdefault((run.seeds, run.draw), []).append(run.scores[group])
    whole = [scores for scores in by_run.values() if len(scores) == len(over)]
    if not whole:
        return None
    with_score = all(s.score is not None for scores in whole for s in scores)
    return {
        "runs": len(whole),
        "loss": spread([math.fsum(s.loss for s in scores) / len(over) for scores in whole])
        if all(_measured(scores) for scores in whole)
        else None,
        "score": spread([math.fsum(s.score or 0.0 for s in scores) / len(over) for scores in whole])
        if with_score
        else None,
    }


def unfinished(results: TrainedResults) -> list[dict[str, Any]]:
    """Runs that ended early: what ended them, at which step."""
    found = []
    for key, run in results.runs.items():
        if run.finished:
            continue
        fatal = run.fatal
        found.append(
            {
                "run": run.name,
                "what": str(key),
                "task": run.task,
                "arm": run.arm,
                "check": fatal.check if fatal else None,
                "reason": fatal.reason if fatal else None,
                "step": fatal.step if fatal and fatal.step is not None else run.course.steps,
                "layer": fatal.layer if fatal else None,
                "planned": run.course.planned,
            }
        )
    return found
