"""Every subset of a list of sizes whose total lies in a window: counted, numbered, and sampled exactly.

This module knows sizes, labels and integers only; `matching` turns a profile into them. Nothing is
approximate: counts are Python integers of any length, and no draw is rejected.

Method. Items of one size (and one set of labels) form a cell; a subset is k of n items in each cell. Over the
cells runs a dynamic programme whose states are totals, in units of the sizes' gcd, weighted by C(n, k). It
grows from both ends of the list of cells and the two tables meet at the middle: for a state f of the front,
k items of the middle cell and a state b of the back, the subset is feasible when low ≤ f + k·size + b ≤ high.
Exact counts of labels ride in the same integer, above the total,

    key = total + BIG·(count₁ + count₂·(n₁ + 1) + count₃·(n₁ + 1)(n₂ + 1) + …),   BIG > the sum of all sizes,

so that a window over totals with every count fixed is again one window over integers. Numbers are given to
subsets by cumulative sums over the front states, the middle, the back states, and then within each cell in
the lexicographic order of its combinations.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from toolkit.selection.combinations import pascal, rank_combination, unrank_combination
from toolkit.selection.tables import Cell, Label, Side

TABLE_LIMIT = 4_000_000
"""The most steps that building and joining the tables may take: a step is one product of counts of subsets of up
to 512 items (longer ones count as several), about a microsecond. The tables then take at most about 600 MB."""


class TableTooLarge(Exception):
    """The tables would pass `TABLE_LIMIT`; `needed` says by how much at least."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"{needed:,} steps, and {TABLE_LIMIT:,} are allowed")
        self.needed = needed


@dataclass(frozen=True)
class _Join:
    """What the meeting of the two tables gives; front and back keys ascend."""

    front: list[int]
    back: list[int]
    upto: list[int]  # upto[j]: subsets of the first j back states
    starts: list[int]  # starts[a]: the number of the first subset of front state a
    middle_holding: int
    front_ways: list[int]
    back_ways: list[int]
    totals: tuple[int, int] | None  # lowest and highest reached key


class Subsets:
    """All subsets of items whose total lies in [low, high] and whose labels meet their quotas.

    Args:
        sizes: positive integers, one an item.
        low, high: the window, both ends in it.
        labels: one labelling a constraint: for each, one label an item.
        quotas: for each labelling, how many items of each label a subset has; labels left out: none.

    Raises:
        TableTooLarge: past `TABLE_LIMIT`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        low: int,
        high: int,
        labels: Sequence[Sequence[object]] = (),
        quotas: Sequence[Mapping[object, int]] = (),
    ) -> None:
        self.unit = math.gcd(*sizes) or 1
        units = [size // self.unit for size in sizes]
        self.high = min(high // self.unit, sum(units))
        self.low = max(0, -(-low // self.unit))
        self.big = sum(units) + 1
        self.labels, names = self._quotas(len(sizes), labels, quotas)
        code = sum(label.unit * label.quota for label in self.labels)
        self.code = code
        self.possible = self.low <= self.high and all(label.quota <= label.items for label in self.labels)
        self.spent = 0
        cells = self._cells(units, labels, names)
        self.front, self.back = (Side(self.labels, self.big, self.high) for _ in range(2))
        self.middle: Cell | None = None
        if self.possible:
            self._build(cells)

    def _quotas(
        self, items: int, labels: Sequence[Sequence[object]], quotas: Sequence[Mapping[object, int]]
    ) -> tuple[list[Label], list[dict[object, int]]]:
        unit, found, names = self.big, [], []
        for labelling, quota in zip(labels, quotas, strict=True):
            index: dict[object, int] = {}
            for name in [*labelling, *(n for n, count in quota.items() if count)]:
                if name not in index:
                    index[name] = len(found)
                    bearing = sum(1 for other in labelling if other == name)
                    found.append(Label(unit, bearing + 1, quota.get(name, 0), bearing))
                    unit *= bearing + 1
            names.append(index)
        return found, names

    def _cells(
        self, units: list[int], labels: Sequence[Sequence[object]], names: list[dict[object, int]]
    ) -> list[Cell]:
        grouped: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for item, size in enumerate(units):
            marks = tuple(index[labelling[item]] for labelling, index in zip(labels, names, strict=True))
            grouped.setdefault((marks, size), []).append(item)
        return [
            Cell(size, size + sum(self.labels[m].unit for m in marks), tuple(items), marks)
            for (marks, size), items in sorted(grouped.items())  # a label's cells stand together: it closes early
        ]

    def _build(self, cells: list[Cell]) -> None:
        """Grow the cheaper end until one cell is left, and take that one in where this is cheaper."""
        first, last = 0, len(cells)
        while last - first > 1:
            front, back = self.front.cost(cells[first]), self.back.cost(cells[last - 1])
            self._spend(min(front, back))
            if front <= back:
                self.front.take(cells[first])
                first += 1
            else:
                last -= 1
                self.back.take(cells[last])
        if first < last:
            cell = cells[first]
            states = len(self.front.last) + len(self.back.last)
            joining = (min(cell.count, self.high // cell.size) + 1) * states * self._words(cell)
            side = min(self.front, self.back, key=lambda s: s.cost(cell))
            taking = side.cost(cell)
            if 3 * taking < joining:
                self._spend(taking)
                side.take(cell)
            else:
                self._spend(joining)
                self.middle = cell
        self._spend((len(self.front.last) + len(self.back.last)) * self._words())

    def _words(self, cell: Cell | None = None) -> int:
        sides = sum(c.count for side in (self.front, self.back) for c in side.cells)
        return 1 + (sides + (cell.count if cell else 0)) // 512

    def _spend(self, steps: int) -> None:
        self.spent += steps
        if self.spent > TABLE_LIMIT:
            raise TableTooLarge(self.spent)

    def _middles(self) -> list[tuple[int, int, int]]:
        """(k, C(n, k), k·step) of the middle cell; one empty choice where there is none."""
        if self.middle is None:
            return [(0, 1, 0)]
        row = pascal(self.middle.count)
        most = min(self.middle.count, self.high // self.middle.size)
        return [(k, row[k], k * self.middle.step) for k in range(most + 1)]

    @cached_property
    def _join(self) -> _Join:
        if not self.possible:
            return _Join([], [], [0], [0], 0, [], [], None)
        front, back = sorted(self.front.last.items()), sorted(self.back.last.items())
        keys = [key for key, _ in back]
        upto = [0, *accumulate(weight for _, weight in back)]
        ways, change = [0] * len(front), [0] * (len(back) + 1)
        lowest = highest = None
        middle_holding = 0
        base = self.code
        for k, choices, shift in self._middles():
            held = 0
            bottom, top = base + self.low - shift, base + self.high - shift
            start = end = len(back)  # the window [start, end) moves down as the front key moves up
            for a, (key, weight) in enumerate(front):
                while end and keys[end - 1] + key > top:
                    end -= 1
                while start and keys[start - 1] + key >= bottom:
                    start -= 1
                if start < end:
                    inside = upto[end] - upto[start]
                    ways[a] += choices * inside
                    held += weight * inside
                    share = choices * weight
                    change[start] += share
                    change[end] -= share
                    if lowest is None or keys[start] + key + shift < lowest:
                        lowest = keys[start] + key + shift
                    if highest is None or keys[end - 1] + key + shift > highest:
                        highest = keys[end - 1] + key + shift
            if k:
                middle_holding += math.comb(self.middle.count - 1, k - 1) * held  # type: ignore[union-attr]
        starts = [0, *accumulate(w * way for (_, w), way in zip(front, ways, strict=True))]
        totals = None if lowest is None or highest is None else (lowest - base, highest - base)
        return _Join(
            [key for key, _ in front], keys, upto, starts, middle_holding, ways, list(accumulate(change))[:-1], totals
        )

    @property
    def count(self) -> int:
        """How many subsets there are, exactly."""
        return self._join.starts[-1]

    @property
    def totals(self) -> tuple[int, int] | None:
        """The lowest and the highest total that a subset reaches; None where there is no subset."""
        found = self._join.totals
        return None if found is None else (found[0] * self.unit, found[1] * self.unit)

    def unrank(self, index: int) -> tuple[int, ...]:
        """Subset number `index`, its items ascending: a bijection from 0 … count − 1.

        Raises:
            IndexError: no such number.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"subset {index} of {self.count}")
        join = self._join
        a = bisect_right(join.starts, index) - 1
        key = join.front[a]
        rest, prefix = divmod(index - join.starts[a], self.front.last[key])
        chosen = self.front.unrank(key, prefix)
        base = self.code
        for k, choices, shift in self._middles():
            start = bisect_left(join.back, base + self.low - shift - key)
            end = bisect_right(join.back, base + self.high - shift - key)
            inside = join.upto[end] - join.upto[start] if start < end else 0
            if rest < choices * inside:
                which, rest = divmod(rest, inside)
                if self.middle is not None:
                    chosen += (self.middle.items[i] for i in unrank_combination(self.middle.count, k, which))
                rest += join.upto[start]
                b = bisect_right(join.upto, rest) - 1
                chosen += self.back.unrank(join.back[b], rest - join.upto[b])
                break
            rest -= choices * inside
        return tuple(sorted(chosen))

    def rank(self, items: Sequence[int]) -> int | None:
        """The number of a subset; None where it is not feasible."""
        if not self.possible:
            return None
        chosen, join = frozenset(items), self._join
        front, back = self.front.rank(chosen), self.back.rank(chosen)
        if front is None or back is None:
            return None
        inside = [i for i, item in enumerate(self.middle.items) if item in chosen] if self.middle else []
        rest = 0
        for k, choices, shift in self._middles():
            start = bisect_left(join.back, self.code + self.low - shift - front[0])
            end = bisect_right(join.back, self.code + self.high - shift - front[0])
            ways = join.upto[end] - join.upto[start] if start < end else 0
            if k == len(inside):
                b = bisect_left(join.back, back[0])
                if not start <= b < end:
                    return None
                if self.middle:
                    rest += rank_combination(self.middle.count, inside) * ways
                rest += join.upto[b] - join.upto[start] + back[1]
                a = bisect_left(join.front, front[0])
                return join.starts[a] + rest * self.front.last[front[0]] + front[1]
            rest += choices * ways
        return None

    @cached_property
    def holding(self) -> dict[int, int]:
        """Item → how many of the subsets hold it, exactly (forward times backward counts)."""
        join = self._join
        found: dict[int, int] = {}
        for side, keys, ways in ((self.front, join.front, join.front_ways), (self.back, join.back, join.back_ways)):
            if side.cells:
                counts = side.holding(dict(zip(keys, ways, strict=True)))
                found |= {i: n for cell, n in zip(side.cells, counts, strict=True) for i in cell.items}
        if self.middle is not None:
            found |= dict.fromkeys(self.middle.items, join.middle_holding)
        return found

    def nearest(self, target: int) -> int | None:
        """The reachable total nearest to `target`, itself and 0 left out, at most `high`; the lower of a tie."""
        if not self.possible:
            return None
        join, found = self._join, []
        floor, ceiling = self.code + target // self.unit, self.code - (-target // self.unit)
        for _, _, shift in self._middles():
            for key in join.front:
                below = bisect_left(join.back, ceiling - shift - key) - 1
                above = bisect_right(join.back, floor - shift - key)
                for at in (below, above):
                    if 0 <= at < len(join.back):
                        total = join.back[at] + key + shift - self.code
                        if 0 < total <= self.high:  # else the labels miss their quotas, or the tables are cut
                            found.append(total * self.unit)
        return min(found, key=lambda total: (abs(total - target), total), default=None)
