"""Every subset that holds at least one of some items: a disjoint union over which of them is its first.

Let f₁ … f_m be those items. A subset that holds one of them has exactly one first, f_j: it holds f_j, none of
f₁ … f_{j−1}, and of the other items any whose total lies in the window less f_j's size. So the subsets are m
disjoint lists of `Subsets`, numbered one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from toolkit.selection.subsets import Subsets, TableTooLarge

UNION_LIMIT = 20_000_000
"""The most steps that the tables of all parts may take together; see `subsets.TABLE_LIMIT` for one."""


class Holding:
    """All subsets of items with a total in [low, high], labels that meet their quotas, and one of `first` at least.

    The attributes and methods are those of `Subsets`, whose arguments these are.

    Raises:
        TableTooLarge: past `TABLE_LIMIT` in one part, or past `UNION_LIMIT` in all.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        low: int,
        high: int,
        labels: Sequence[Sequence[object]],
        quotas: Sequence[Mapping[object, int]],
        first: Sequence[int],
    ) -> None:
        self.sizes = sizes
        self.parts: list[tuple[int, tuple[int, ...], Subsets]] = []  # (first item held, the others that may be, sets)
        spent = 0
        for at, item in enumerate(first):
            left_out = set(first[: at + 1])
            others = tuple(i for i in range(len(sizes)) if i not in left_out)
            rest = [Counter(quota) for quota in quotas]
            for labelling, quota in zip(labels, rest, strict=True):
                quota[labelling[item]] -= 1
            if high < sizes[item] or min((n for quota in rest for n in quota.values()), default=0) < 0:
                continue
            part = Subsets(
                [sizes[i] for i in others],
                low - sizes[item],
                high - sizes[item],
                [[labelling[i] for i in others] for labelling in labels],
                rest,
            )
            spent += part.spent
            if spent > UNION_LIMIT:
                raise TableTooLarge(spent)
            if part.possible and part.count:
                self.parts.append((item, others, part))

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(part.count for _, _, part in self.parts)]

    @property
    def count(self) -> int:
        """How many subsets there are, exactly."""
        return self._starts[-1]

    @property
    def totals(self) -> tuple[int, int] | None:
        """The lowest and the highest total that a subset reaches; None where there is no subset."""
        found = [self.sizes[item] + total for item, _, part in self.parts for total in part.totals or ()]
        return (min(found), max(found)) if found else None

    def unrank(self, index: int) -> tuple[int, ...]:
        """Subset number `index`, its items ascending: a bijection from 0 … count − 1.

        Raises:
            IndexError: no such number.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"subset {index} of {self.count}")
        at = bisect_right(self._starts, index) - 1
        item, others, part = self.parts[at]
        return tuple(sorted([item, *(others[i] for i in part.unrank(index - self._starts[at]))]))

    def rank(self, items: Sequence[int]) -> int | None:
        """The number of a subset; None where it is not feasible."""
        chosen = set(items)
        for start, (item, others, part) in zip(self._starts, self.parts, strict=False):
            place = {other: i for i, other in enumerate(others)}
            if item in chosen and all(i == item or i in place for i in chosen):
                number = part.rank([place[i] for i in sorted(chosen) if i != item])
                return None if number is None else start + number
        return None

    @cached_property
    def holding(self) -> dict[int, int]:
        """Item → how many of the subsets hold it, exactly."""
        found = dict.fromkeys(range(len(self.sizes)), 0)
        for item, others, part in self.parts:
            found[item] += part.count
            for i, count in part.holding.items():
                found[others[i]] += count
        return found

    def nearest(self, target: int) -> int | None:
        """The reachable total nearest to `target`, 0 and itself left out, at most `high`; the lower of a tie."""
        found = set()
        for item, _, part in self.parts:
            size = self.sizes[item]
            if part.rank([]) is not None and size != target:
                found.add(size)
            near = part.nearest(target - size)
            if near is not None:
                found.add(near + size)
        return min(found, key=lambda total: (abs(total - target), total), default=None)
