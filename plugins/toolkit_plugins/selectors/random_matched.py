"""Chance with the same memory: the control that a ranking is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Literal

from toolkit.errors import InputError
from toolkit.interfaces import Pick, Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.matching import Controls, controls


@dataclass
class RandomMatched(Selector):
    """Draw uniformly from all sets of layers that hold as many parameters as another selection, to within 0.1%.

    The law: { S ≠ M : |total(S) − total(M)| ≤ within·total(M) }, uniform, in `unit`; the count floats (AQLoRA
    §7.2). `thirds` and `roles` also keep M's count in each third of depth and of each role; `disjoint` leaves
    M's layers out. Counted and sampled exactly (`toolkit.selection.matching`).

    Raises:
        InputError: a tolerance outside [0, 1), one that no other set reaches (the nearest is named), a
            constraint that cannot be met, or a table past its limit.
    """

    name = "random-matched"
    random = True
    needs_like = True

    within: Decimal = Decimal("0.001")
    unit: Literal["parameters", "bytes"] = "parameters"
    thirds: bool = False
    roles: bool = False
    disjoint: bool = False

    def __post_init__(self) -> None:
        self.within = Decimal(str(self.within))
        if not self.within.is_finite() or not 0 <= self.within < 1:
            raise InputError(f"option 'within' of selector 'random-matched' is {self.within}; it lies in [0, 1)")
        self.within = self.within.normalize()  # 0.010 and 0.01 are one tolerance: one key, one random stream

    def law(self, profile: Profile, like: Selection) -> Controls:
        """Every set that a draw can be."""
        return controls(
            profile,
            like,
            within=self.within,
            unit=self.unit,
            thirds=self.thirds,
            roles=self.roles,
            disjoint=self.disjoint,
        )

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> Pick:
        """The first draw."""
        return self.draws(profile, budget, rng, like, 1)[0]

    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` distinct draws; all sets, shuffled, where fewer exist."""
        assert like is not None  # the core refuses a missing selection before it asks
        return self.law(profile, like).draws(rng, count)
