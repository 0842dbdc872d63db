"""The tables of the dynamic programme over cells, grown from one end; `subsets` joins two of them.

A state's key is its total in units, plus the counts of labels in digits above it (see `subsets`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.selection.combinations import pascal, rank_combination, unrank_combination


@dataclass(frozen=True)
class Cell:
    """Items that no constraint tells apart: one size, one label of each labelling.

    `step` is what one item adds to a key; `labels` are indexes into the labels that carry a quota.
    """

    size: int
    step: int
    items: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many items it has."""
        return len(self.items)


@dataclass(frozen=True)
class Label:
    """One label: the value of its digit in a key, the digit's radix, its quota, and how many items bear it."""

    unit: int
    radix: int
    quota: int
    items: int


class Side:
    """One end's tables: `tables[j]` maps the key after j cells to its number of subsets.

    Args:
        labels: the labels with a quota.
        big: the value of the first label's digit; what lies below it in a key is the total.
        high: the largest total that is kept, in units.
    """

    def __init__(self, labels: Sequence[Label], big: int, high: int) -> None:
        self.labels, self.big, self.high = labels, big, high
        self.cells: list[Cell] = []
        self.tables: list[dict[int, int]] = [{0: 1}]
        self.passed = [0] * len(labels)  # items of each label in this side's cells

    @property
    def last(self) -> dict[int, int]:
        """The newest table."""
        return self.tables[-1]

    def cost(self, cell: Cell) -> int:
        """Steps of taking in one more cell, by the cheaper of the two ways."""
        return min(self._step_cost(cell), self._series_cost())

    def _words(self, extra: int = 0) -> int:
        return 1 + (extra + sum(c.count for c in self.cells)) // 512

    def _step_cost(self, cell: Cell) -> int:
        if cell.count == 1 and not cell.labels:
            return len(self.last) * self._words(1)
        return len(self.last) * (min(cell.count, self.high // cell.size) + 2) * self._words(cell.count)

    def _series_cost(self) -> int:
        return (self.high + 1) * (len(self.cells) + 1) * self._words() if not self.labels else 1 << 62

    def take(self, cell: Cell) -> None:
        """Add a cell and its table."""
        quicker = self._series_cost() < self._step_cost(cell)
        for label in cell.labels:
            self.passed[label] += cell.count
        self.cells.append(cell)
        self.tables.append(series(self.cells, self.high) if quicker else self._multiplied(cell))

    def _multiplied(self, cell: Cell) -> dict[int, int]:
        """The last table times (1 + x^step)^n, without states that pass the window or miss a quota."""
        big, high, row, step = self.big, self.high, pascal(cell.count), cell.step
        limits = []
        for at in cell.labels:
            label = self.labels[at]
            limits.append((label.unit, label.radix, label.quota, label.items - self.passed[at]))
        if not limits and cell.count == 1:  # the common case of many different sizes
            table = dict(self.last)
            get = table.get
            for key, weight in self.last.items():
                state = key + step
                if state <= high:
                    table[state] = get(state, 0) + weight
            return table
        table = {}
        get = table.get
        for key, weight in self.last.items():
            most = min(cell.count, (high - key % big) // cell.size)
            least = 0
            for unit, radix, quota, after in limits:
                left = quota - key // unit % radix
                most = min(most, left)
                least = max(least, left - after)
            state = key + least * step
            for k in range(least, most + 1):
                table[state] = get(state, 0) + row[k] * weight
                state += step
        return table

    def unrank(self, key: int, index: int) -> list[int]:
        """Subset number `index` of those with this key."""
        chosen: list[int] = []
        for cell, table in zip(reversed(self.cells), reversed(self.tables[:-1]), strict=True):
            row, before = pascal(cell.count), key
            for k in range(cell.count + 1):
                weight = table.get(before)
                if weight is not None:
                    block = row[k] * weight
                    if index < block:
                        which, index = divmod(index, weight)
                        chosen += (cell.items[i] for i in unrank_combination(cell.count, k, which))
                        break
                    index -= block
                before -= cell.step
            key = before
        return chosen

    def rank(self, chosen: frozenset[int]) -> tuple[int, int] | None:
        """(key, index) of the items of this side's cells that are chosen; None where no table holds them."""
        key = index = 0
        for cell, table, following in zip(self.cells, self.tables, self.tables[1:], strict=False):
            inside = [i for i, item in enumerate(cell.items) if item in chosen]
            row, after = pascal(cell.count), key + len(inside) * cell.step
            if after not in following:
                return None
            index += rank_combination(cell.count, inside) * table[key]
            before = after
            for k in range(len(inside)):
                index += row[k] * table.get(before, 0)
                before -= cell.step
            key = after
        return key, index

    def holding(self, completions: Mapping[int, int]) -> list[int]:
        """For each cell, the number of feasible subsets that hold one given item of it.

        `completions` is the number of ways to complete each key of the last table.
        """
        return self._holding_by_steps(completions) if self.labels else self._holding_byseries(completions)

    def _holding_byseries(self, completions: Mapping[int, int]) -> list[int]:
        # Subsets with key t that hold the item: those with t − step that do not, H(t) = F(t − step) − H(t − step).
        last, keys, counts = self.last, sorted(self.last), []
        for cell in self.cells:
            step, held, total = cell.step, {}, 0
            for key in keys:
                below = key - step
                with_it = last.get(below, 0) - held.get(below, 0)
                if with_it:
                    held[key] = with_it
                    total += with_it * completions[key]
            counts.append(total)
        return counts

    def _holding_by_steps(self, completions: Mapping[int, int]) -> list[int]:
        counts = []
        for cell, table in zip(reversed(self.cells), reversed(self.tables[:-1]), strict=True):
            row, rest, step = pascal(cell.count), pascal(cell.count - 1), cell.step
            below, total = {}, 0
            for key, weight in table.items():
                ways = completions.get(key, 0)
                held, state = 0, key
                for k in range(1, cell.count + 1):
                    state += step
                    further = completions.get(state)
                    if further:
                        ways += row[k] * further
                        held += rest[k - 1] * further
                below[key] = ways
                total += weight * held
            counts.append(total)
            completions = below
        return counts[::-1]


def series(cells: list[Cell], high: int) -> dict[int, int]:
    """F = ∏(1 + x^s)^n up to x^high, from x·F′ = F·Σ n·s·x^s/(1 + x^s).

    G_s(t) = F(t − s) − G_s(t − s) are the subsets of total t that hold one given item of size s; every item
    counted with its size, t·F(t) = Σ n·s·G_s(t). One product a total and cell, whatever n is.
    """
    table = [1] + [0] * high
    held = [(cell.size, cell.count * cell.size, [0] * (high + 1)) for cell in cells]
    for total in range(1, high + 1):
        weighed = 0
        for size, factor, with_it in held:
            if size <= total:
                value = table[total - size] - with_it[total - size]
                if value:
                    with_it[total] = value
                    weighed += factor * value
        if weighed:
            table[total] = weighed // total
    return {total: weight for total, weight in enumerate(table) if weight}
