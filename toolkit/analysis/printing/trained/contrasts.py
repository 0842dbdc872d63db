"""The declared contrasts: arms against the baseline, against their matched random arms, and further pairs."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import numpy as np

from toolkit.analysis.printing.trained.arms import ONCE
from toolkit.analysis.reading.outcomes import Reader, Scored
from toolkit.analysis.reading.trained import TrainedResults, once
from toolkit.analysis.reading.trained_file import ALL
from toolkit.analysis.statistics.runs import UNKNOWN, Contrast, Runs

AVERAGE, UNFLAGGED = "all tasks", "tasks not flagged"
OUTCOMES = ("loss", "score")
UNITS = {"loss": "nats a target token", "score": "from 0 to 1"}
BETTER = {"loss": -1, "score": 1}
"""Sign of a better difference."""


def pairs(results: TrainedResults) -> list[tuple[str, str, str]]:
    """(first, second, why), each once: every arm − baseline, every arm − its matched random arm, declared ones."""
    study, found = results.study, {}
    base = study.analysis.baseline
    wanted = [(arm.name, base, "baseline") for arm in study.arms if arm.name != base]
    for arm in study.arms:
        for choice in (arm.protect, arm.adapt):
            if choice is not None and choice.like is not None:
                wanted.append((choice.like, arm.name, "matched"))
    wanted += [(first, second, "declared") for first, second in study.analysis.pairs]
    for first, second, why in wanted:
        if first != second and (second, first) not in found:
            if (first, second) in found and why not in found[first, second]:
                found[first, second] += f", {why}"
            found.setdefault((first, second), why)
    return [(first, second, why) for (first, second), why in found.items()]


def contrasts(results: TrainedResults, reader: Reader, flagged: Collection[str] = ()) -> list[dict[str, Any]]:
    """One entry an outcome, task and pair, the declared outcome first; then averages, with and without flagged tasks.

    The family that is corrected: the declared outcome's contrasts on all tasks, at the shared levers. Averages over
    tasks, arms at their own value, and the other outcome are families of their own.
    """
    declared = results.study.analysis.outcome
    kept = [task for task in results.tasks if task not in flagged]
    averages = [(results.tasks, AVERAGE)] if len(results.tasks) > 1 else []
    averages += [(kept, UNFLAGGED)] if averages and 0 < len(kept) < len(results.tasks) else []
    found: list[dict[str, Any]] = []
    for own in (False, True):
        for outcome in (declared, *(o for o in OUTCOMES if o != declared)):
            mine = [
                entry
                for task in results.tasks
                for pair in pairs(results)
                if (entry := _on_task(results, reader, task, pair, outcome, own)) is not None
            ]
            found += corrected(mine, results)
            for tasks, label in averages:
                over = [
                    entry
                    for pair in pairs(results)
                    if (entry := _over_tasks(results, reader, pair, outcome, own, tasks, label)) is not None
                ]
                found += corrected(over, results)
    return found


def corrected(family: list[dict[str, Any]], results: TrainedResults) -> list[dict[str, Any]]:
    """The family with corrected p-values and what each contrast comes to."""
    from toolkit.analysis.statistics.multiplicity import holm

    analysis = results.study.analysis
    tested = [entry for entry in family if entry["p"] is not None]
    ps = [entry["p"] for entry in tested]
    adjusted = [float(p) for p in holm(ps)] if analysis.correction == "holm" and ps else ps
    for entry in family:
        entry["adjusted"], entry["family"] = None, len(tested)
    for entry, p in zip(tested, adjusted, strict=True):
        entry["adjusted"] = p
    for entry in family:
        entry["verdict"] = _verdict(entry, analysis.level)
    return family


def _verdict(entry: dict[str, Any], level: float) -> str:
    """better, worse, equivalent, or not separated: by the corrected p, and by a declared margin alone."""
    if entry["adjusted"] is None:
        return "not tested"
    equal = entry["equivalence"]["passed"]
    if entry["adjusted"] <= level:
        side = "better" if entry["difference"] * BETTER[entry["outcome"]] > 0 else "worse"
        return f"{side}, within the margin" if equal else side
    return "equivalent" if equal else "not separated"


def _runs(results: TrainedResults, reader: Reader, task: str, arm: str, outcome: str, own: bool) -> Runs | None:
    """An arm's outcomes on a task; None where it has no finished run, or its rows have no score."""
    runs = results.of(task, arm, own=own)
    if not runs:
        return None
    return _table(reader.scored(runs), outcome, results, arm)


def _table(scored: Scored, outcome: str, results: TrainedResults, arm: str) -> Runs | None:
    """An arm's outcomes, one line a set of seeds: over a declared grid, the mean over its draws."""
    values = scored.loss if outcome == "loss" else scored.score
    if values is None:
        return None
    keys = [str(run.seeds) for run in scored.runs]
    if results.study.draws_of(arm) is not None:
        names = list(dict.fromkeys(keys))
        values = np.stack([values[[k == name for k in keys]].mean(axis=0) for name in names])
        keys = names
    return Runs(values, scored.tokens if outcome == "loss" else np.ones(values.shape[1]), tuple(keys))


def _on_task(
    results: TrainedResults, reader: Reader, task: str, pair: tuple[str, str, str], outcome: str, own: bool
) -> dict[str, Any] | None:
    first, second, why = pair
    if own and not (results.of(task, first, own=True) or results.of(task, second, own=True)):
        return None
    tables = [_runs(results, reader, task, arm, outcome, own) for arm in (first, second)]
    if tables[0] is None or tables[1] is None:
        return None
    entry = _compared(results, tables[0], tables[1], pair, task, outcome, own)
    if outcome == "score":
        entry["flips"] = _flips(tables[0], tables[1])
    if any(results.study.draws_of(arm) for arm in (first, second)):
        over = entry["random_draws"] = _random_draws(results, reader, task, (first, second), outcome, own)
        if over is None:
            entry["notes"].append("of these draws: too few draws, or both arms have some, for draw as a random effect")
        elif over["p"] is not None and entry["p"] is not None:
            entry["p"] = max(entry["p"], over["p"])
            entry["notes"].append("p is the larger of that over seeds and rows, and that over draws and seeds")
    return entry | {"why": why}


def _over_tasks(
    results: TrainedResults,
    reader: Reader,
    pair: tuple[str, str, str],
    outcome: str,
    own: bool,
    tasks: list[str],
    label: str,
) -> dict[str, Any] | None:
    """The plain average over tasks, of the seeds that all have; None where an arm lacks a task, or metrics differ."""
    if own and not any(results.of(task, arm, own=True) for task in tasks for arm in pair[:2]):
        return None
    metrics = {run.scores[ALL].metric for task in tasks for run in results.of(task, pair[0])}
    if outcome == "score" and len(metrics) > 1:
        return None
    sides = []
    for arm in pair[:2]:
        tables = [table for t in tasks if (table := _runs(results, reader, t, arm, outcome, own)) is not None]
        if len(tables) < len(tasks) or not set.intersection(*(set(table.seeds) for table in tables)):
            return None
        sides.append(Runs.average(tables))
    return _compared(results, sides[0], sides[1], pair, label, outcome, own) | {"why": pair[2]}


def _compared(
    results: TrainedResults, a: Runs, b: Runs, pair: tuple[str, str, str], task: str, outcome: str, own: bool
) -> dict[str, Any]:
    from toolkit.analysis.statistics.contrasts import contrast

    analysis = results.study.analysis
    primary = outcome == analysis.outcome and not own
    found: Contrast = contrast(
        a,
        b,
        paired=analysis.paired,
        coverage=1 - analysis.level,
        margin=analysis.margin if outcome == analysis.outcome else None,
        resamples=analysis.resamples if primary and task in results.tasks else None,
        what=f"{pair[0]} − {pair[1]} on {task}",
    )
    notes = [note for note in found.notes if note != UNKNOWN]
    if any(once(results.study.arm(arm)) for arm in pair[:2]):
        notes.append(f"{ONCE}: one random draw serves all seeds")
    return {
        "outcome": outcome,
        "primary": primary,
        "task": task,
        "own": own,
        "first": pair[0],
        "second": pair[1],
        "unit": UNITS[outcome],
        "means": [found.first, found.second],
        "sds": [found.first_sd, found.second_sd],
        "runs": list(found.runs),
        "rows": found.rows,
        "paired": found.paired,
        "difference": found.difference,
        "p": found.both.p,
        "both": _plain(found.both),
        "seeds": _plain(found.seeds),
        "rows_only": _plain(found.rows_only),
        "permutation_p": found.permutation_p,
        "attainable": found.attainable,
        "spread_known": found.spread_known,
        "equivalence": _plain(found.equivalence),
        "power": _plain(found.power),
        "pairing": None if found.pairing is None else _plain(found.pairing),
        "this_draw_only": any(once(results.study.arm(arm)) for arm in pair[:2]),
        "notes": notes,
    }


def _plain(record: Any) -> dict[str, Any]:
    """A dataclass as JSON data: numbers that are not finite become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(v) for name, v in value.items()}
        if isinstance(value, tuple | list):
            return [plain(v) for v in value]
        if isinstance(value, np.generic):
            value = value.item()
        return value if not isinstance(value, float) or math.isfinite(value) else None

    return {name: plain(value) for name, value in asdict(record).items()}


def _flips(a: Runs, b: Runs) -> dict[str, Any] | None:
    """Rows that the first arm gains and loses against the second, where rows are right or wrong."""
    from toolkit.analysis.statistics.flips import binary, flips

    return _plain(flips(a, b)) if binary(a) and binary(b) else None


def _random_draws(
    results: TrainedResults, reader: Reader, task: str, arms: tuple[str, str], outcome: str, own: bool
) -> dict[str, Any] | None:
    """The contrast with draw as a random effect, where one of the arms has a draws × seeds grid that can tell."""
    from toolkit.analysis.statistics.draws import grid

    grids = [results.study.draws_of(arm) is not None for arm in arms]
    if grids == [True, True]:
        return None
    drawn, other = (arms[0], arms[1]) if grids[0] else (arms[1], arms[0])
    cells = _by_run(results, reader, task, drawn, outcome, own)
    single = _by_run(results, reader, task, other, outcome, own)
    paired = results.study.analysis.paired
    seeds = [s for s in dict.fromkeys(seed for seed, _ in cells) if not paired or (s, None) in single]
    draws = [d for d in dict.fromkeys(draw for _, draw in cells) if any((s, d) in cells for s in seeds)]
    if len(seeds) < 2 or len(draws) < 2 or len(cells) < len(seeds) + len(draws):
        return None
    table = np.array([[cells.get((seed, draw), math.nan) for seed in seeds] for draw in draws])
    values = [single[seed, None] for seed in seeds] if paired else list(single.values())
    coverage = 1 - results.study.analysis.level
    found = grid(table, values, paired=paired, coverage=coverage, names=draws, what=f"{drawn} on {task}")
    if found.contrast is None:
        return None
    estimate = _plain(found.contrast)
    if grids[0]:  # the grid comes first: grid − arm
        estimate["estimate"] = -found.contrast.estimate
        bounds = estimate["high"], estimate["low"]
        estimate["low"], estimate["high"] = (None if bound is None else -bound for bound in bounds)
    sds = {f"{name}_sd": math.sqrt(getattr(found, name)) for name in ("draw", "seed", "rest")}
    return (
        estimate
        | sds
        | {"draws": found.draws, "seeds": found.seeds, "cells": found.cells}
        | {"notes": [*found.contrast.notes, *found.notes]}
    )


def _by_run(
    results: TrainedResults, reader: Reader, task: str, arm: str, outcome: str, own: bool
) -> dict[tuple[str, int | None], float]:
    """(seeds, draw) → a run's outcome."""
    runs = results.of(task, arm, own=own)
    if not runs:
        return {}
    scored = reader.scored(runs)
    values = scored.loss if outcome == "loss" else scored.score
    if values is None:
        return {}
    weights = scored.tokens if outcome == "loss" else np.ones(values.shape[1])
    means = values @ (weights / weights.sum())
    return {(str(run.seeds), run.draw): float(value) for run, value in zip(runs, means, strict=True)}
