"""Every selection and every draw of a declared study, made again from the profile and the seed; no model is needed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import cached_property

from toolkit import spec
from toolkit.errors import InputError
from toolkit.interfaces import Law, Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.records.study import Control, Study
from toolkit.registry import registry
from toolkit.selection import select as ask


class Regeneration:
    """The selections of one study on one profile, each made once.

    Args:
        plugins: selector name → the distribution that it came from, for the message where it is not installed.

    Raises:
        InputError: at once, where a selector of the study is not installed.
    """

    def __init__(self, study: Study, profile: Profile, plugins: Mapping[str, str] | None = None) -> None:
        self.study, self.profile = study, profile
        installed = registry.of_kind("selector")
        for item in [*study.arms, *study.controls]:
            name, _ = spec.parse(item.selector)
            if name not in installed:
                source = (plugins or {}).get(name)
                hint = f"it came from {source}" if source else "no package is recorded for it"
                failed = "; ".join(f"{k}: {v}" for k, v in registry.failures.items())
                raise InputError(
                    f"{item.label!r} is made by selector {name!r}, which is not installed here ({hint}); without it, "
                    "its selections cannot be made again" + (f" (plug-ins that failed: {failed})" if failed else "")
                )
        self._arms: dict[tuple[str, str], Selection] = {}
        self._families: dict[tuple[str, str], list[list[Selection]]] = {}

    @cached_property
    def budgets(self) -> dict[str, Budget]:
        """The study's budgets by their text."""
        return {str(budget): budget for budget in self.study.budgets}

    def arm(self, label: str, budget: str) -> Selection:
        """An arm's selection; under `total_of`, its budget is the total that the other arm reaches (in bytes)."""
        if (label, budget) not in self._arms:
            arm = self.study.arm(label)
            given = self.budgets[budget]
            if arm.total_of is not None:
                given = Budget(bytes=self.arm(arm.total_of, budget).bytes)
            self._arms[label, budget] = ask.select(arm.selector, self.profile, given, seed=self.study.seed)
        return self._arms[label, budget]

    def draws(self, control: Control, label: str, budget: str) -> list[Selection]:
        """A control's draws for an arm at a budget: members of its families where the control draws those."""
        if not together(control):
            like = self.arm(label, budget)
            return ask.draws(control.selector, self.profile, like=like, count=control.draws, seed=self.study.seed)
        key = (control.label, label)
        if key not in self._families:
            likes = [self.arm(label, b) for b in self.budgets]
            self._families[key] = ask.chains(
                control.selector, self.profile, likes=likes, count=control.draws, seed=self.study.seed
            )
        at = list(self.budgets).index(budget)
        return [family[at] for family in self._families[key]]


def together(control: Control) -> bool:
    """Whether draw i of every budget belongs to one family: asked for, or because the law's draws are shared."""
    selector: Selector = registry.make("selector", control.selector)
    return control.chain or (isinstance(selector, Law) and selector.shared)


def plugins(study: Study) -> dict[str, str]:
    """Selector name → distribution and version that it comes from, of every selector of a study."""
    found = {}
    installed = registry.of_kind("selector")
    for item in [*study.arms, *study.controls]:
        name, _ = spec.parse(item.selector)
        if name in installed:
            source = installed[name][1]
            try:
                found[name] = f"{source} {importlib.metadata.version(source)}"
            except importlib.metadata.PackageNotFoundError:  # registered by hand, in a notebook
                found[name] = source
    return dict(sorted(found.items()))
