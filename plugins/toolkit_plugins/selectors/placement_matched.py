"""Chance with the same adapters: the control of which layers get one."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.interfaces import Law
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.matching import CONSTRAINTS, Controls, controls
from toolkit.selection.quantities import Match
from toolkit_plugins.selectors.random_matched import RandomMatched


@dataclass
class PlacementMatched(RandomMatched):
    """Draw uniformly from all sets of layers whose adapters hold as many parameters as another selection's.

    The law is that of `random-matched` with match=adapter-parameters: an adapter of rank r has r(d_in + d_out)
    parameters, not its layer's, and the rank, which all layers share, cancels. With `lowest_block` a draw also begins
    in the block in which M begins, so that backward runs through as many blocks:
    { S : …, min block(S) = min block(M) }; layers outside the blocks count as above all of them.

    A chain leaves `disjoint` and `lowest_block` out.

    Raises:
        InputError: those of `random-matched`.
    """

    name = "placement-matched"

    match: Match = "adapter-parameters"
    lowest_block: bool = False

    @classmethod
    def standard(cls) -> list[Law]:
        """None: which layers are kept in 16 bit is not a question of placement."""
        return []

    @property
    def holds(self) -> tuple[str, ...]:
        """The constraints that are asked for."""
        return (*super().holds, *(["lowest_block"] if self.lowest_block else []))

    @property
    def nests(self) -> bool:
        """Not with `disjoint` or `lowest_block`."""
        return super().nests and not self.lowest_block

    def law(self, profile: Profile, budget: Budget | None, like: Selection | None) -> Controls:
        """Every set that a draw can be."""
        assert like is not None  # the core refuses a missing selection before it asks
        return controls(
            profile,
            like,
            **self.asked,
            disjoint=self.disjoint,
            lowest_block=self.lowest_block,
            settable=("within", *CONSTRAINTS),
        )
