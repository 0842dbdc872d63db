"""No layer: the fully quantized reference."""

from __future__ import annotations

from random import Random

from toolkit.interfaces import Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection


class NoLayers(Selector):
    """Select no layer: S = ∅. Takes no budget."""

    name = "none"
    needs_budget = False

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> list[str]:
        """No names."""
        return []
