"""Reading a fine-tuning study's reports: every one checked, alone and against the others; results are never mixed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolkit.analysis.reading.kinds import places
from toolkit.analysis.reading.reports import Mark, same
from toolkit.analysis.reading.trained_file import ALL, TrainedRun, read_trained
from toolkit.errors import InputError
from toolkit.records.composition import Composition
from toolkit.records.finetuning import FineTuning
from toolkit.records.levers import Seeds
from toolkit.records.report import REPORT
from toolkit.records.session import TIMING
from toolkit.records.study import STUDY_COPY
from toolkit.records.trained import RUNS


class Key(NamedTuple):
    """What a run is: two reports of one key tell of the same run."""

    role: str
    task: str
    arm: str
    seeds: Seeds
    draw: int | None = None
    value: float | None = None
    own: bool = False

    def __str__(self) -> str:
        words = {"arm": "", "repeat": "repeat of ", "tune": "trial of ", "untrained": "untrained "}[
            self.role
        ] + f"{self.arm} on {self.task}"
        more = [str(self.seeds)]
        more += [f"draw {self.draw}"] if self.draw is not None else []
        more += [f"value {self.value:g}"] if self.role == "tune" and self.value is not None else []
        more += ["at its own value"] if self.own else []
        return f"{words} ({', '.join(more)})"


@dataclass(frozen=True)
class TrainedResults:
    """All reports of one fine-tuning study that belong together, and the study that declared them.

    Attributes:
        runs: by their key; those that the study declares, in its order.
        untrained: task → the baseline scored before any training.
        others: reports of runs that the study does not declare.
        missing: declared runs that left no report.
    """

    folder: Path
    study: FineTuning
    runs: dict[Key, TrainedRun]
    untrained: dict[str, TrainedRun]
    others: tuple[TrainedRun, ...]
    missing: tuple[Key, ...]

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Which lock each report carries and when it was made, in the order of their paths."""
        runs = [*self.runs.values(), *self.untrained.values(), *self.others]
        return tuple(Mark(run.path, run.lock, run.started) for run in sorted(runs, key=lambda run: run.path))

    @property
    def texts(self) -> dict[str, str]:
        """Task and split → SHA-256 of its rows, as a lock names them."""
        found = {}
        for key, run in self.runs.items():
            found.setdefault(f"{key.task} train", run.train.sha256)
            found.setdefault(f"{key.task} {'tune' if key.role == 'tune' else 'test'}", run.test.sha256)
        return found

    @property
    def any(self) -> TrainedRun | None:
        """One run, for what all share; None where there are timing sessions alone."""
        return next(iter([*self.runs.values(), *self.untrained.values(), *self.others]), None)

    @property
    def tasks(self) -> list[str]:
        """Tasks in the study's order that have a finished run."""
        return [task for task in self.study.tasks if any(k.task == task and r.finished for k, r in self.runs.items())]

    def of(self, task: str, arm: str, *, own: bool = False) -> list[TrainedRun]:
        """Finished runs of an arm on a task, in the order of draws and seeds; `own`, at its own value.

        Where its own value is the shared one, its shared runs are its own: no others are made.
        """
        own = own and not self.shares(task, arm)
        found = [(k, r) for k, r in self.runs.items() if (k.role, k.task, k.arm, k.own) == ("arm", task, arm, own)]
        return [run for _, run in found if run.finished]

    def chosen(self, task: str, arm: str) -> float | None:
        """An arm's own value of the tuned lever; None where it has neither an own run nor a finished trial."""
        return _chosen(self.study, self.runs, task, arm)

    def shares(self, task: str, arm: str) -> bool:
        """Whether an arm's own value of the tuned lever is the shared one, by all of its trials."""
        return _shares(self.study, self.runs, task, arm)

    def repeats(self, task: str) -> list[TrainedRun]:
        """The finished runs of the A/A arm under one set of seeds, the arm's own run first."""
        if self.study.repeats is None:
            return []
        first = first_seeds(self.study)
        found = [r for r in self.of(task, self.study.repeats.arm) if r.seeds == first and r.draw in (None, 0)]
        return found + [r for k, r in self.runs.items() if k.role == "repeat" and k.task == task and r.finished]

    def trials(self, task: str, arm: str) -> list[TrainedRun]:
        """Finished trials of the tuned lever, by its value."""
        return _trials(self.runs, task, arm)

    @property
    def unfinished(self) -> list[TrainedRun]:
        """Runs that ended early."""
        return [run for run in self.runs.values() if not run.finished]


def first_seeds(study: FineTuning) -> Seeds:
    """The seeds that the A/A arm repeats."""
    return study.runs_of_an_arm[0]


def once(arm: Composition) -> bool:
    """Whether one random draw serves all seeds of an arm, so that its results hold for that draw only.

    A study that asks it of a selector that is not random does not run.
    """
    return any(choice is not None and choice.draw == "once" for choice in (arm.protect, arm.adapt))


def declared_runs(study: FineTuning) -> list[Key]:
    """Every run that a study declares, but for those at each arm's own value of a tuned lever."""
    found = []
    for task in study.tasks:
        for arm in study.arms:
            draws = study.draws_of(arm.name)
            for draw in [None] if draws is None else range(draws):
                found += [Key("arm", task, arm.name, seeds, draw) for seeds in study.runs_of_an_arm]
        if study.repeats is not None:
            first = first_seeds(study)
            found += [
                Key(
                    "repeat",
                    task,
                    study.repeats.arm,
                    first.model_copy(update={"repeat": n}),
                    _first_draw(study, study.repeats.arm),
                )
                for n in range(1, study.repeats.count)
            ]
        if study.tune is not None:
            seeds = Seeds.all(study.tune.seed)
            found += [
                Key("tune", task, arm.name, seeds, _first_draw(study, arm.name), value)
                for arm in study.arms
                for value in study.tune.values
            ]
    return found


def _first_draw(study: FineTuning, arm: str) -> int | None:
    """The draw of a single run of an arm that has a grid."""
    return None if study.draws_of(arm) is None else 0


def locate(study: str | os.PathLike[str]) -> Path:
    """The results folder of a fine-tuning study: of its folder or file, or of an `--out` folder.

    Raises:
        InputError: nothing is there, or neither a run nor a timing session has left a file yet.
    """
    path = Path(study)
    if not path.exists():
        raise InputError(f"no study or results folder at {path}")
    folder = path.parent if path.is_file() else path
    for candidate in (folder / "results", folder):
        if any(candidate.glob(f"{RUNS}/*/{REPORT}")) or any(candidate.glob(f"{TIMING}/*.json")):
            return candidate
    others = sorted({str(found.parents[2]) for found in folder.glob(f"results*/{RUNS}/*/{REPORT}")})
    hint = f"there are some in {', '.join(others)}" if others else f"`toolkit run {study}` makes them"
    raise InputError(f"no run has left a report in {folder / 'results' / RUNS} or {folder / RUNS}; {hint}")


def declared(folder: Path, given: str | os.PathLike[str]) -> FineTuning:
    """The study behind a results folder: the copy kept beside the runs, else its `study.yaml` in the full form.

    Raises:
        InputError: there is neither, so that arms, seeds and analysis are not known.
    """
    copy = folder / STUDY_COPY
    if copy.is_file():
        return FineTuning.load(copy)
    for file in [*places(given), *places(folder)]:
        if file.is_file() and file.suffix in (".yaml", ".yml"):
            return FineTuning.read(file)
    raise InputError(
        f"{folder} holds reports, and neither {STUDY_COPY} nor a study.yaml stands beside them: the arms, the seeds "
        "and the analysis are declared there"
    )


def read(study: str | os.PathLike[str]) -> TrainedResults:
    """Every report of a fine-tuning study, checked one by one and against each other.

    Args:
        study: a study's folder, its `study.yaml`, its results folder, or the `--out` folder of a run.

    Raises:
        InputError: a report is damaged or foreign, holds a score that is not finite, or differs from the others in
            study, form, model or weights, or from the others of its task in settings; or two reports tell of the
            same run.
    """
    folder = locate(study)
    declaration = declared(folder, study)
    found = [read_trained(path) for path in sorted((folder / RUNS).glob(f"*/{REPORT}"))]
    _agree(found, declaration, folder)
    runs: dict[Key, TrainedRun] = {}
    for run in found:
        value = run.value if run.role == "tune" else None
        key = Key(run.role, run.task, run.arm, run.seeds, run.draw, value, run.own)
        if key in runs:
            raise InputError(f"{runs[key].path} and {run.path} both tell of {key}; keep one of them")
        runs[key] = run
    asked = declared_runs(declaration)
    known = set(asked)
    asked += _own(declaration, {key: run for key, run in runs.items() if key.own or key in known}, asked)
    known = set(asked)
    return TrainedResults(
        folder=folder,
        study=declaration,
        runs={key: runs[key] for key in asked if key in runs},
        untrained={key.task: run for key, run in runs.items() if key.role == "untrained" and run.finished},
        others=tuple(run for key, run in runs.items() if key.role != "untrained" and key not in known),
        missing=tuple(key for key in asked if key not in runs),
    )


def _own(study: FineTuning, runs: Mapping[Key, TrainedRun], asked: list[Key]) -> list[Key]:
    """The runs at each arm's own value: those that are there, and all of an arm whose trials chose another value."""
    if study.tune is None:
        return []
    pairs = [(task, arm.name) for task in study.tasks for arm in study.arms]
    awaited = {
        pair
        for pair in pairs
        if _tried(study, runs, *pair) and _trials(runs, *pair) and not _shares(study, runs, *pair)
    }
    found = [key._replace(own=True) for key in asked if key.role == "arm"]
    return [key for key in found if key in runs or (key.task, key.arm) in awaited]


def _trials(runs: Mapping[Key, TrainedRun], task: str, arm: str) -> list[TrainedRun]:
    """Finished trials of an arm, by the tuned lever's value."""
    found = [run for key, run in runs.items() if (key.role, key.task, key.arm) == ("tune", task, arm) and run.finished]
    return sorted(found, key=lambda run: run.value or 0.0)


def _tried(study: FineTuning, runs: Mapping[Key, TrainedRun], task: str, arm: str) -> bool:
    """Whether every trial of an arm left a report."""
    tried = {key.value for key in runs if (key.role, key.task, key.arm) == ("tune", task, arm)}
    return study.tune is not None and tried >= set(study.tune.values)


def _chosen(study: FineTuning, runs: Mapping[Key, TrainedRun], task: str, arm: str) -> float | None:
    """The value of an arm's own runs, else that of its best trial."""
    own = [run for key, run in runs.items() if key.own and (key.task, key.arm) == (task, arm) and run.finished]
    if own:
        return own[0].value
    trials = {run.value: run.scores[ALL] for run in _trials(runs, task, arm) if run.value is not None}
    return study.analysis.best({v: (s.loss, s.score) for v, s in trials.items()}) if trials else None


def _shares(study: FineTuning, runs: Mapping[Key, TrainedRun], task: str, arm: str) -> bool:
    """Whether all trials are done and chose the shared value, so that no own run is made."""
    if study.tune is None or not _tried(study, runs, task, arm):
        return False
    value = _chosen(study, runs, task, arm)
    return value is not None and value == getattr(study.levers_of(task, arm), study.tune.lever)


def _agree(runs: list[TrainedRun], study: FineTuning, folder: Path) -> None:
    """Refuse reports that do not share what reports of one study, and of one task, share."""
    paths = [run.path for run in runs]
    same(paths, [run.study for run in runs], "study", str)
    same(paths, [run.form for run in runs], "form", str)
    same(paths, [run.model for run in runs], "model", str)
    same(paths, [run.fingerprint for run in runs], "weights fingerprint", lambda v: v[:12])
    if runs and runs[0].study != study.name:
        raise InputError(f"{folder} holds reports of study {runs[0].study!r}, and {study.name!r} is asked for")
    if runs and runs[0].form != study.form:
        raise InputError(f"{folder} holds reports of the {runs[0].form} form, and the study beside is the {study.form}")
    for task in {run.task for run in runs}:
        for trials in (False, True):
            mine = [run for run in runs if run.task == task and (run.role == "tune") is trials]
            same([r.path for r in mine], [r.settings for r in mine], f"settings of task {task!r}", lambda v: v[:12])
