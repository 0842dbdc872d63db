"""Chance that does not tilt to small layers: layers in random order until the memory is used up, then repaired."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from random import Random

from toolkit.errors import InputError
from toolkit.interfaces import Law, Pick, unrepeated
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.matching import Uncounted, controls, window
from toolkit.selection.quantities import Match, quantities

ORDERS = 10_000
"""Random orders that one draw may use up before it is given up."""

SIMULATED = 1_000
"""Draws that the inclusion probabilities are estimated from."""


@dataclass
class RandomShuffleMatched(Law):
    """Take layers in random order up to the matched total, and swap layers until it is met.

    The law is that of this procedure (our choice), T the total of the matched selection M in the unit of `match`:

    1. Put the layers in uniformly random order, and take them from the front as long as this brings the total
       nearer to T.
    2. While the total differs from T by more than within·T, swap one taken layer for one left such that the total
       comes as near to T as one swap can bring it: of equally near ones, that whose taken layer comes last, then the
       one with the lower total; of layers of one size, the last taken goes and the first left comes.
    3. Where no swap brings the total nearer, begin again with a new order.

    Each swap lessens an integer, so that a draw ends; after 10,000 orders without a set it is given up. A layer's
    probability is near its share of the memory whatever its size (at 10% of the parameters about .10 for small and
    large ones), where the uniform law of `random-matched` prefers small layers. The sets of the window,
    `feasible_subsets`, are counted exactly (none stated where the table is too large), but this law does not draw them
    equally often, and may never draw some. `inclusion` is the share in 1,000 simulated draws of a fixed stream, pooled
    over layers of one size, which the law cannot tell apart (M not left out). A set that came up before, and M, are
    drawn again: among as many sets as real models have, that changes no probability that could be noticed, but a rank
    among these draws is not called exact.

    Raises:
        InputError: a tolerance outside [0, 1), one that no other set reaches, or one that no random order meets.
    """

    name = "random-shuffle-matched"

    within: Decimal = Decimal("0.001")
    match: Match = "parameters"
    quantizer: str = "nf4"

    def __post_init__(self) -> None:
        self.within = Decimal(str(self.within))
        if not self.within.is_finite() or not 0 <= self.within < 1:
            raise InputError(f"option 'within' of selector {self.name!r} is {self.within}; it lies in [0, 1)")
        self.within = self.within.normalize()

    @classmethod
    def standard(cls) -> list[Law]:
        """Itself."""
        return [cls()]

    @property
    def quantizers(self) -> tuple[str, ...]:
        """The base quantizer, whose bytes extra-bytes are counted from."""
        return (self.quantizer,) if self.match == "extra-bytes" else ()

    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` distinct draws; fewer where 100 in a row came up before."""
        assert like is not None  # the core refuses a missing selection before it asks
        names, matched = profile.names, frozenset(like.layers)
        sizes = quantities(profile, self.match, self.quantizer)
        target = sum(size for size, name in zip(sizes, names, strict=True) if name in matched)
        feasible = None
        with suppress(Uncounted):
            feasible = controls(
                profile, like, within=self.within, match=self.match, quantizer=self.quantizer, settable=("within",)
            ).count
        shuffle = Shuffle(sizes, target, *window(target, self.within))
        inclusion = _inclusion(shuffle)

        def draw() -> Pick:
            chosen = shuffle.draw(rng)
            mismatch = (sum(sizes[at] for at in chosen) - target) / target
            return Pick([names[at] for at in chosen], mismatch, feasible, inclusion, SIMULATED)

        found = [pick for pick in unrepeated(draw, count + 1) if frozenset(pick.layers) != matched]
        if not found:
            raise InputError(
                f"{self.key} found no other set than {like.selector} itself; ask for a larger tolerance (within)"
            )
        return found[:count]


@dataclass(frozen=True)
class Shuffle:
    """The procedure over sizes alone: positive integers, a target, and the window around it."""

    sizes: tuple[int, ...]
    target: int
    low: int
    high: int

    def draw(self, rng: Random) -> list[int]:
        """One set, its items ascending.

        Raises:
            InputError: `ORDERS` orders in a row came to no set in the window.
        """
        nearest = None
        for _ in range(ORDERS):
            chosen, total = self._try(rng)
            if self.low <= total <= self.high:
                return sorted(chosen)
            if nearest is None or abs(total - self.target) < abs(nearest - self.target):
                nearest = total
        raise InputError(
            f"{ORDERS:,} random orders came to no total from {self.low:,} to {self.high:,}; the nearest was "
            f"{nearest:,} ({self.target:,} is wanted): ask for a larger tolerance (within), or for random-matched, "
            "whose sets are counted"
        )

    def _try(self, rng: Random) -> tuple[list[int], int]:
        """One random order: the items taken when no swap is needed, or none helps, and their total."""
        sizes, target = self.sizes, self.target
        order = _Order(len(sizes), rng)
        taken: dict[int, list[int]] = {}  # size → places in the order, ascending
        total = place = 0
        while place < len(sizes):
            size = sizes[order[place]]
            if abs(total + size - target) >= abs(total - target):
                break
            total += size
            taken.setdefault(size, []).append(place)
            place += 1
        while not self.low <= total <= self.high:
            swap = self._swap(taken, self.target - total)
            if swap is None:
                break
            gone, come = swap
            taken[gone].pop()
            places = taken.setdefault(come, [])
            insort(places, self._first_left(order, come, places))
            total += come - gone
        return [order[place] for places in taken.values() for place in places], total

    def _swap(self, taken: dict[int, list[int]], off: int) -> tuple[int, int] | None:
        """The sizes that step 2 exchanges, the taken one first; None where no exchange brings the total nearer."""
        left = [size for size, count in self.counts.items() if count > len(taken.get(size, ()))]
        best = None
        for size, places in taken.items():
            if not places:
                continue
            at = bisect_left(left, size + off)
            for other in left[max(0, at - 1) : at + 1]:
                distance = abs(size + off - other)
                if distance < abs(off) and (best is None or (distance, -places[-1], other) < best[:3]):
                    best = (distance, -places[-1], other, size)
        return None if best is None else (best[3], best[2])

    def _first_left(self, order: _Order, size: int, taken: list[int]) -> int:
        """The first place of an item of this size that is not taken."""
        place = 0
        while place in taken or self.sizes[order[place]] != size:
            place += 1
        return place

    @property
    def counts(self) -> Counter[int]:
        """How many items there are of each size, sizes ascending."""
        return _counts(self.sizes)


class _Order:
    """A uniformly random order of 0 … n − 1, shuffled (Fisher–Yates) only as far as it is looked at."""

    def __init__(self, n: int, rng: Random) -> None:
        self.items, self.done, self.rng = list(range(n)), 0, rng

    def __getitem__(self, place: int) -> int:
        items = self.items
        while self.done <= place:
            other = self.done + self.rng.randrange(len(items) - self.done)
            items[self.done], items[other] = items[other], items[self.done]
            self.done += 1
        return items[place]


@lru_cache(maxsize=8)
def _counts(sizes: tuple[int, ...]) -> Counter[int]:
    return Counter(sorted(sizes))


@lru_cache(maxsize=64)
def _inclusion(shuffle: Shuffle) -> list[float]:
    """Each item's share in `SIMULATED` draws of a fixed stream, pooled over items of one size."""
    rng, held = Random("inclusion"), Counter[int]()
    for _ in range(SIMULATED):
        held.update(shuffle.sizes[item] for item in shuffle.draw(rng))
    return [held[size] / (SIMULATED * shuffle.counts[size]) for size in shuffle.sizes]
