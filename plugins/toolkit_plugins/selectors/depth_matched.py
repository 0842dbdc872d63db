"""Chance with the same depth profile: what is left of a ranking once its depth is held."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.chains import Families, families
from toolkit.selection.laws import CountedLaw
from toolkit.selection.matching import Controls, controls


class DepthMatched(CountedLaw):
    """Draw layers uniformly, as many in each third of the network as another selection holds.

    The law: { S ≠ M : |S ∩ third| = |M ∩ third| for each third }, uniform, third = ⌊3·block/blocks⌋ (AQLoRA
    §7.3). Counts are matched and parameters are not: `mismatch` is that of the parameters.
    `random-matched(thirds=true)` matches both.

    Raises:
        InputError: no other set has those counts.
    """

    name = "depth-matched"
    match = "layers"
    within = Decimal(0)

    @property
    def holds(self) -> tuple[str, ...]:
        """Thirds."""
        return ("thirds",)

    def law(self, profile: Profile, budget: Budget | None, like: Selection | None) -> Controls:
        """Every set that a draw can be."""
        assert like is not None  # the core refuses a missing selection before it asks
        return controls(profile, like, within=Decimal(0), match="layers", thirds=True, settable=())

    def families(self, profile: Profile, likes: Sequence[Selection]) -> Families:
        """Every nested family that a draw can be."""
        return families(profile, likes, within=Decimal(0), match="layers", thirds=True)
