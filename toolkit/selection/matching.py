"""Matched random controls: uniform over every set of layers that holds as much as a given selection.

The law. Let M be the matched selection, T its total (parameters, 16-bit bytes, or layers) and w the
tolerance. A control is drawn uniformly from

    { S ≠ M : |total(S) − T| ≤ w·T, and S meets the constraints },

all sums in integers and w an exact decimal. The constraints, which combine: `thirds` (as many layers as M in
each third of depth, ⌊3·block/blocks⌋), `roles` (as many layers as M of each role), `disjoint` (no layer of M).
Under `disjoint` M is none of the sets that it is ranked among, so that its rank is no randomization test: where
few layers make the difference, all of them in M, chance gives small p-values too often.
AQLoRA §7.2 recommends this control (matched on parameters, the count left to float) and states no sampler;
the exact one in `subsets` is ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from random import Random
from typing import Literal

from toolkit.errors import InputError
from toolkit.interfaces import Pick
from toolkit.records.profile import Profile
from toolkit.records.profile import thirds as third_of_depth
from toolkit.records.selection import Selection
from toolkit.selection.subsets import TABLE_LIMIT, Subsets, TableTooLarge

Unit = Literal["layers", "parameters", "bytes"]

DIGITS_LIMIT = 4_300
"""Most decimal digits of a subset count: Python refuses to read longer integers from JSON by default."""


@dataclass(frozen=True)
class Controls:
    """The feasible subsets of one law, numbered, the matched selection itself left out.

    Attributes:
        names: the profile's layers, in order.
        sizes: what each layer counts, in the matched unit.
        free: indexes of the layers that may be drawn; `subsets` numbers its items in this order.
        subsets: the exact enumeration.
        target: T.
        own: the number of the matched selection, or None where it is not among the subsets.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    free: tuple[int, ...]
    subsets: Subsets
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
        total = sum(self.sizes[at] for at in chosen)
        return Pick(
            layers=[self.names[at] for at in chosen],
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
    unit: Unit = "parameters",
    thirds: bool = False,
    roles: bool = False,
    disjoint: bool = False,
) -> Controls:
    """The law of a matched control: every set that it may draw, counted.

    Args:
        profile: the layers.
        like: M, the selection to match, of this profile.
        within: w, 0 ≤ w < 1; a fraction of M's total.
        unit: what is matched.
        thirds, roles, disjoint: the constraints.

    Raises:
        InputError: w outside its range, a constraint that no other set can meet, a tolerance that no other
            set reaches (the nearest reachable mismatch is named), a table past its limit, or a number of
            subsets too long to be written.
    """
    within = Decimal(str(within))
    if not within.is_finite() or not 0 <= within < 1:
        raise InputError(f"tolerance within={within} is outside [0, 1): it is a fraction of the matched total")
    sizes = tuple(1 if unit == "layers" else getattr(layer, unit) for layer in profile.layers)
    chosen = frozenset(like.layers)
    inside = tuple(name in chosen for name in profile.names)
    labelings: dict[str, tuple[object, ...]] = {}
    if roles:
        labelings["roles"] = tuple(layer.role for layer in profile.layers)
    if thirds:
        labelings["thirds"] = tuple(third_of_depth(profile))
    return _law(tuple(profile.names), sizes, inside, within, disjoint, tuple(labelings.items()), unit, like.selector)


def counted(profile: Profile, count: int) -> Controls:
    """The law of `count` layers drawn uniformly, nothing matched and nothing left out."""
    names = tuple(profile.names)
    subsets = _enumerate([1] * len(names), count, count, {}, {}, "layers")
    return Controls(names, (1,) * len(names), tuple(range(len(names))), subsets, count, None)


@lru_cache(maxsize=4)
def _law(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    inside: tuple[bool, ...],
    within: Decimal,
    disjoint: bool,
    labelings: tuple[tuple[str, tuple[object, ...]], ...],
    unit: str,
    matched: str,
) -> Controls:
    target = sum(size for size, here in zip(sizes, inside, strict=True) if here)
    low, high = window(target, within)
    free = tuple(at for at in range(len(names)) if not (disjoint and inside[at]))
    labels = {name: [marks[at] for at in free] for name, marks in labelings}
    quotas = {name: Counter(m for m, here in zip(marks, inside, strict=True) if here) for name, marks in labelings}
    for name, quota in quotas.items():
        for label, needed in sorted(quota.items(), key=lambda item: str(item[0])):
            left = labels[name].count(label)
            if left < needed:
                what = f"third {label} of the depth" if name == "thirds" else f"role {label!r}"
                raise InputError(
                    f"no set meets {name} and disjoint together: {matched} holds {needed} layers of {what} and "
                    f"leaves {left}; leave out {name} or disjoint"
                )
    given = [sizes[at] for at in free]
    subsets = _enumerate(given, low, high, labels, quotas, unit)
    own = None if disjoint else subsets.rank([at for at, here in enumerate(inside) if here])
    found = Controls(names, sizes, free, subsets, target, own)
    if found.count == 0:
        raise _unreachable(given, target, within, unit, labels, quotas, disjoint, matched)
    if found.count >= 10**DIGITS_LIMIT:
        raise InputError(
            f"more than 10^{DIGITS_LIMIT} sets match {matched}: their number is too long to be written in a file; "
            "match a smaller selection, or add disjoint, roles or thirds"
        )
    return found


def _enumerate(
    sizes: Sequence[int],
    low: int,
    high: int,
    labels: Mapping[str, Sequence[object]],
    quotas: Mapping[str, Mapping[object, int]],
    unit: str,
) -> Subsets:
    try:
        return Subsets(sizes, low, high, list(labels.values()), list(quotas.values()))
    except TableTooLarge as error:
        if labels:
            advice = f"leave out {' or '.join(labels)}"
        else:
            advice = "add roles (a count for each role fixes the totals where a role has one size)"
        raise InputError(
            f"counting the sets of {len(sizes)} layers of {len(set(sizes))} different sizes ({unit}) needs a table of "
            f"at least {error.needed:,} steps, and the limit is {TABLE_LIMIT:,}: {advice}, or match a smaller "
            "selection; a wider tolerance makes no smaller table"
        ) from None


def _unreachable(
    sizes: Sequence[int],
    target: int,
    within: Decimal,
    unit: str,
    labels: Mapping[str, Sequence[object]],
    quotas: Mapping[str, Mapping[object, int]],
    disjoint: bool,
    matched: str,
) -> InputError:
    """The error of a window that holds no other set: how near the nearest one is, exactly."""
    constraints = [*labels, *(["disjoint"] if disjoint else [])]
    under = f" under {' and '.join(constraints)}" if constraints else ""
    nearest = _enumerate(sizes, 0, 2 * target, labels, quotas, unit).nearest(target)
    start = f"no other set holds {target:,} {unit} within {within} of {matched}{under}"
    relax = f"; or leave out {' or '.join(constraints)}" if constraints else ""
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
