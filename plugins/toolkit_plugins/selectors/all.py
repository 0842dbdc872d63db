"""Every layer: the unquantized reference."""

from __future__ import annotations

from random import Random

from toolkit.interfaces import Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection


class All(Selector):
    """Select every layer: S = {1 … L}. Takes no budget."""

    name = "all"
    needs_budget = False

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> list[str]:
        """All names."""
        return profile.names
