"""Chance with the same depth profile: what is left of a ranking once its depth is held."""

from __future__ import annotations

from decimal import Decimal
from random import Random

from toolkit.interfaces import Pick, Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.matching import controls


class DepthMatched(Selector):
    """Draw layers uniformly, as many in each third of the network as another selection holds.

    The law: { S ≠ M : |S ∩ third| = |M ∩ third| for each third }, uniform, third = ⌊3·block/blocks⌋ (AQLoRA
    §7.3). Counts are matched and parameters are not: `mismatch` is that of the parameters.
    `random-matched(thirds=true)` matches both.

    Raises:
        InputError: no other set has those counts.
    """

    name = "depth-matched"
    random = True
    needs_like = True

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> Pick:
        """The first draw."""
        return self.draws(profile, budget, rng, like, 1)[0]

    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` distinct draws; all sets, shuffled, where fewer exist."""
        assert like is not None  # the core refuses a missing selection before it asks
        law = controls(profile, like, within=Decimal(0), unit="layers", thirds=True)
        return [
            Pick(pick.layers, feasible_subsets=pick.feasible_subsets, inclusion=pick.inclusion)
            for pick in law.draws(rng, count)
        ]
