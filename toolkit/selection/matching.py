"""Matched random controls: uniform over every set of layers that holds as much as a given selection.

The law. Let M be the matched selection, T its total (of one of the `quantities`: parameters, 16-bit bytes, extra
bytes, adapter parameters, or layers) and w the tolerance. A control is drawn uniformly from

    { S ≠ M : |total(S) − T| ≤ w·T, and S meets the constraints },

all sums in integers and w an exact decimal. The constraints, which combine: `thirds` (as many layers as M in
each third of depth, ⌊3·block/blocks⌋), `roles` (as many layers as M of each role), `disjoint` (no layer of M),
`lowest_block` (S begins in the block in which M begins; layers outside the blocks count as above all of them).
Under `disjoint` M is none of the sets that it is ranked among, so that its rank is no randomization test: where
few layers make the difference, all of them in M, chance gives small p-values too often.
AQLoRA §7.2 recommends this control (matched on parameters, the count left to float) and states no sampler;
the exact one in `subsets` is ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from random import Random

from toolkit.errors import InputError
from toolkit.interfaces import Pick
from toolkit.records.profile import Profile
from toolkit.records.profile import thirds as third_of_depth
from toolkit.records.selection import Selection
from toolkit.selection.lowest import Holding
from toolkit.selection.quantities import Quantity, quantities
from toolkit.selection.subsets import TABLE_LIMIT, Subsets, TableTooLarge

CONSTRAINTS = ("thirds", "roles", "disjoint", "lowest_block")
"""The constraints, as options name them."""

DIGITS_LIMIT = 4_300
"""Most decimal digits of a subset count: Python refuses to read longer integers from JSON by default."""


class Uncounted(InputError):
    """The sets of a law are too many, or of too many sizes, to be counted."""


@dataclass(frozen=True)
class Controls:
    """The feasible subsets of one law, numbered, the matched selection itself left out.

    Attributes:
        names: the profile's layers, in order.
        match: the matched quantity. A law that matches counts states neither `mismatch` (the parameters' is then
            recorded) nor `single_total`.
        sizes: what each layer counts of the matched quantity.
        free: indexes of the layers that may be drawn; `subsets` numbers its items in this order.
        subsets: the exact enumeration.
        target: T.
        own: the number of the matched selection, or None where it is not among the subsets.
    """

    names: tuple[str, ...]
    match: Quantity
    sizes: tuple[int, ...]
    free: tuple[int, ...]
    subsets: Subsets | Holding
    target: int
    own: int | None

    @property
    def count(self) -> int:
        """`feasible_subsets`: how many sets the law draws from, exactly; the matched one is not among them."""
        return self.subsets.count - (self.own is not None)

    @cached_property
    def inclusion(self) -> list[float]:
        """Each layer's probability of being drawn, in profile order: exact counts, rounded once to float64."""
        own = set() if self.own is None else set(self.subsets.unrank(self.own))
        shares = [0.0] * len(self.names)
        for item, at in enumerate(self.free):
            shares[at] = (self.subsets.holding[item] - (item in own)) / self.count
        return shares

    @property
    def single_total(self) -> bool:
        """Whether M is a set of the law and all others hold its total: only then is its rank among draws exact."""
        return self.own is not None and self.subsets.totals == (self.target, self.target)

    def pick(self, number: int) -> Pick:
        """The set of that number, 0 … count − 1, with its mismatch and the law's figures."""
        if self.own is not None and number >= self.own:
            number += 1
        chosen = [self.free[item] for item in self.subsets.unrank(number)]
        layers = [self.names[at] for at in chosen]
        if self.match == "layers":
            return Pick(layers, feasible_subsets=self.count, inclusion=self.inclusion)
        total = sum(self.sizes[at] for at in chosen)
        return Pick(
            layers,
            mismatch=(total - self.target) / self.target,
            feasible_subsets=self.count,
            inclusion=self.inclusion,
            single_total=self.single_total,
        )

    def draws(self, rng: Random, count: int) -> list[Pick]:
        """`count` distinct sets, uniformly without replacement; all of them, shuffled, where fewer exist."""
        return [self.pick(number) for number in distinct(rng, self.count, count)]


def distinct(rng: Random, below: int, count: int) -> list[int]:
    """`count` distinct integers of 0 … below − 1 in random order, or all of them where there are fewer.

    The first steps of a Fisher–Yates shuffle, the untouched places of which are not stored: a shorter answer
    is the beginning of a longer one, and `below` may be of any length.
    """
    moved: dict[int, int] = {}
    numbers = []
    for place in range(min(count, below)):
        other = place + rng.randrange(below - place)
        numbers.append(moved.get(other, other))
        moved[other] = moved.pop(place, place)
    return numbers


def window(target: int, within: Decimal) -> tuple[int, int]:
    """The totals within a tolerance: ⌈T − w·T⌉ and ⌊T + w·T⌋, in exact arithmetic."""
    slack = Fraction(within) * target
    return math.ceil(target - slack), math.floor(target + slack)


def controls(
    profile: Profile,
    like: Selection,
    *,
    within: Decimal = Decimal("0.001"),
    match: Quantity = "parameters",
    quantizer: str = "nf4",
    thirds: bool = False,
    roles: bool = False,
    disjoint: bool = False,
    lowest_block: bool = False,
    settable: Collection[str] = ("within", *CONSTRAINTS[:3]),
) -> Controls:
    """The law of a matched control: every set that it may draw, counted.

    Args:
        profile: the layers.
        like: M, the selection to match, of this profile.
        within: w, 0 ≤ w < 1; a fraction of M's total.
        match, quantizer: what is matched; see `quantities`.
        thirds, roles, disjoint, lowest_block: the constraints.
        settable: which of `within` and the constraints the asker can set: errors advise these only.

    Raises:
        InputError: w outside its range, a constraint that no other set can meet, a tolerance that no other set
            reaches (the nearest reachable mismatch is named); as `Uncounted`, a table past its limit, or a
            number of subsets too long to be written.
    """
    within = Decimal(str(within))
    if not within.is_finite() or not 0 <= within < 1:
        raise InputError(f"tolerance within={within} is outside [0, 1): it is a fraction of the matched total")
    chosen = frozenset(like.layers)
    inside = tuple(name in chosen for name in profile.names)
    above = None
    if lowest_block:
        depth = [profile.blocks if layer.block is None else layer.block for layer in profile.layers]
        lowest = min(at for at, here in zip(depth, inside, strict=True) if here)
        above = tuple((at > lowest) - (at < lowest) for at in depth)
    asked = _Asked(
        tuple(profile.names),
        quantities(profile, match, quantizer),
        inside,
        within,
        disjoint,
        tuple(labelings(profile, thirds=thirds, roles=roles).items()),
        above,
        match,
        like.selector,
        tuple(settable),
    )
    return _law(asked)


def labelings(profile: Profile, *, thirds: bool, roles: bool) -> dict[str, tuple[object, ...]]:
    """Constraint → each layer's label, of which a draw holds as many as the matched selection."""
    found: dict[str, tuple[object, ...]] = {}
    if roles:
        found["roles"] = tuple(layer.role for layer in profile.layers)
    if thirds:
        found["thirds"] = tuple(third_of_depth(profile))
    return found


def counted(profile: Profile, count: int) -> Controls:
    """The law of `count` layers drawn uniformly, nothing matched and nothing left out."""
    names = tuple(profile.names)
    subsets = Subsets([1] * len(names), count, count)
    return Controls(names, "layers", (1,) * len(names), tuple(range(len(names))), subsets, count, None)


@dataclass(frozen=True)
class _Asked:
    """A law's question: what `controls` was asked for, as plain data."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inside: tuple[bool, ...]
    within: Decimal
    disjoint: bool
    labelings: tuple[tuple[str, tuple[object, ...]], ...]
    above: tuple[int, ...] | None  # of each layer, the sign of its block less the lowest one
    match: Quantity
    matched: str
    settable: tuple[str, ...]

    @property
    def unit(self) -> str:
        """The matched quantity in words."""
        return self.match.replace("-", " ")

    @property
    def target(self) -> int:
        return sum(size for size, here in zip(self.sizes, self.inside, strict=True) if here)

    @property
    def free(self) -> tuple[int, ...]:
        """The layers that may be drawn."""
        return tuple(
            at
            for at, here in enumerate(self.inside)
            if not (self.disjoint and here) and not (self.above is not None and self.above[at] < 0)
        )

    @property
    def quotas(self) -> dict[str, Counter[object]]:
        return {n: Counter(m for m, here in zip(ms, self.inside, strict=True) if here) for n, ms in self.labelings}

    @property
    def constraints(self) -> list[str]:
        named = {"disjoint": self.disjoint, "lowest_block": self.above is not None}
        return [name for name, _ in self.labelings] + [name for name, asked in named.items() if asked]

    def advice(self, start: str) -> str:
        """`start`, then the constraints that may be left out; nothing where there are none."""
        relax = [name for name in self.constraints if name in self.settable]
        return f"{start}leave out {' or '.join(relax)}" if relax else ""

    def enumerate(self, low: int, high: int) -> Subsets | Holding:
        """The sets in a window under all constraints."""
        free, quotas = self.free, self.quotas
        sizes = [self.sizes[at] for at in free]
        labels = [[marks[at] for at in free] for _, marks in self.labelings]
        wanted = [quotas[name] for name, _ in self.labelings]
        try:
            if self.above is None:
                return Subsets(sizes, low, high, labels, wanted)
            first = [item for item, at in enumerate(free) if self.above[at] == 0]
            return Holding(sizes, low, high, labels, wanted, first)
        except TableTooLarge as error:
            adding = "add roles (a count for each role fixes the totals where a role has one size)"
            advice = self.advice("") or (adding if "roles" in self.settable and not self.labelings else "")
            raise Uncounted(
                f"counting the sets of {len(sizes)} layers of {len(set(sizes))} different sizes ({self.unit}) needs a "
                f"table of at least {error.needed:,} steps, and the limit is {TABLE_LIMIT:,}: "
                + (f"{advice}, or " if advice else "")
                + "match a smaller selection; a wider tolerance makes no smaller table"
            ) from None


@lru_cache(maxsize=4)
def _law(asked: _Asked) -> Controls:
    target, free = asked.target, asked.free
    for name, marks in asked.labelings:
        for label, needed in sorted(asked.quotas[name].items(), key=lambda item: str(item[0])):
            left = sum(1 for at in free if marks[at] == label)
            if left < needed:
                what = f"third {label} of the depth" if name == "thirds" else f"role {label!r}"
                raise InputError(
                    f"no set meets {name} and disjoint together: {asked.matched} holds {needed} layers of {what} and "
                    f"leaves {left}; leave out {name} or disjoint"
                )
    subsets = asked.enumerate(*window(target, asked.within))
    place = {at: item for item, at in enumerate(free)}
    own = None if asked.disjoint else subsets.rank([place[at] for at, here in enumerate(asked.inside) if here])
    found = Controls(asked.names, asked.match, asked.sizes, free, subsets, target, own)
    if found.count == 0:
        raise _unreachable(asked)
    if found.count >= 10**DIGITS_LIMIT:
        adding = [name for name in ("disjoint", "roles", "thirds") if name in asked.settable]
        raise Uncounted(
            f"more than 10^{DIGITS_LIMIT} sets match {asked.matched}: their number is too long to be written in a "
            f"file; match a smaller selection{', or add ' + ' or '.join(adding) if adding else ''}"
        )
    return found


def _unreachable(asked: _Asked) -> InputError:
    """The error of a window that holds no other set: how near the nearest one is, exactly."""
    target, constraints = asked.target, asked.constraints
    under = f" under {' and '.join(constraints)}" if constraints else ""
    start = f"no other set holds {target:,} {asked.unit} within {asked.within} of {asked.matched}{under}"
    if "within" not in asked.settable:
        return InputError(f"{start}: match another selection")
    nearest = asked.enumerate(0, 2 * target).nearest(target)
    relax = asked.advice("; or ")
    if nearest is None:
        return InputError(f"{start}, and none does at any tolerance below 1{relax}")
    off = Fraction(nearest - target, target)
    needed = Decimal(abs(off).numerator) / Decimal(abs(off).denominator)
    return InputError(
        f"{start}: the nearest reachable total is {nearest:,}, a mismatch of {'-' if off < 0 else ''}{needed:.3g} "
        f"({off.numerator}/{off.denominator}); ask for within={_ceiling(abs(off))} or more{relax}"
    )


def _ceiling(fraction: Fraction) -> str:
    """The smallest decimal of three significant digits that is not below a positive fraction."""
    exponent = 0
    while fraction * 10**exponent < 100:
        exponent += 1
    scaled = fraction * 10**exponent
    return format(Decimal(-(-scaled.numerator // scaled.denominator)).scaleb(-exponent).normalize(), "f")
