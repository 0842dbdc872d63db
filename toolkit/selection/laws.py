"""Laws of chance whose sets are counted, where a uniform draw is a uniform number; and what a law says of itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any

from toolkit.interfaces import Law, Pick, Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.chains import Families
from toolkit.selection.matching import Controls


class CountedLaw(Law):
    """A uniform law over counted sets, and over counted families of nested ones.

    Implement `law` and `families`; the draws are those numbered by distinct uniform integers.
    """

    @abstractmethod
    def law(self, profile: Profile, budget: Budget | None, like: Selection | None) -> Controls:
        """Every set that a draw can be."""

    @abstractmethod
    def families(self, profile: Profile, likes: Sequence[Selection]) -> Families:
        """Every nested family that a draw can be."""

    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` distinct draws; all sets, shuffled, where fewer exist."""
        return self.law(profile, budget, like).draws(rng, count)

    def chains(self, profile: Profile, likes: Sequence[Selection], rng: Random, count: int) -> list[tuple[Pick, ...]]:
        """`count` distinct families, uniform over all of them (`toolkit.selection.chains`)."""
        if not self.nests:
            return super().chains(profile, likes, rng, count)
        return self.families(profile, likes).draws(rng, count)


def declared(selector: Selector) -> dict[str, Any]:
    """What a law says of its draws, by the names of `toolkit.records.report.Law`; nothing where it is no law."""
    if not isinstance(selector, Law):
        return {}
    within = selector.within
    return {
        "match": selector.match,
        "within": None if within is None else float(within),
        "holds": list(selector.holds),
        "shared": selector.shared,
    }


def expected(inclusion: Sequence[float], profile: Profile) -> dict[str, float]:
    """Role → Σ of its layers' probabilities of being drawn: how many of them a draw holds on average."""
    found: dict[str, float] = {}
    for layer, probability in zip(profile.layers, inclusion, strict=True):
        found[layer.role] = found.get(layer.role, 0.0) + probability
    return found
