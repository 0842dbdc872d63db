"""From a study to its runs: which selections are measured, in which order, and what they can show.

A study gives two reference runs (nothing protected, everything protected) and the base once more, for the
numerical floor; the sweep of single layers; for each budget, one run an arm, two reference selections at its
memory, and one run for each arm and control, which holds all of the control's draws. Where the draws of a
control are families over all budgets, each budget's run holds its member of every family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from toolkit.errors import InputError
from toolkit.interfaces import Law, Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.report import ANTI, BASE, ORACLE, QUANTIZE, RESTORE, SIXTEEN_BIT, Role
from toolkit.records.selection import Selection
from toolkit.records.study import Control, Study, slug
from toolkit.registry import registry
from toolkit.selection.studies import Selections, together


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a study, which leaves one folder.

    Attributes:
        name: the folder's name.
        selections: what is measured: one; a control's draws; or every layer by itself. Empty where it is fitted on
            other runs' results, until they are there (`toolkit.runs.ranking.headroom`).
        like: the arm's selection that draws or reference selections are matched to.
        chain: draws go together over the budgets.
        labels: what must be said before it starts and beside its results.
    """

    name: str
    role: Role
    arm: str
    selections: tuple[Selection, ...]
    budget: Budget | None = None
    control: str | None = None
    like: Selection | None = None
    chain: bool = False
    labels: tuple[str, ...] = ()

    @property
    def many(self) -> bool:
        """Whether it holds many draws, which are kept one by one."""
        return self.role in ("control", "sweep")


def quantizers(study: Study) -> list[str]:
    """Keys of the quantizers that the profile must measure: the base's, and those that a selector reads."""
    keys = [registry.make("quantizer", study.base).key]
    for key in [arm.selector for arm in study.arms] + [control.selector for control in study.controls]:
        keys += [registry.make("quantizer", wanted).key for wanted in registry.make("selector", key).quantizers]
    return list(dict.fromkeys(keys))


def check(study: Study) -> None:
    """Refuse, before anything is loaded, components that do not exist or cannot do what the study asks.

    Raises:
        InputError: an unknown quantizer or selector, a control that is not random or cannot draw the families that
            it or the analysis asks for, an arm that needs another selection to match, or too few windows for the
            headroom.
    """
    quantizers(study)
    registry.make("quantizer", study.protect)
    for arm in study.arms:
        selector: Selector = registry.make("selector", arm.selector)
        if selector.needs_like:
            raise InputError(f"arm {arm.label!r}: {selector.key} matches another selection; it can only be a control")
    for control in study.controls:
        selector = registry.make("selector", control.selector)
        if not selector.random:
            raise InputError(f"control {control.label!r}: {selector.key} is not random; a control needs draws")
        if control.chain and not (isinstance(selector, Law) and selector.nests):
            raise InputError(
                f"control {control.label!r}: {selector.key} draws no nested families; leave `chain` out, or use a law "
                "that does"
            )
    _check_analysis(study)
    if study.headroom is not None:
        _check_headroom(study)


def _check_analysis(study: Study) -> None:
    """Refuse a test or a correction that the declared control's draws do not allow."""
    analysis, control = study.analysis, _declared(study)
    selector: Selector = registry.make("selector", control.selector)
    if analysis.test == "joint" and not together(control):
        raise InputError(
            f"analysis.test is joint, and the draws of control {control.label!r} are made budget by budget: declare "
            "`chain: true` for it, a law whose draws are shared, or `test: each`"
        )
    if analysis.correction == "max-t" and not _shared(selector):
        raise InputError(
            f"analysis.correction is max-t, and every arm has draws of its own from control {control.label!r} "
            f"({selector.key}): declare a law whose draws are shared by all arms, or `correction: holm`"
        )
    left_out = [a for a in analysis.arms or [arm.label for arm in study.arms] if a not in study.likes(control)]
    if left_out:
        raise InputError(
            f"analysis.control is {control.label!r}, which is not matched to arm {left_out[0]!r}: add the arm to its "
            "`like`, or leave it out of analysis.arms"
        )


def _check_headroom(study: Study) -> None:
    assert study.headroom is not None
    control = _declared(study)
    for taken in (ORACLE, ANTI):
        if taken in [one.label for one in study.controls]:
            raise InputError(
                f"a control is called {taken!r}, as a reference selection of headroom is; name it otherwise"
            )
    if study.headroom.fit == "ridge":
        for arm in _with_room(study):
            if arm not in study.likes(control):
                raise InputError(
                    f"headroom.fit is ridge, and control {control.label!r} has no draws for arm {arm!r}: name the arm "
                    "in its `like`, leave it out of headroom.arms, or fit the sweep"
                )
    if study.tokens is not None:
        enough_windows(study, dict.fromkeys(study.texts, study.tokens // study.window))


def enough_windows(study: Study, windows: Mapping[str, int]) -> None:
    """Refuse a headroom whose fitting or scoring half would be a single window.

    Args:
        windows: text → how many it has.

    Raises:
        InputError: a text has fewer than 4.
    """
    for text, count in windows.items():
        if study.headroom is not None and count < 4:
            raise InputError(
                f"headroom: text {text!r} has {count} windows of {study.window} tokens; one half fits the reference "
                "selections and the other scores them, so that at least 4 are needed: more tokens, or smaller windows"
            )


def _declared(study: Study) -> Control:
    """The control that claims are made against."""
    return next(c for c in study.controls if c.label == study.analysis.control)


def _shared(selector: Selector) -> bool:
    return isinstance(selector, Law) and selector.shared


def _with_room(study: Study) -> list[str]:
    """The arms whose headroom is measured."""
    assert study.headroom is not None
    return study.headroom.arms or [arm.label for arm in study.arms]


def expand(study: Study, profile: Profile) -> list[Run]:
    """Every run of a study, in the order in which they are measured: a pure function of its arguments.

    Raises:
        InputError: a selector refuses its budget, or no subset matches an arm (the arm is named).
    """
    runs = [reference(profile, SIXTEEN_BIT, profile.names), reference(profile, BASE, [])]
    if study.repeat:
        again = reference(profile, BASE, [])
        runs.append(dataclasses.replace(again, name=f"repeat--{BASE}", role="repeat"))
    if study.headroom is not None and study.headroom.fit == "sweep":
        runs += _sweeps(profile)
    selections = Selections(study, profile)
    for budget in study.budgets:
        for arm in study.arms:
            name = f"{slug(str(budget))}--{arm.label}"
            runs.append(Run(name, "arm", arm.label, (selections.arm(arm.label, budget),), budget))
    oracles = [] if study.headroom is None else _oracles(study, selections)
    controls = [
        _control_run(study, control, label, budget, selections, together(control))
        for budget in study.budgets
        for control in study.controls
        for label in study.likes(control)
    ]
    runs += controls + oracles if study.headroom is not None and study.headroom.fit == "ridge" else oracles + controls
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two runs of the study would share the folder {name!r}; name an arm or a control otherwise"
            )
    return runs


def _control_run(
    study: Study, control: Control, label: str, budget: Budget, selections: Selections, together: bool
) -> Run:
    """A control's draws for one arm at one budget."""
    found = selections.draws(control, label, budget)
    return Run(
        name=f"{slug(str(budget))}--{label}--{control.label}",
        role="control",
        arm=label,
        selections=tuple(found),
        budget=budget,
        control=control.label,
        like=selections.arm(label, budget),
        chain=together,
        labels=tuple(_control_labels(study, control, found, together)),
    )


def _control_labels(study: Study, control: Control, drawn: Sequence[Selection], together: bool) -> list[str]:
    """What must be said of these draws of a control."""
    said, found = [], len(drawn)
    if found < control.draws:
        what = "families" if together else "subsets"
        few = f"{what} exist" if found == drawn[0].feasible_subsets else f"different {what} were found"
        said.append(f"only {found} {few} of the {control.draws} draws asked for; all are used")
    analysis = study.analysis
    reached = study.reachable(found)
    if control.label == analysis.control and reached > analysis.level:
        after = ""
        if reached > 1 / (1 + found):
            after = f" ({reached:.3g} after correction for {_count(study.family_size, 'claim')})"
        said.append(
            f"descriptive: {found} draws give no p below {1 / (1 + found):.3g}{after}, and the declared level is "
            f"{analysis.level:g}"
        )
    return said


def _oracles(study: Study, selections: Selections) -> list[Run]:
    """Two reference selections at each arm's memory; what they are is fitted later."""
    return [
        Run(f"{slug(str(budget))}--{arm}--{name}", "oracle", arm, (), budget, name, selections.arm(arm, budget))
        for budget in study.budgets
        for arm in _with_room(study)
        for name in (ORACLE, ANTI)
    ]


def _sweeps(profile: Profile) -> list[Run]:
    """Each layer alone restored to 16 bit, all others quantized; and each alone quantized. Draw i is layer i."""
    names = profile.names
    restored = tuple(_fixed(profile, RESTORE, [name]) for name in names)
    quantized = tuple(_fixed(profile, QUANTIZE, [other for other in names if other != name]) for name in names)
    return [
        Run(f"sweep--{RESTORE}", "sweep", RESTORE, restored),
        Run(f"sweep--{QUANTIZE}", "sweep", QUANTIZE, quantized),
    ]


def reference(profile: Profile, name: str, layers: list[str]) -> Run:
    """The run in which every layer is protected, or none."""
    return Run(f"reference--{name}", "reference", name, (_fixed(profile, name, layers),))


def _fixed(profile: Profile, name: str, layers: list[str]) -> Selection:
    """A selection that no selector made."""
    chosen = set(layers)
    rows = [row for row in profile.layers if row.name in chosen]
    return Selection(
        selector=name,
        model=profile.model,
        fingerprint=profile.fingerprint,
        layers=layers,
        parameters=sum(row.parameters for row in rows),
        bytes=sum(row.bytes for row in rows),
        of={"layers": len(profile), "parameters": profile.parameters, "bytes": profile.bytes},
    )


def labels(study: Study, runs: list[Run]) -> list[str]:
    """What is said before the first measurement, each once: also which level the draws can reach."""
    said = []
    if study.form == "small":
        said.append("small form: fewer budgets, draws and tokens than the full study")
    draws = [len(run.selections) for run in runs if run.control == study.analysis.control and run.role == "control"]
    if draws:
        said.append(_family(study, min(draws)))
    for run in runs:
        said += [f"{run.name}: {label}" for label in run.labels]
    return said


def _family(study: Study, draws: int) -> str:
    """The declared family of claims, and the smallest corrected p that so many draws can give."""
    analysis = study.analysis
    parts = [_count(len(analysis.arms or study.arms), "arm"), _count(len(study.texts), "text")]
    if analysis.test == "each":
        parts.append(_count(len(study.budgets), "budget"))
    if analysis.exclusions:
        parts.append("less the exclusions")
    return (
        f"{_count(study.family_size, 'claim')} ({', '.join(parts)}), test {analysis.test}, correction "
        f"{analysis.correction}: {draws} draws reach p = {study.reachable(draws):.3g}, and the declared level is "
        f"{analysis.level:g}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
