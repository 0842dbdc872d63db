"""Laws of chance whose sets are counted: a uniform draw is a uniform number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from random import Random

from toolkit.interfaces import Law, Pick
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
