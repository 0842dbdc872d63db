"""From an arm of a study to the plan of one run: its layers chosen, its adapters decided, before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from toolkit.errors import InputError
from toolkit.interfaces import CalibratedSelector, Initializer, Quantizer, Selector, Task
from toolkit.records.composition import Choice, Composition
from toolkit.records.finetuning import FineTuning
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.registry import registry
from toolkit.runs import started
from toolkit.selection.select import draws, select

Use = Literal["protect", "adapt"]
USES: tuple[Use, ...] = ("protect", "adapt")

GRID_SEED = 0
"""Of the draws of a declared grid, and of the one draw of `draw: once`."""


def plan(
    study: FineTuning,
    arm: str,
    profile: Profile,
    seeds: Seeds,
    draw: int | None = None,
    *,
    task: str | None = None,
    levers: Levers | None = None,
) -> tuple[Plan, Selection | None, Selection | None]:
    """The plan of one run, and which layers are protected and adapted (None: no selection was asked for).

    A random selector answers for the run's draw seed (`draw: each-seed`), for seed 0 (`once`), or with draw number
    `draw` of the arm's grid. A matched arm is matched to what the other arm chose for the very same seeds.

    Args:
        profile: of the study's model, with the statistics of the task where a selector reads them.
        draw: of the arm's declared grid.
        task: whose levers hold; the study's first where left out.
        levers: instead of the arm's on that task; rank and alpha are read.

    Raises:
        InputError: names the arm: a selector that cannot answer, or a plan that its data flow cannot compute.
    """
    from toolkit.runs.building import checked

    composed = study.arm(arm)
    used = levers or study.levers_of(task or next(iter(study.tasks)), arm)
    try:
        protect, adapt = (_chosen(study, composed, use, profile, seeds, draw) for use in USES)
        made = Plan.protecting(
            protect,
            composed.base,
            protect=composed.protect_as,
            adapt=adapt,
            rank=used.rank,
            alpha=used.alpha,
            scaler=composed.scaler,
            dora=composed.dora,
            dataflow=composed.dataflow,
            compute_dtype=composed.compute_dtype,
            range_guard=composed.range_guard,
            initializer=composed.initializer,
        ).model_copy(update={"model": profile.model, "fingerprint": profile.fingerprint})
        checked(made)
        shapes = {layer.name: (layer.shape[0], layer.shape[1]) for layer in profile.layers}
        started.check({name: made.of(name) for name in shapes}, shapes, folder=True)
        if adapt is not None and not adapt.layers:
            raise InputError(f"adapt: {adapt.selector} selects no layer, and nothing would be trained")
    except InputError as error:
        raise InputError(f"arm {arm!r}: {error}") from None
    return made, protect, adapt


def _chosen(
    study: FineTuning, arm: Composition, use: Use, profile: Profile, seeds: Seeds, draw: int | None
) -> Selection | None:
    choice: Choice | None = getattr(arm, use)
    if choice is None:
        return None
    like = None
    if choice.like is not None:
        like = _chosen(study, study.arm(choice.like), use, profile, seeds, draw)
    if choice.draws is not None:
        found = draws(choice.selector, profile, choice.budget, like=like, count=choice.draws, seed=GRID_SEED)
        if len(found) < choice.draws:
            raise InputError(
                f"{use}.draws: {choice.draws} are declared, and {choice.selector} has {len(found)} different ones here"
            )
        return found[draw or 0]
    seed = GRID_SEED if choice.draw == "once" else seeds.draw
    return select(choice.selector, profile, choice.budget, like=like, seed=seed)


def check(study: FineTuning) -> None:
    """Refuse, before anything is loaded, components that do not exist or cannot do what the study asks.

    Raises:
        InputError: an unknown component or option (arm or task named); a matched selector without an arm to match; a
            grid or a single draw of a selector that is not random; two arms that are one.
    """
    for arm in study.arms:
        try:
            _check_arm(study, arm)
        except InputError as error:
            raise InputError(f"arm {arm.name!r}: {error}") from None
    for name, use in study.tasks.items():
        for key in (use.task, use.train):
            if key is not None:
                try:
                    task_of(key)
                except InputError as error:
                    raise InputError(f"task {name!r}: {error}") from None
    calibration_rows(study)
    seen: dict[str, str] = {}
    for arm in study.arms:
        content = arm.model_copy(update={"name": "same"}).model_dump_json()
        if content in seen:
            raise InputError(
                f"arms {seen[content]!r} and {arm.name!r} are the same: an A/A arm is declared under `repeats`"
            )
        seen[content] = arm.name


def _check_arm(study: FineTuning, arm: Composition) -> None:
    registry.make("quantizer", arm.base)
    registry.make("quantizer", arm.protect_as)
    registry.make("scaler", arm.scaler)
    registry.make("dataflow", arm.dataflow)
    begin: Initializer = registry.make("initializer", arm.initializer)
    if begin.needs_calibration and study.calibration is None:
        raise InputError(
            f"initializer {begin.key} is calibrated: name a text for the study, as in `calibration: {{text: FILE, "
            "windows: 64, window: 512}}`"
        )
    for use, choice in choices(arm):
        selector: Selector = registry.make("selector", choice.selector)
        for key in selector.quantizers:
            registry.make("quantizer", key)
        if selector.needs_like and choice.like is None:
            names = [other.name for other in study.arms if getattr(other, use) is not None and other.name != arm.name]
            raise InputError(
                f"{use}: {selector.key} matches another arm's layers: name it as `like` (arms that choose layers to "
                f"{use}: {', '.join(names) or 'none'})"
            )
        if choice.draws is not None and not selector.random:
            raise InputError(f"{use}: {selector.key} is not random, and has no {choice.draws} draws")
        if choice.draw == "once" and not selector.random:
            raise InputError(f"{use}: {selector.key} is not random: leave `draw` out")
    grids = {choice.draws for _, choice in choices(arm) if choice.draws is not None}
    if len(grids) > 1:
        raise InputError(f"protect and adapt declare grids of {' and '.join(map(str, sorted(grids)))} draws; give one")


def choices(arm: Composition) -> Iterator[tuple[Use, Choice]]:
    """What an arm chooses layers for, and how."""
    for use in USES:
        choice = getattr(arm, use)
        if choice is not None:
            yield use, choice


def calibration_rows(study: FineTuning) -> int | None:
    """How many training rows of a task its selectors are measured on; None where no selector asks for data.

    Raises:
        InputError: two choices ask for different numbers: a task has one profile, and one set of rows.
    """
    first: tuple[str, Use, int] | None = None
    for arm in study.arms:
        for use, choice in choices(arm):
            if not isinstance(registry.make("selector", choice.selector), CalibratedSelector):
                continue
            if first is not None and choice.calibration_rows != first[2]:
                raise InputError(
                    f"arm {arm.name!r}: {use}.calibration_rows is {choice.calibration_rows}, and arm {first[0]!r} has "
                    f"{first[2]} for {first[1]}: a task's statistics are measured on the same rows; give one number"
                )
            first = first or (arm.name, use, choice.calibration_rows)
    return None if first is None else first[2]


def selectors(study: FineTuning) -> list[str]:
    """Keys of all selectors of the study, each once."""
    return list(dict.fromkeys(choice.selector for arm in study.arms for _, choice in choices(arm)))


def components(study: FineTuning) -> list[tuple[str, str]]:
    """Kind and key of every component that the study names, or that a selector of it reads."""
    found = [("quantizer", key) for arm in study.arms for key in (arm.base, arm.protect_as)]
    found += [("quantizer", key) for key in quantizers(study)]
    found += [("scaler", arm.scaler) for arm in study.arms]
    found += [("initializer", arm.initializer) for arm in study.arms]
    found += [("dataflow", arm.dataflow) for arm in study.arms]
    found += [("selector", key) for key in selectors(study)]
    found += [("task", key) for use in study.tasks.values() for key in (use.task, use.train) if key is not None]
    return list(dict.fromkeys(found))


def quantizers(study: FineTuning) -> list[str]:
    """Keys of the quantizers that the profile must measure: those that a selector reads, and every quantized base."""
    made: list[Quantizer] = [registry.make("quantizer", arm.base) for arm in study.arms]
    keys = [quantizer.key for quantizer in made]
    for key in selectors(study):
        keys += [registry.make("quantizer", wanted).key for wanted in registry.make("selector", key).quantizers]
    return list(dict.fromkeys(keys))


def task_of(key: str) -> Task:
    """The task of a key.

    Raises:
        InputError: an unknown task or option; the closest ones are named.
    """
    task: Task = registry.make("task", key)
    return task
