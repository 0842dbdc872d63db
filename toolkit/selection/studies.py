"""The selections of a study: its arms and every draw of its controls, each made once, from the profile and the seed.

The runner measures these, and a certificate is verified against them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from toolkit.errors import InputError
from toolkit.interfaces import Law, Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.records.study import Control, Study
from toolkit.registry import registry
from toolkit.selection import select as ask


class Selections:
    """A study's selections on one profile, made when they are asked for and kept.

    Raises, in every method:
        InputError: a selector refuses its budget, or no set matches an arm; the arm, control and budget are named.
    """

    def __init__(self, study: Study, profile: Profile) -> None:
        self.study, self.profile = study, profile
        self._arms: dict[tuple[str, Budget], Selection] = {}
        self._families: dict[tuple[str, str], list[list[Selection]]] = {}

    def arm(self, label: str, budget: Budget) -> Selection:
        """An arm's selection; under `total_of`, its budget is the total that the other arm reaches (in bytes)."""
        if (label, budget) not in self._arms:
            arm, given = self.study.arm(label), budget
            if arm.total_of is not None:
                given = Budget(bytes=self.arm(arm.total_of, budget).bytes)
            with _naming(f"arm {label!r}, budget {given}"):
                self._arms[label, budget] = ask.select(arm.selector, self.profile, given, seed=self.study.seed)
        return self._arms[label, budget]

    def draws(self, control: Control, label: str, budget: Budget) -> list[Selection]:
        """A control's draws for an arm at a budget: members of its families where its draws go `together`."""
        study, where = self.study, f"control {control.label!r} of arm {label!r}"
        if not together(control):
            like = self.arm(label, budget)
            with _naming(f"{where}, budget {budget}"):
                return ask.draws(control.selector, self.profile, like=like, count=control.draws, seed=study.seed)
        key = (control.label, label)
        if key not in self._families:
            likes = [self.arm(label, each) for each in study.budgets]
            with _naming(f"{where}, all budgets"):
                self._families[key] = ask.chains(
                    control.selector, self.profile, likes=likes, count=control.draws, seed=study.seed
                )
        at = study.budgets.index(budget)
        return [family[at] for family in self._families[key]]


def together(control: Control) -> bool:
    """Whether draw i of every budget belongs to one family: asked for, or because the law's draws are shared."""
    selector: Selector = registry.make("selector", control.selector)
    return control.chain or (isinstance(selector, Law) and selector.shared)


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """An error of a selector names the part of the study that asked."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
