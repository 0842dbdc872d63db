"""Chance with the same number of layers: the flawed control, kept to show its artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Literal

from toolkit.interfaces import Pick, unrepeated
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.chains import Families, families
from toolkit.selection.laws import CountedLaw
from toolkit.selection.matching import Controls, controls, counted
from toolkit.selection.ranking import nothing, top


@dataclass
class RandomCount(CountedLaw):
    """Draw K layers uniformly: every K-subset with probability 1/C(L, K).

    K = ⌈ρL⌉ under a layers budget (`rounding=floor`: ⌊ρL⌋); with a selection to match, its number of layers,
    that selection itself left out. Under a parameters or bytes budget, the longest prefix of a uniformly
    random ranking that never exceeds it (no number of subsets is stated then). Where layer sizes vary such
    draws do not hold the matched memory, up to 11% more in AQLoRA §7.2: that is the artifact which
    `random-matched` removes. `mismatch` is that of the parameters.

    Raises:
        InputError: a budget that selects nothing, or no other set of that many layers.
    """

    name = "random-count"
    match = "layers"
    within = Decimal(0)
    needs_like = False

    rounding: Literal["ceil", "floor"] = "ceil"

    def law(self, profile: Profile, budget: Budget | None, like: Selection | None) -> Controls:
        """Every set that a draw can be, matched or under a layers budget."""
        if like is not None:
            return controls(profile, like, within=Decimal(0), match="layers", settable=())
        assert budget is not None  # the core refuses a missing budget before it asks
        count = budget.of(len(profile), self.rounding)
        if count == 0:
            raise nothing(profile, budget, self.key)
        return counted(profile, count)

    def families(self, profile: Profile, likes: Sequence[Selection]) -> Families:
        """Every nested family that a draw can be."""
        return families(profile, likes, within=Decimal(0), match="layers")

    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` distinct draws; all sets, shuffled, where fewer exist."""
        if like is not None or budget is None or budget.unit == "layers":
            return super().draws(profile, budget, rng, like, count)
        return unrepeated(
            lambda: Pick(top(profile, [rng.random() for _ in profile.names], budget, selector=self.key)), count
        )
