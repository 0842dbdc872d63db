"""Combinations k of n, numbered in lexicographic order by integers of any length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=256)
def pascal(n: int) -> list[int]:
    """C(n, 0) … C(n, n)."""
    row = [1]
    for k in range(n):
        row.append(row[-1] * (n - k) // (k + 1))
    return row


def unrank_combination(n: int, k: int, index: int) -> list[int]:
    """Combination number `index` of C(n, k), ascending positions, lexicographic order."""
    chosen: list[int] = []
    if not k:
        return chosen
    ways = pascal(n)[k] * k // n  # combinations that hold the first of the n positions left
    position, left = 0, n
    while True:
        left -= 1
        if index < ways:
            chosen.append(position)
            k -= 1
            if not k:
                return chosen
            ways = ways * k // left
        else:
            index -= ways
            ways = ways * (left - k + 1) // left if left else 0
        position += 1


def rank_combination(n: int, chosen: Sequence[int]) -> int:
    """The number of a combination, the inverse of `unrank_combination`."""
    index, k = 0, len(chosen)
    if not k:
        return index
    wanted, left = iter(chosen), n
    ways, following = pascal(n)[k] * k // n, next(wanted)
    for position in range(n):
        left -= 1
        if position == following:
            k -= 1
            if not k:
                break
            ways, following = ways * k // left, next(wanted)
        else:
            index += ways
            ways = ways * (left - k + 1) // left if left else 0
    return index
