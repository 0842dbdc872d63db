"""Chance with the same memory: the control that a ranking is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Law
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.chains import Families, families
from toolkit.selection.laws import CountedLaw
from toolkit.selection.matching import Controls, controls
from toolkit.selection.quantities import Match


@dataclass
class RandomMatched(CountedLaw):
    """Draw uniformly from all sets of layers that hold as many parameters as another selection, to within 0.1%.

    The law: { S ≠ M : |total(S) − total(M)| ≤ within·total(M) }, uniform; the count floats (AQLoRA §7.2). `match`
    says which total: parameters, bytes (at 16 bit), extra-bytes (16-bit bytes less those under `quantizer`) or
    adapter-parameters (d_in + d_out). `thirds` and `roles` also keep M's count in each third of depth and of each
    role; `disjoint` leaves M's layers out. Counted and sampled exactly (`toolkit.selection.matching`).

    Uniform over sets is not uniform over layers: more sets hold many small layers than few large ones, so that
    small layers are drawn more often; `inclusion` tells how often.

    A chain is uniform over all nested families with these totals and constraints at each budget
    (`toolkit.selection.chains`); at one budget its law is therefore another one than that of single draws.
    Chains leave `disjoint` out.

    Raises:
        InputError: a tolerance outside [0, 1), one that no other set reaches (the nearest is named), a
            constraint that cannot be met, or a table past its limit.
    """

    name = "random-matched"

    within: Decimal = Decimal("0.001")
    match: Match = "parameters"
    quantizer: str = "nf4"
    thirds: bool = False
    roles: bool = False
    disjoint: bool = False

    def __post_init__(self) -> None:
        self.within = Decimal(str(self.within))
        if not self.within.is_finite() or not 0 <= self.within < 1:
            raise InputError(f"option 'within' of selector {self.name!r} is {self.within}; it lies in [0, 1)")
        self.within = self.within.normalize()  # 0.010 and 0.01 are one tolerance: one key, one random stream

    @classmethod
    def standard(cls) -> list[Law]:
        """The plain form, and the one that holds the composition."""
        return [cls(), cls(roles=True, thirds=True)]

    @property
    def quantizers(self) -> tuple[str, ...]:
        """The base quantizer, whose bytes extra-bytes are counted from."""
        return (self.quantizer,) if self.match == "extra-bytes" else ()

    @property
    def holds(self) -> tuple[str, ...]:
        """The constraints that are asked for."""
        return tuple(name for name in ("roles", "thirds") if getattr(self, name))

    @property
    def nests(self) -> bool:
        """Not with `disjoint`."""
        return not self.disjoint

    @property
    def asked(self) -> dict[str, Any]:
        """What single sets and families have in common: the quantity, its tolerance and the composition."""
        return {name: getattr(self, name) for name in ("within", "match", "quantizer", "thirds", "roles")}

    def law(self, profile: Profile, budget: Budget | None, like: Selection | None) -> Controls:
        """Every set that a draw can be."""
        assert like is not None  # the core refuses a missing selection before it asks
        return controls(profile, like, **self.asked, disjoint=self.disjoint)

    def families(self, profile: Profile, likes: Sequence[Selection]) -> Families:
        """Every nested family that a draw can be."""
        return families(profile, likes, **self.asked)
