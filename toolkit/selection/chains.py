"""Nested families of matched random controls: uniform over all of them, one set a budget.

The law. Let M₁ … M_B be the matched selections in the order of their totals T₁ ≤ … ≤ T_B, and w the tolerance. A
family is drawn uniformly from

    { (S₁ ⊆ S₂ ⊆ … ⊆ S_B) ≠ (M₁ … M_B) : |total(S_b) − T_b| ≤ w·T_b, and each S_b meets the constraints of M_b },

without replacement. One budget alone is then not uniform: a set counts once for each family that it is part of, so
that what S_b looks like also depends on the other budgets. The matched selections need not be nested
themselves: they are then targets only, and (M₁ … M_B) is none of the families (`single_total` is false).

Method. Layers of one size and one label of each constraint form a cell of n_c layers. A family is a choice of
counts v₁ ≤ v₂ ≤ … ≤ v_B (vectors over cells, each with its total in its window), and then of sets with these counts:

    ∏_c C(n_c, v_B,c) · C(v_B,c, v_{B−1},c) · … · C(v_2,c, v_1,c)

of them. Summed from the inside out, G_b(v) = Σ_{u ≤ v} ∏_c C(v_c, u_c)·G_{b−1}(u), in integers of any length; numbers
are given to families by cumulative sums, the outermost set first, and no draw is rejected.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from random import Random

from toolkit.errors import InputError
from toolkit.interfaces import Pick
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.combinations import pascal, rank_combination, unrank_combination
from toolkit.selection.matching import DIGITS_LIMIT, Uncounted, distinct, labelings, window
from toolkit.selection.quantities import Quantity, quantities

PAIR_LIMIT = 6_000_000
"""The most pairs of counts at neighbouring budgets that are gone through, about a microsecond each."""

STEP_LIMIT = 300_000
"""The most steps that the search for one budget's counts may take, about ten microseconds each."""

Vector = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """One budget: its target and window (in the matched quantity), and each label's quota."""

    target: int
    low: int
    high: int
    quotas: tuple[tuple[tuple[object, int], ...], ...]


@dataclass(frozen=True)
class Families:
    """The nested families of one law, numbered, the matched family itself left out.

    Attributes:
        names: the profile's layers, in order.
        match: the matched quantity; see `Controls`.
        sizes: what each layer counts of it.
        labels: one labelling a constraint, one label a layer.
        levels: the budgets, by ascending total.
        order: for each level, which of the given selections it is.
        matched: the layers of each level's matched selection, ascending.
    """

    names: tuple[str, ...]
    match: Quantity
    sizes: tuple[int, ...]
    labels: tuple[tuple[object, ...], ...]
    levels: tuple[Level, ...]
    order: tuple[int, ...]
    matched: tuple[tuple[int, ...], ...]

    @cached_property
    def cells(self) -> list[tuple[int, tuple[object, ...], tuple[int, ...]]]:
        """(size, labels, layers), large sizes first: what is left at the end of a total is filled by small ones."""
        grouped: dict[tuple[int, tuple[object, ...]], list[int]] = {}
        for at, size in enumerate(self.sizes):
            grouped.setdefault((size, tuple(marks[at] for marks in self.labels)), []).append(at)
        ordered = sorted(grouped.items(), key=lambda item: (-item[0][0], item[1]))
        return [(size, marks, tuple(layers)) for (size, marks), layers in ordered]

    @cached_property
    def _binomials(self) -> list[list[int]]:
        """C(n, k), zero for k > n."""
        most = max(len(layers) for _, _, layers in self.cells)
        return [pascal(n) + [0] * (most - n) for n in range(most + 1)]

    @cached_property
    def vectors(self) -> list[list[Vector]]:
        """Each level's counts over cells whose total lies in its window and whose labels meet their quotas.

        Raises:
            InputError: as `Uncounted`, the search takes more than `STEP_LIMIT` steps.
        """
        return [list(self._vectors(level)) for level in self.levels]

    def _vectors(self, level: Level) -> Iterator[Vector]:
        cells = self.cells
        rest = [0] * (len(cells) + 1)  # what the cells from here on hold, in all and of each label
        after: list[Counter[tuple[int, object]]] = [Counter() for _ in range(len(cells) + 1)]
        for at in range(len(cells) - 1, -1, -1):
            size, marks, layers = cells[at]
            rest[at] = rest[at + 1] + size * len(layers)
            after[at] = after[at + 1] + Counter({mark: len(layers) for mark in enumerate(marks)})
        left = {(which, label): n for which, quota in enumerate(level.quotas) for label, n in quota}
        steps = 0
        counts = [0] * len(cells)

        def fill(at: int, total: int) -> Iterator[Vector]:
            nonlocal steps
            steps += 1
            if steps > STEP_LIMIT:
                raise self._uncounted(STEP_LIMIT)
            if at == len(cells):
                yield tuple(counts)
                return
            size, marks, layers = cells[at]
            least = max(0, -(-(level.low - total - rest[at + 1]) // size))
            most = min(len(layers), (level.high - total) // size)
            for mark in enumerate(marks):
                most = min(most, left.get(mark, 0))
                least = max(least, left.get(mark, 0) - after[at + 1][mark])
            for k in range(least, most + 1):
                counts[at] = k
                for mark in enumerate(marks):
                    left[mark] = left.get(mark, 0) - k
                yield from fill(at + 1, total + k * size)
                for mark in enumerate(marks):
                    left[mark] += k

        yield from fill(0, 0)

    def _uncounted(self, limit: int) -> Uncounted:
        return Uncounted(
            f"counting the nested families over {len(self.levels)} budgets of {len(self.names)} layers in "
            f"{len(self.cells)} classes needs more than {limit:,} steps: match fewer budgets, leave constraints "
            "out, or take a law that permutes the layers of a class, whose draws are nested by themselves"
        )

    def _ways(self, outer: Vector, inner: Vector) -> int:
        """∏ C(v_c, u_c): the sets with counts u inside a given set with counts v."""
        product, table = 1, self._binomials
        for v, u in zip(outer, inner, strict=True):
            product *= table[v][u]
            if not product:
                return 0
        return product

    def _check_pairs(self) -> None:
        found = self.vectors
        if sum(len(a) * len(b) for a, b in pairwise(found)) > PAIR_LIMIT:
            raise self._uncounted(PAIR_LIMIT)

    @cached_property
    def _inside(self) -> list[dict[Vector, int]]:
        """G_b(v) for each level: the families (S₁ … S_{b−1}) inside a given S_b with counts v; those above 0 only."""
        self._check_pairs()
        tables: list[dict[Vector, int]] = [dict.fromkeys(self.vectors[0], 1)]
        for vectors in self.vectors[1:]:
            before = list(tables[-1].items())
            table = {v: sum(self._ways(v, u) * weight for u, weight in before) for v in vectors}
            tables.append({v: weight for v, weight in table.items() if weight})
        return tables

    @cached_property
    def _around(self) -> list[dict[Vector, int]]:
        """For each level, the families (S_b … S_B) with counts(S_b) = v."""
        whole = tuple(len(layers) for _, _, layers in self.cells)
        tables = [{v: self._ways(whole, v) for v in self._inside[-1]}]
        for inside in reversed(self._inside[:-1]):
            after = list(tables[-1].items())
            tables.append({u: sum(self._ways(v, u) * weight for v, weight in after) for u in inside})
        return tables[::-1]

    @cached_property
    def _all(self) -> int:
        return sum(weight * self._inside[-1][v] for v, weight in self._around[-1].items())

    @cached_property
    def own(self) -> int | None:
        """The number of the matched family; None where it is not nested."""
        nested = all(set(a) <= set(b) for a, b in pairwise(self.matched))
        return self._rank(self.matched) if nested else None

    @property
    def count(self) -> int:
        """How many families the law draws from, exactly; the matched one is not among them."""
        return self._all - (self.own is not None)

    @cached_property
    def inclusion(self) -> list[list[float]]:
        """For each level, each layer's probability of being drawn: exact counts, rounded once to float64."""
        found = []
        for inside, around, matched in zip(self._inside, self._around, self.matched, strict=True):
            shares, own = [0.0] * len(self.names), set(matched) if self.own is not None else set()
            weights = [(v, weight * inside[v]) for v, weight in around.items()]
            for cell, (_, _, layers) in enumerate(self.cells):
                holding = sum(v[cell] * weight for v, weight in weights) // len(layers)  # exact: all layers alike
                for at in layers:
                    shares[at] = (holding - (at in own)) / self.count
            found.append(shares)
        return found

    @cached_property
    def single_total(self) -> bool:
        """Whether the matched family meets the law itself and at each budget all sets hold its total."""
        sizes = [size for size, _, _ in self.cells]
        return self.own is not None and all(
            sum(k * size for k, size in zip(v, sizes, strict=True)) == level.target
            for level, around in zip(self.levels, self._around, strict=True)
            for v, weight in around.items()
            if weight
        )

    @cached_property
    def _starts(self) -> dict[tuple[int, Vector | None], tuple[list[Vector], list[int]]]:
        return {}

    def _blocks(self, level: int, outer: Vector | None) -> tuple[list[Vector], list[int]]:
        """The counts at a level inside counts `outer` (None: inside all layers), and where their numbers start."""
        known = self._starts.get((level, outer))
        if known is None:
            whole = tuple(len(layers) for _, _, layers in self.cells)
            table = self._inside[level]
            weights = [self._ways(outer or whole, v) * weight for v, weight in table.items()]
            known = self._starts[level, outer] = list(table), [0, *accumulate(weights)]
        return known

    def unrank(self, index: int) -> list[tuple[int, ...]]:
        """Family number `index`, the matched one counted in: each level's layers, ascending."""
        sets: list[tuple[int, ...]] = []
        within, outer = [layers for _, _, layers in self.cells], None
        for level in range(len(self.levels) - 1, -1, -1):
            vectors, starts = self._blocks(level, outer)
            at = bisect_right(starts, index) - 1
            counts = vectors[at]
            which, index = divmod(index - starts[at], self._inside[level][counts])
            chosen = []
            for layers, k in zip(within, counts, strict=True):
                which, place = divmod(which, pascal(len(layers))[k])
                chosen.append(tuple(layers[i] for i in unrank_combination(len(layers), k, place)))
            within, outer = chosen, counts
            sets.append(tuple(sorted(i for layers in chosen for i in layers)))
        return sets[::-1]

    def _rank(self, sets: Sequence[Sequence[int]]) -> int:
        """The number of a nested family: the inverse of `unrank`."""
        number, within, outer = 0, [layers for _, _, layers in self.cells], None
        for level in range(len(self.levels) - 1, -1, -1):
            members = set(sets[level])
            chosen = [tuple(i for i in layers if i in members) for layers in within]
            counts = tuple(map(len, chosen))
            vectors, starts = self._blocks(level, outer)
            which, scale = 0, 1
            for layers, kept in zip(within, chosen, strict=True):
                places = [i for i, layer in enumerate(layers) if layer in members]
                which += scale * rank_combination(len(layers), places)
                scale *= pascal(len(layers))[len(kept)]
            number += starts[vectors.index(counts)] + which * self._inside[level][counts]
            within, outer = chosen, counts
        return number

    def pick(self, number: int) -> tuple[Pick, ...]:
        """The family of that number, 0 … count − 1: one pick a selection, in the order in which they were given."""
        if self.own is not None and number >= self.own:
            number += 1
        picks: list[Pick | None] = [None] * len(self.levels)
        for level, chosen in enumerate(self.unrank(number)):
            layers, target = [self.names[at] for at in chosen], self.levels[level].target
            counts = self.match == "layers"
            picks[self.order[level]] = Pick(
                layers,
                mismatch=None if counts else (sum(self.sizes[at] for at in chosen) - target) / target,
                feasible_subsets=self.count,
                inclusion=self.inclusion[level],
                single_total=None if counts else self.single_total,
            )
        return tuple(pick for pick in picks if pick is not None)

    def draws(self, rng: Random, count: int) -> list[tuple[Pick, ...]]:
        """`count` distinct families, uniformly without replacement; all of them, shuffled, where fewer exist."""
        return [self.pick(number) for number in distinct(rng, self.count, count)]


def families(
    profile: Profile,
    likes: Sequence[Selection],
    *,
    within: Decimal,
    match: Quantity = "parameters",
    quantizer: str = "nf4",
    thirds: bool = False,
    roles: bool = False,
) -> Families:
    """The law of nested families that are matched to several selections, counted.

    Args:
        profile: the layers.
        likes: the matched selections, in any order; two may hold the same total.
        within: w, a fraction of each one's total.
        match, quantizer: what is matched; see `quantities`.
        thirds, roles: the constraints, met at each budget.

    Raises:
        InputError: no other family exists; as `Uncounted`, the limit of the work is passed, or the number is too
            long to be written.
    """
    sizes = quantities(profile, match, quantizer)
    members = []
    for like in likes:
        chosen = frozenset(like.layers)
        members.append(tuple(at for at, name in enumerate(profile.names) if name in chosen))
    totals = [sum(sizes[at] for at in member) for member in members]
    order = sorted(range(len(likes)), key=lambda i: (totals[i], len(members[i]), i))
    labels = tuple(labelings(profile, thirds=thirds, roles=roles).values())
    levels = []
    for i in order:
        quotas = tuple(tuple(Counter(marks[at] for at in members[i]).items()) for marks in labels)
        levels.append(Level(totals[i], *window(totals[i], within), quotas))
    found = _families(
        tuple(profile.names), match, sizes, labels, tuple(levels), tuple(order), tuple(members[i] for i in order)
    )
    if found.count < 1:
        names = ", ".join(like.selector for like in likes)
        held = [name for name, asked in (("roles", roles), ("thirds", thirds)) if asked]
        relax = f", or leave out {' or '.join(held)}" if held else ""
        raise InputError(
            f"no other nested family holds {match.replace('-', ' ')} within {within} of {names} "
            f"({', '.join(f'{total:,}' for total in totals)}): widen the tolerance{relax}"
        )
    if found.count >= 10**DIGITS_LIMIT:
        raise Uncounted(
            f"more than 10^{DIGITS_LIMIT} nested families exist: their number is too long to be written in a file; "
            "match smaller selections, or add roles or thirds"
        )
    return found


@lru_cache(maxsize=2)
def _families(
    names: tuple[str, ...],
    match: Quantity,
    sizes: tuple[int, ...],
    labels: tuple[tuple[object, ...], ...],
    levels: tuple[Level, ...],
    order: tuple[int, ...],
    matched: tuple[tuple[int, ...], ...],
) -> Families:
    return Families(names, match, sizes, labels, levels, order, matched)
