"""From a study to its runs: which selections are measured, in which order, and what they can show.

A study gives two reference runs (nothing protected, everything protected); then, for each budget, one run an
arm and one run for each arm and control, which holds all of the control's draws.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from toolkit.errors import InputError
from toolkit.interfaces import Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.records.study import Arm, Control, Study, slug
from toolkit.registry import registry
from toolkit.selection.select import draws, select

SIXTEEN_BIT = "16-bit"
BASE = "base"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a study, which leaves one folder.

    Attributes:
        name: the folder's name.
        selections: what is measured: one, or a control's draws.
        like: the arm's selection that a control's draws are matched to.
        labels: what must be said before it starts and beside its results.
    """

    name: str
    role: Literal["reference", "arm", "control"]
    arm: str
    selections: tuple[Selection, ...]
    budget: Budget | None = None
    control: str | None = None
    like: Selection | None = None
    labels: tuple[str, ...] = ()


def quantizers(study: Study) -> list[str]:
    """Keys of the quantizers that the profile must measure: the base's, and any that a selector's option names."""
    keys = [registry.make("quantizer", study.base).key]
    for key in [arm.selector for arm in study.arms] + [control.selector for control in study.controls]:
        wanted = registry.make("selector", key).options.get("quantizer")
        if isinstance(wanted, str) and wanted:
            keys.append(registry.make("quantizer", wanted).key)
    return list(dict.fromkeys(keys))


def check(study: Study) -> None:
    """Refuse, before anything is loaded, components that do not exist or cannot do what the study asks.

    Raises:
        InputError: an unknown quantizer or selector, a control that is not random, or an arm that needs another
            selection to match.
    """
    quantizers(study)
    registry.make("quantizer", study.protect)
    for arm in study.arms:
        selector: Selector = registry.make("selector", arm.selector)
        if selector.needs_like:
            raise InputError(f"arm {arm.label!r}: {selector.key} matches another selection; it can only be a control")
        if arm.total_of is not None and study.arm(arm.total_of).total_of is not None:
            raise InputError(
                f"arm {arm.label!r}: total_of names {arm.total_of!r}, which takes its total from another arm"
            )
    for control in study.controls:
        selector = registry.make("selector", control.selector)
        if not selector.random:
            raise InputError(f"control {control.label!r}: {selector.key} is not random; a control needs draws")


def expand(study: Study, profile: Profile) -> list[Run]:
    """Every run of a study, in the order in which they are measured: a pure function of its arguments.

    Raises:
        InputError: a selector refuses its budget, or no subset matches an arm (the arm is named).
    """
    runs = [reference(profile, SIXTEEN_BIT, profile.names), reference(profile, BASE, [])]
    controls: list[Run] = []
    for budget in study.budgets:
        arms: dict[str, Selection] = {}
        for arm in sorted(study.arms, key=lambda a: a.total_of is not None):  # those it depends on come first
            arms[arm.label] = _arm_selection(study, arm, profile, budget, arms)
        for arm in study.arms:
            runs.append(Run(f"{slug(str(budget))}--{arm.label}", "arm", arm.label, (arms[arm.label],), budget))
        for control in study.controls:
            for label in study.likes(control):
                controls.append(_control_run(study, control, label, profile, budget, arms[label]))
    runs += controls
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two runs of the study would share the folder {name!r}; name an arm or a control otherwise"
            )
    return runs


def _arm_selection(study: Study, arm: Arm, profile: Profile, budget: Budget, arms: dict[str, Selection]) -> Selection:
    """An arm's selection; under `total_of`, with the total that the other arm reached as its budget (in bytes)."""
    if arm.total_of is not None:
        budget = Budget(bytes=arms[arm.total_of].bytes)
    try:
        return select(arm.selector, profile, budget, seed=study.seed)
    except InputError as error:
        raise InputError(f"arm {arm.label!r}, budget {budget}: {error}") from None


def _control_run(study: Study, control: Control, label: str, profile: Profile, budget: Budget, like: Selection) -> Run:
    try:
        found = draws(control.selector, profile, like=like, count=control.draws, seed=study.seed)
    except InputError as error:
        raise InputError(f"control {control.label!r} of arm {label!r}, budget {budget}: {error}") from None
    labels = []
    if len(found) < control.draws:
        labels.append(f"only {len(found)} subsets exist of the {control.draws} draws asked for; all are used")
    smallest = 1 / (1 + len(found))
    if control.label == study.analysis.control and smallest > study.analysis.level:
        labels.append(
            f"descriptive: {len(found)} draws give no p below {smallest:.3g}, and the declared level is "
            f"{study.analysis.level:g}"
        )
    name = f"{slug(str(budget))}--{label}--{control.label}"
    return Run(name, "control", label, tuple(found), budget, control.label, like, tuple(labels))


def reference(profile: Profile, name: str, layers: list[str]) -> Run:
    """The run in which every layer is protected, or none."""
    chosen = set(layers)
    rows = [row for row in profile.layers if row.name in chosen]
    selection = Selection(
        selector=name,
        model=profile.model,
        fingerprint=profile.fingerprint,
        layers=layers,
        parameters=sum(row.parameters for row in rows),
        bytes=sum(row.bytes for row in rows),
        of={"layers": len(profile), "parameters": profile.parameters, "bytes": profile.bytes},
    )
    return Run(f"reference--{name}", "reference", name, (selection,))


def labels(study: Study, runs: list[Run]) -> list[str]:
    """What is said before the first measurement, each once."""
    said = []
    if study.form == "small":
        said.append("small form: fewer budgets, draws and tokens than the full study")
    for run in runs:
        said += [f"{run.name}: {label}" for label in run.labels]
    return said
