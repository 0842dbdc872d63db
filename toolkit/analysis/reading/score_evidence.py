"""Scores from any runner as evidence: each line finds its selection, and each selection gets one number a metric."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from toolkit.analysis.reading.evidence import Chance, Evidence, Judged, mismatch
from toolkit.analysis.reading.scores_file import Scores
from toolkit.analysis.reading.selection_files import Arm, Chosen, Group, budgets
from toolkit.errors import InputError, closest
from toolkit.records.budget import Budget
from toolkit.records.study import Analysis

DIGITS = 8
"""The fewest digits of a hash that name a selection."""


def averaged(found: Sequence[Chosen], scores: Scores) -> dict[str, np.ndarray]:
    """Metric → one value a selection, in their order: the mean over seeds and rows, which are the same for all.

    A line that names a set by its hash tells of every file that holds this set.

    Raises:
        InputError: a line names no selection, several ones, another model or another budget; two lines give
            different values for the same; a selection has no score, or not on the metrics, seeds and rows that the
            others have.
    """
    model = found[0].model
    if scores.model != model:
        raise InputError(f"{scores.path} holds scores of model {scores.model!r}, and the selections are of {model!r}")
    lines = _Lines(found, scores)
    values = np.full((len(found), len(scores.metrics)), np.nan)
    for at, name in enumerate(scores.metrics):
        values[:, at] = lines.mean(at, name)
    return {name: values[:, at] for at, name in enumerate(scores.metrics)}


class _Lines:
    """The lines of a scores file, each with the file of its selection."""

    def __init__(self, found: Sequence[Chosen], scores: Scores) -> None:
        self.found, self.scores = found, scores
        files = _resolved(found, scores)
        counts = np.array([len(f) for f in files])
        each = counts[scores.selection]
        self.line = np.repeat(np.arange(len(scores.values)), each)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        within = np.arange(len(self.line)) - np.repeat(np.cumsum(each) - each, each)
        flat = np.array([at for f in files for at in f], dtype=np.int64)
        self.file = flat[starts[scores.selection[self.line]] + within]
        rows, seeds = len(scores.rows), len(scores.seeds)
        self.part = scores.seed[self.line] * rows + scores.row[self.line]
        self.key = (self.file * len(scores.metrics) + scores.metric[self.line]) * (rows * seeds) + self.part
        self._drop_equal()

    def _drop_equal(self) -> None:
        """Keep one of lines that say the same twice; refuse those that differ."""
        order = np.argsort(self.key, kind="stable")
        key, line = self.key[order], self.line[order]
        value = self.scores.values[line]
        again = np.flatnonzero(key[1:] == key[:-1]) + 1
        wrong = again[value[again] != value[again - 1]]
        if len(wrong):
            scores, first = self.scores, wrong[np.argmin(line[wrong])]
            one, other = line[first - 1], line[first]
            seed, row = scores.seeds[scores.seed[other]], scores.rows[scores.row[other]]
            raise InputError(
                f"{scores.path}:{scores.lines[other]}: {scores.metrics[scores.metric[other]]} of selection "
                f"{scores.selections[scores.selection[other]].name!r}, seed {seed}{f', row {row}' if row else ''}, is "
                f"{value[first]}, and line {scores.lines[one]} gives {value[first - 1]}; keep one of them"
            )
        kept = order[np.concatenate([[True], key[1:] != key[:-1]])]
        self.line, self.file, self.part, self.key = self.line[kept], self.file[kept], self.part[kept], self.key[kept]

    def mean(self, metric: int, name: str) -> np.ndarray:
        """One value a file; all have the same seeds and rows."""
        mine = np.flatnonzero(self.scores.metric[self.line] == metric)
        file, part = self.file[mine], self.part[mine]
        every, place = np.unique(part, return_inverse=True)
        if len(mine) < len(every) * len(self.found):
            raise InputError(self._lack(name, file, place, every))
        sums = np.bincount(file, weights=self.scores.values[self.line[mine]], minlength=len(self.found))
        return sums / len(every)

    def _lack(self, metric: str, file: np.ndarray, place: np.ndarray, every: np.ndarray) -> str:
        """Which selection lacks what most others have."""
        scores, all_files = self.scores, np.arange(len(self.found))
        lacking, where = np.setdiff1d(all_files, file), ""
        if not len(lacking):
            counts = np.bincount(place)
            usual = int(np.argmax(np.where(counts < len(self.found), counts, -1)))
            lacking = np.setdiff1d(all_files, file[place == usual])
            seed, row = divmod(int(every[usual]), len(scores.rows))
            where = f" for seed {scores.seeds[seed]}" + (f", row {scores.rows[row]!r}" if len(scores.rows) > 1 else "")
        one = self.found[lacking[0]]
        what = f"{one.path} ({'draw' if one.matched_to else 'arm'} {one.hash[:12]}){where}"
        more = f"; {len(lacking)} of {len(self.found)} selections lack it" if len(lacking) > 1 else ""
        same = "all have the same seeds and rows" if where else "every selection in the folder needs its scores"
        return f"{scores.path} has no {metric} of {what}{more}: {same}"


def _resolved(found: Sequence[Chosen], scores: Scores) -> list[list[int]]:
    """The files that each name in the scores file stands for."""
    by_hash: dict[str, list[int]] = {}
    by_name: dict[str, list[int]] = {}
    arms: dict[str, str | None] = {}
    for at, c in enumerate(found):
        by_hash.setdefault(c.hash, []).append(at)
        for name in {c.name, c.path.stem}:
            by_name.setdefault(name, []).append(at)
        if c.matched_to is None:
            arms.setdefault(c.hash, c.budget)
    hashes = sorted(by_hash)
    answers = []
    for named in scores.selections:
        where = f"{scores.path}:{named.line}"
        files = by_hash.get(named.name) or by_name.get(named.name) or _prefixed(named.name, hashes, by_hash, where)
        if not files:
            raise InputError(f"{where}: selection {named.name!r} is unknown; {_near(named.name, hashes, by_name)}")
        if len(files) > 1 and named.name not in by_hash and len({found[at].hash for at in files}) > 1:
            names = ", ".join(found[at].name for at in files[:3])
            raise InputError(
                f"{where}: {named.name!r} is the name of several files ({names}); write its path or its hash"
            )
        _check_budget(named.budget, [found[at] for at in files], arms, where)
        answers.append(files)
    return answers


def _prefixed(name: str, hashes: Sequence[str], by_hash: dict[str, list[int]], where: str) -> list[int]:
    """The files of the one set whose hash begins so."""
    if len(name) < DIGITS or not set(name) <= set("0123456789abcdef"):
        return []
    start = bisect.bisect_left(hashes, name)
    matching = [h for h in hashes[start : start + 2] if h.startswith(name)]
    if len(matching) > 1:
        raise InputError(f"{where}: {name!r} begins the hashes of several selections; write more digits")
    return by_hash[matching[0]] if matching else []


def _near(name: str, hashes: Sequence[str], names: dict[str, list[int]]) -> str:
    """The closest hash or name."""
    if len(name) >= DIGITS and set(name) <= set("0123456789abcdef"):
        near = min(hashes, key=lambda h: sum(a != b for a, b in zip(h, name, strict=False)))
        return f"the closest hash is {near[: max(16, len(name))]}"
    return closest(name, list(names)[:2000])


def _check_budget(text: str, files: Sequence[Chosen], arms: dict[str, str | None], where: str) -> None:
    """Refuse a budget that is not the selection's: its own, or that of the arm it is matched to."""
    allowed = {c.budget for c in files} | {arms.get(c.matched_to) for c in files if c.matched_to}
    try:
        found = str(Budget.parse(text)) if text else None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if found is not None and found not in allowed:
        has = " or ".join(sorted(b for b in allowed if b is not None)) or "none"
        raise InputError(f"{where}: budget {text!r}, and selection {files[0].name!r} has {has}")


def evidence(found: Sequence[Chosen], arms: Sequence[Arm], scores: Scores, analysis: Analysis, unit: str) -> Evidence:
    """What verdicts on scores are computed from; a metric plays the part of a text.

    Raises:
        InputError: as `averaged`.
    """
    values = averaged(found, scores)
    at = {c.path: index for index, c in enumerate(found)}
    judged = []
    for arm in arms:
        here = at[arm.chosen.path]
        judged.append(
            Judged(
                arm=arm.label,
                budget=arm.chosen.budget,
                selector=arm.chosen.selector,
                parameters=arm.chosen.parameters,
                outcomes={metric: float(column[here]) for metric, column in values.items()},
                chances=tuple(_chance(arm, group, values, at) for group in arm.groups),
            )
        )
    return Evidence(tuple(values), tuple(budgets(found)), tuple(judged), analysis, unit=unit)


def _chance(arm: Arm, group: Group, values: dict[str, np.ndarray], at: dict[object, int]) -> Chance:
    places = [at[c.path] for c in group.draws]
    return Chance(
        control=group.control,
        law=group.law.model_copy(update={"like": arm.label}),
        asked=len(group.draws),
        mismatch=mismatch(np.array([c.parameters for c in group.draws]), arm.chosen.parameters),
        outcomes={metric: column[places] for metric, column in values.items()},
    )
