"""The fine-tuning study: arms as compositions, tasks, shared levers, seeds and the analysis."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from toolkit.errors import InputError, closest
from toolkit.records.composition import MOST, Choice, Composition, Name
from toolkit.records.declared import read_declared
from toolkit.records.initialization import CalibrationUse
from toolkit.records.io import File, Record, Refusal, digest
from toolkit.records.levers import Levers, Seeds
from toolkit.records.study import DEMO_MODEL
from toolkit.records.timing import Timing


class Use(Record):
    """One task of the study.

    Attributes:
        task: key of the task that is scored.
        data: folder of JSON lines with `train` and `test` files, or None for the Hub (or for rows made by code).
        train: key of the task that is trained on, where it is another; with `train_data`, where its rows are.
        train_rows, rows: at most so many rows are trained on, and scored; the first ones in a fixed shuffled order.
        levers: for this task, in every arm alike.
    """

    task: str
    data: str | None = None
    train: str | None = None
    train_data: str | None = None
    train_rows: int | None = Field(default=None, gt=0)
    rows: int | None = Field(default=None, gt=0)
    levers: dict[str, Any] = {}


class Repeats(Record):
    """The A/A arm: one arm again and again under the very same seeds, for the run-to-run noise."""

    arm: str
    count: int = Field(default=4, ge=2, le=MOST, description="runs under one set of seeds, the first included")


class Tune(Record):
    """Every arm gets the same grid of one lever, scored on rows that no table scores.

    Attributes:
        lever: usually `learning_rate`.
        values: the grid.
        rows: held out of the training rows for the choice; no run trains on them.
        seed: of the trials.
    """

    lever: str = "learning_rate"
    values: list[float] = Field(min_length=2)
    rows: int = Field(default=200, gt=0)
    seed: int = Field(default=1_000_000, ge=0, lt=2**32)


class Contrasts(Record):
    """What is compared, declared beforehand.

    Attributes:
        baseline: every other arm is compared with it.
        pairs: further comparisons, [arm, arm]; an arm with its matched random arm is always one.
        outcome: `loss`, nats a gold target token on held-out rows, paired by row; or `score`, the task's metric.
        paired: runs of one seed are paired (the same data order and rows, and the same A of every layer that both arms
            adapt, unless an initializer sets it); declared, not chosen by result.
        margin: within which two arms are called equivalent, in the outcome's unit; and its reason.
        level: of the family.
    """

    baseline: str
    pairs: list[tuple[str, str]] = []
    outcome: Literal["loss", "score"] = "loss"
    paired: bool = False
    margin: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    margin_reason: str | None = None
    level: float = Field(default=0.05, gt=0, lt=1)
    correction: Literal["holm", "none"] = "holm"
    resamples: int = Field(default=2000, ge=200, le=100_000)

    @model_validator(mode="after")
    def _reasoned(self) -> Contrasts:
        if self.margin is not None and not (self.margin_reason or "").strip():
            raise InputError(f"margin {self.margin} has no margin_reason: say why a smaller gap does not matter")
        return self

    def best(self, trials: Mapping[float, tuple[float, float | None]]) -> float:
        """The value of the tuned lever whose trial is best: value → loss and score of the trial.

        Best is the lowest loss, or the highest score where that is the outcome; of equal scores the one of lower
        loss, then the smaller value. A loss that was not measured is no lower than any other.
        """

        def cost(value: float) -> tuple[float, float, float]:
            loss, score = trials[value]
            loss = loss if math.isfinite(loss) else math.inf
            return (-score if self.outcome == "score" and score is not None else loss, loss, value)

        return min(trials, key=cost)


class FineTuning(File):
    """A fine-tuning study: arms × tasks × seeds under shared levers.

    Attributes:
        model: a Hugging Face id, a local directory, or `demo` for the embedded model.
        tasks: name → task; a run is one arm trained and scored on one task under one set of seeds.
        factors: levers that may differ between arms.
        repeats: a file that leaves it out has the baseline four times; `null` is none, and the table says so.
        seeds: a number n of runs an arm and task (seeds 0 … n−1, one for everything), or the sets of seeds.
        batch: rows a forward pass of the evaluation.
        calibration: the text that calibrated initializers of arms are given; null where none asks for one.
        keep_adapters: save each run's adapter beside its report, in PEFT's format.
        small: fields that replace the above in the small form (`--small`).
    """

    kind: Literal["fine-tuning"]
    name: Name
    question: str
    model: str = DEMO_MODEL
    tasks: dict[Name, Use] = Field(min_length=1)
    arms: list[Composition] = Field(min_length=1)
    levers: Levers = Levers()
    factors: list[str] = []
    seeds: int | list[Seeds] = 4
    repeats: Repeats | None = None
    tune: Tune | None = None
    timing: Timing = Timing()
    batch: int = Field(default=32, gt=0)
    calibration: CalibrationUse | None = None
    keep_adapters: bool = False
    analysis: Contrasts
    form: Literal["full", "small"] = "full"
    small: dict[str, Any] | None = None

    @field_validator("seeds", mode="before")
    @classmethod
    def _sets(cls, value: Any) -> Any:
        """One sentence, where two types each have their own complaint."""
        sets = isinstance(value, list) and all(isinstance(each, Mapping | Seeds) for each in value)
        number = isinstance(value, int) and not isinstance(value, bool)
        if not (sets or number):
            raise Refusal(
                f"{value!r:.80} is neither a number of runs nor a list of sets such as {{adapter: 0, data: 0, draw: 0}}"
            )
        if number and value > MOST:
            raise Refusal(f"{value:.3g} runs an arm are asked for; at most {MOST:,}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> FineTuning:
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two arms are called {name!r}; give one of them another name")
        for lever in self.factors:
            if lever not in Levers.model_fields:
                raise InputError(f"factors names {lever!r}, which is no lever; {closest(lever, Levers.model_fields)}")
        for arm in self.arms:
            self._levers(arm)
            for use in ("protect", "adapt"):
                self._like(arm, use)
        for name, task in self.tasks.items():
            self.levers_of(name)  # raises where one of them is none
            if task.train_data is not None and task.train is None:
                raise InputError(f"task {name!r}: train_data without train: name the task whose rows these are")
        named = [("analysis.baseline", [self.analysis.baseline])]
        named += [("analysis.pairs", [arm for pair in self.analysis.pairs for arm in pair])]
        named += [("repeats.arm", [self.repeats.arm] if self.repeats else [])]
        named += [("timing.arms", self.timing.arms or []), ("timing.noisiest", [self.timing.noisiest or names[0]])]
        for key, found in named:
            for name in found:
                if name not in names:
                    raise InputError(f"{key} names {name!r}; {closest(name, names)}")
        if self.timing.task is not None and self.timing.task not in self.tasks:
            raise InputError(f"timing.task names {self.timing.task!r}; {closest(self.timing.task, self.tasks)}")
        if self.tune is not None:
            self._tuned(self.tune)
        for one, other in self.analysis.pairs:
            if one == other:
                raise InputError(f"analysis.pairs compares {one!r} with itself; `repeats` declares an A/A arm")
        seeds = self.runs_of_an_arm
        if not seeds:
            raise InputError(f"seeds: {self.seeds}; at least one run an arm is needed")
        seen = set()
        for each in seeds:
            if each.repeat:
                raise InputError(f"seeds: {each} has a repeat; `repeats` declares the A/A arm")
            if each in seen:
                raise InputError(f"seeds: {each} stands twice; `repeats` declares runs under the same seeds")
            seen.add(each)
        return self

    def _tuned(self, tune: Tune) -> None:
        if tune.lever not in Levers.model_fields:
            raise InputError(f"tune.lever names {tune.lever!r}; {closest(tune.lever, Levers.model_fields)}")
        for value in tune.values:
            if tune.values.count(value) > 1:
                raise InputError(f"tune.values holds {value:g} twice")
            try:
                Levers.model_validate({tune.lever: value})
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise InputError(f"tune.values holds {value:g}, which is no {tune.lever}: {reason}") from None
        for arm in self.arms:
            if tune.lever in arm.levers:
                raise InputError(
                    f"arm {arm.name!r} sets {tune.lever!r}, which is tuned for every arm: leave it out there"
                )

    def _levers(self, arm: Composition) -> None:
        for lever in arm.levers:
            if lever not in Levers.model_fields:
                raise InputError(f"arm {arm.name!r}: levers names {lever!r}; {closest(lever, Levers.model_fields)}")
            if lever not in self.factors:
                raise InputError(
                    f"arm {arm.name!r} changes lever {lever!r} ({getattr(self.levers, lever)!r} for the others, "
                    f"{arm.levers[lever]!r} here), which is not declared: a difference could come from it alone. "
                    f"Give it to every arm under `levers`, or declare it: factors: [{lever}]"
                )

    def _like(self, arm: Composition, use: Literal["protect", "adapt"]) -> None:
        choice: Choice | None = getattr(arm, use)
        if choice is None or choice.like is None:
            return
        names = [other.name for other in self.arms]
        if choice.like not in names:
            raise InputError(f"arm {arm.name!r}: {use}.like names {choice.like!r}; {closest(choice.like, names)}")
        matched: Choice | None = getattr(self.arm(choice.like), use)
        if matched is None:
            raise InputError(
                f"arm {arm.name!r}: {use}.like names {choice.like!r}, which chooses no layers to {use}: all are"
                if use == "adapt"
                else f"arm {arm.name!r}: {use}.like names {choice.like!r}, which protects no layers"
            )
        if matched.like is not None:
            raise InputError(f"arm {arm.name!r}: {use}.like names {choice.like!r}, which is matched to another arm")

    def arm(self, name: str) -> Composition:
        """The arm of a name."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise InputError(f"the study has no arm {name!r}; {closest(name, [a.name for a in self.arms])}")

    def draws_of(self, arm: str) -> int | None:
        """How many draws an arm's declared grid has, its own or that of the arm it is matched to; None without one."""
        composed = self.arm(arm)
        for use in ("protect", "adapt"):
            choice: Choice | None = getattr(composed, use)
            if choice is None:
                continue
            liked: Choice | None = getattr(self.arm(choice.like), use) if choice.like is not None else None
            found = choice.draws or (liked.draws if liked is not None else None)
            if found is not None:
                return found
        return None

    def levers_of(self, task: str, arm: str | None = None, **chosen: Any) -> Levers:
        """The levers of one task and arm: the study's, the task's over them, then the arm's, then `chosen`."""
        given = self.levers.model_dump() | self.tasks[task].levers
        if arm is not None:
            given |= self.arm(arm).levers
        unknown = [name for name in given if name not in Levers.model_fields]
        if unknown:
            raise InputError(f"task {task!r}: levers names {unknown[0]!r}; {closest(unknown[0], Levers.model_fields)}")
        try:
            return Levers.model_validate(given | chosen)
        except ValidationError as error:
            first = error.errors()[0]
            of = f"task {task!r}" + (f", arm {arm!r}" if arm is not None else "")
            key = ".".join(map(str, first["loc"]))
            raise InputError(f"{of}: lever {key}: {first['msg']} (found {first['input']!r:.80})") from None

    @property
    def runs_of_an_arm(self) -> list[Seeds]:
        """The seeds of an arm's runs on one task."""
        return [Seeds.all(seed) for seed in range(self.seeds)] if isinstance(self.seeds, int) else list(self.seeds)

    @property
    def seeds_shared(self) -> str | None:
        """What must be said where sets of seeds share one: their runs are not independent of each other."""
        sets = self.runs_of_an_arm
        held = {factor: len({getattr(each, factor) for each in sets}) for factor in ("adapter", "data", "draw")}
        if all(count == len(sets) for count in held.values()):
            return None
        told = ", ".join(f"{count} {factor} seed{'s' * (count > 1)}" for factor, count in held.items())
        same = len({(each.adapter, each.data) for each in sets}) < len(sets)
        return (
            f"the {len(sets)} sets of seeds hold {told}: runs that share a seed are not independent, and intervals, "
            "which take them as such, tell of the factors that vary alone"
            + ("; for arms without random layers, sets that differ in the draw alone are repeats" if same else "")
        )

    @property
    def published(self) -> FineTuning:
        """The study as it may be shown: folders of models and data are the user's own, and stand by name alone."""
        data = _named(self.model_dump())
        return self.model_validate(data | {"small": None if self.small is None else _named(self.small)})

    @property
    def declaration(self) -> str:
        """Hash of what is declared: the study as published, less its small form."""
        return digest(self.published.model_copy(update={"small": None}).to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str], small: bool = False, **changes: Any) -> FineTuning:
        """A study from its folder or its `study.yaml`; with `small`, its small form; `changes` replace fields.

        A model's folder and a task's data are looked for beside the study first, so that it runs from any folder.

        Raises:
            InputError: no such study, an unknown key or a wrong type (with line), or no small form.
        """
        return read_declared(cls, path, _whole, small=small, changes=changes)

    def with_data(self, given: Mapping[str, str]) -> FineTuning:
        """The study with other data: task name → folder of the rows, `NAME:train` → that of its training rows.

        Raises:
            InputError: the study has no such task, or the task is trained on its own rows.
        """
        tasks = dict(self.tasks)
        for key, source in given.items():
            name, _, split = key.partition(":")
            if name not in tasks:
                raise InputError(f"data are given for task {name!r}; {closest(name, tasks)}")
            if split not in ("", "train"):
                raise InputError(f"data are given for {key!r}: write {name}=PATH, or {name}:train=PATH")
            if split and tasks[name].train is None:
                raise InputError(f"task {name!r} is trained on its own rows: give its data as {name}=PATH")
            tasks[name] = tasks[name].model_copy(update={"train_data" if split else "data": source})
        return self.model_copy(update={"tasks": tasks})


PATHS = ("data", "train_data")
"""Fields of a task that are folders."""


def _named(data: dict[str, Any]) -> dict[str, Any]:
    """A study's plain data with its folders by name alone; a model's id is no folder."""
    found = dict(data)
    if isinstance(found.get("model"), str) and Path(found["model"]).is_dir():
        found["model"] = Path(found["model"]).name
    use = found.get("calibration")
    if isinstance(use, dict) and isinstance(use.get("text"), str):
        found["calibration"] = use | {"text": Path(use["text"]).name}
    if isinstance(found.get("tasks"), dict):
        found["tasks"] = {
            key: use | {path: Path(use[path]).name for path in PATHS if isinstance(use.get(path), str)}
            for key, use in found["tasks"].items()
        }
    return found


def _whole(data: Any, home: Path) -> Any:
    """A study's plain data as it is meant: paths from here, and an A/A arm unless it says that it has none."""
    found = _beside(data, home)
    if isinstance(found, dict) and "repeats" not in found and isinstance(found.get("analysis"), dict):
        baseline = found["analysis"].get("baseline")
        if isinstance(baseline, str):
            found["repeats"] = {"arm": baseline}
    return found


def _beside(data: Any, home: Path) -> Any:
    """A study's plain data, with the model and the tasks' data that lie beside it as paths from here."""
    if not isinstance(data, dict):
        return data
    found = dict(data)

    def here(value: Any) -> Any:
        return str(home / value) if isinstance(value, str) and value and (home / value).exists() else value

    if found.get("model") not in (None, DEMO_MODEL):
        found["model"] = here(found["model"])
    use = found.get("calibration")
    if isinstance(use, dict) and isinstance(use.get("text"), str) and Path(use["text"]).suffix:
        found["calibration"] = use | {"text": here(use["text"])}
    if isinstance(found.get("tasks"), dict):
        found["tasks"] = {
            name: use | {key: here(use[key]) for key in PATHS if key in use} if isinstance(use, dict) else use
            for name, use in found["tasks"].items()
        }
    if "small" in data:
        found["small"] = _beside(data["small"], home)
    return found
