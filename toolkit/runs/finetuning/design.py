"""From a study to its runs: arms × tasks × seeds, the repeats, the trials of the tuned lever, and the untrained base.

Each run leaves a folder of its name. Runs go seed by seed, so that a study that was interrupted holds whole
comparisons; the repeats come last. The runs at each arm's own value of the tuned lever are known when its trials are
done, and follow then, where it is not the shared value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from toolkit.errors import InputError
from toolkit.records.finetuning import FineTuning
from toolkit.records.levers import Levers, Seeds
from toolkit.registry import registry
from toolkit.runs.finetuning.plans import choices

Role = Literal["arm", "repeat", "tune", "untrained"]

SINGLE_DRAW = "this draw only"
"""Label of a run whose random layers are one draw for all seeds."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a study; see `toolkit.records.trained.Trained`.

    Attributes:
        name: of its folder.
        levers: all of them, the tuned one's value among them.
        labels: what must be said beside its results.
    """

    name: str
    role: Role
    arm: str
    task: str
    seeds: Seeds
    levers: Levers
    draw: int | None = None
    value: float | None = None
    own: bool = False
    labels: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether anything is trained before the scoring."""
        return self.role != "untrained"


MOST_RUNS = 100_000
"""Runs of a study: each has a folder, and all are planned before the first."""

LONGEST = 200
"""Letters of a run's name, its folder's; file systems allow 255 bytes."""


def expand(study: FineTuning) -> list[Run]:
    """All runs that are known before the first, in the order in which they are started.

    Raises:
        InputError: two runs would share a folder, a folder's name would be too long, or there are too many.
    """
    each = len(study.runs_of_an_arm) + (len(study.tune.values) if study.tune is not None else 0)
    count = len(study.tasks) * sum(each * (study.draws_of(arm.name) or 1) for arm in study.arms)
    if count > MOST_RUNS:
        raise InputError(f"{count:,} runs (tasks × arms × seeds × draws) are declared; at most {MOST_RUNS:,}")
    runs = [_untrained(study, task) for task in study.tasks]
    if study.tune is not None:
        for value in study.tune.values:
            runs += [_trial(study, task, arm.name, value) for task in study.tasks for arm in study.arms]
    runs += _arms(study)
    if study.repeats is not None:
        first = study.runs_of_an_arm[0]
        for repeat in range(1, study.repeats.count):
            seeds = first.model_copy(update={"repeat": repeat})
            runs += [_run(study, task, study.repeats.arm, seeds, role="repeat") for task in study.tasks]
    _distinct(runs)
    return runs


def divided(study: FineTuning, processes: int) -> None:
    """Refuse, before anything is loaded, an accumulation that does not divide among processes that train one model.

    Raises:
        InputError: names the task, the arm and both numbers.
    """
    for run in expand(study):
        count = run.levers.accumulation
        if run.trains and count % processes:
            raise InputError(
                f"task {run.task!r}, arm {run.arm!r}: accumulation {count} does not divide among {processes} processes "
                f"(torchrun): a step must hold the same examples on any number of them. Make it a multiple of "
                f"{processes}, or start as many processes as divide it"
            )


def own(study: FineTuning, chosen: Mapping[tuple[str, str], float], labels: Mapping[tuple[str, str], str]) -> list[Run]:
    """The arms' runs at the value that their trials chose: (task, arm) → value; `labels` say what is doubtful of it.

    An arm that chose the shared value has none: its shared runs are the very same computation.
    """
    assert study.tune is not None
    runs = []
    for run in _arms(study):
        key = (run.task, run.arm)
        if key not in chosen:
            continue
        levers = study.levers_of(run.task, run.arm, **{study.tune.lever: chosen[key]})
        if levers == run.levers:
            continue
        said = (*run.labels, labels[key]) if key in labels else run.labels
        runs.append(
            dataclasses.replace(run, name=f"{run.name}--own", own=True, value=chosen[key], levers=levers, labels=said)
        )
    return runs


def _arms(study: FineTuning) -> list[Run]:
    runs = []
    for seeds in study.runs_of_an_arm:
        for task in study.tasks:
            for arm in study.arms:
                count = study.draws_of(arm.name)
                grid: list[int | None] = [None] if count is None else list(range(count))
                runs += [_run(study, task, arm.name, seeds, draw=draw) for draw in grid]
    return runs


def _run(study: FineTuning, task: str, arm: str, seeds: Seeds, *, role: Role = "arm", draw: int | None = None) -> Run:
    if draw is None and role != "arm" and study.draws_of(arm) is not None:
        draw = 0
    name = f"{task}--{arm}--{seeds}" + ("" if draw is None else f"--draw{draw}")
    return Run(name, role, arm, task, seeds, study.levers_of(task, arm), draw=draw, labels=_labels(study, arm))


def _trial(study: FineTuning, task: str, arm: str, value: float) -> Run:
    assert study.tune is not None
    lever = study.tune.lever
    return dataclasses.replace(
        _run(study, task, arm, Seeds.all(study.tune.seed), role="tune"),
        name=f"{task}--{arm}--tune-{lever}-{value:g}",
        levers=study.levers_of(task, arm, **{lever: value}),
        value=value,
    )


def _untrained(study: FineTuning, task: str) -> Run:
    arm = study.analysis.baseline
    run = _run(study, task, arm, study.runs_of_an_arm[0], role="untrained")
    return dataclasses.replace(run, name=f"{task}--{arm}--untrained")


def _labels(study: FineTuning, arm: str) -> tuple[str, ...]:
    """What an arm's random layers hold for."""
    found = []
    for use, choice in choices(study.arm(arm)):
        if choice.draw == "once" and registry.make("selector", choice.selector).random:
            found.append(f"{SINGLE_DRAW}: the layers to {use} are the same draw for all seeds")
    return tuple(found)


def _distinct(runs: list[Run]) -> None:
    names: dict[str, Run] = {}
    for run in runs:
        if len(run.name) > LONGEST:
            raise InputError(
                f"task {run.task:.40}, arm {run.arm:.40}: the run's folder would have a name of {len(run.name)} "
                f"letters, and at most {LONGEST} are allowed; give them shorter names"
            )
        other = names.setdefault(run.name.lower(), run)  # some file systems do not tell the case
        if other is not run:
            raise InputError(
                f"two runs would share the folder {run.name!r}: task {other.task!r}, arm {other.arm!r} and task "
                f"{run.task!r}, arm {run.arm!r}; rename one of them"
            )


def notes(study: FineTuning, runs: list[Run]) -> list[str]:
    """What is said before the first run, each once."""
    said = [label for run in runs for label in run.labels]
    if study.form == "small":
        said.insert(0, "small form: less than the full study")
    if study.repeats is None:
        said.append("there is no A/A arm (`repeats: null`): run-to-run noise will not be known")
    elif study.repeats.count < 4:
        said.append(f"the A/A arm has {study.repeats.count} runs: with fewer than four its spread is not known")
    if len(study.runs_of_an_arm) < 4:
        seeds = f"{count} seeds" if (count := len(study.runs_of_an_arm)) > 1 else "one seed"
        said.append(f"{seeds} an arm: with fewer than four the spread is not known")
    if study.seeds_shared is not None:
        said.append(study.seeds_shared)
    return list(dict.fromkeys(said))
