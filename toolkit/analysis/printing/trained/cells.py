"""Numbers of fine-tuning tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.analysis.printing.grid import NOTHING, probability

GIB = 2**30


def number(value: float | None, digits: int = 4) -> str:
    """So many decimals, a real minus; a dash where there is none."""
    if value is None:
        return NOTHING
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def signed(value: float | None, digits: int = 4) -> str:
    """With its sign."""
    if value is None:
        return NOTHING
    text = f"{value:+.{digits}f}"
    return number(0.0, digits) if float(text) == 0 else text.replace("-", "−")


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return NOTHING if value is None else number(100 * value, digits) + "%"


def faster(value: float | None) -> str:
    """A signed percentage of one decimal."""
    return NOTHING if value is None else signed(100 * value, 1) + "%"


def spread(found: dict[str, Any] | None, digits: int = 4) -> str:
    """mean ± sd over the runs; the mean alone for one run."""
    if found is None:
        return NOTHING
    return number(found["mean"], digits) + ("" if found["sd"] is None else f" ± {number(found['sd'], digits)}")


def interval(low: float | None, high: float | None, digits: int = 4) -> str:
    """low to high."""
    if low is None or high is None:
        return NOTHING
    return f"{signed(low, digits)} to {signed(high, digits)}"


def p(value: float | None) -> str:
    """A p-value, or a dash."""
    return NOTHING if value is None else probability(value)


def gib(size: float | None) -> str:
    """Bytes as GiB: two decimals, three below one tenth."""
    return NOTHING if size is None else f"{size / GIB:.{3 if size < GIB / 10 else 2}f}"


def span(values: Sequence[int]) -> str:
    """One number, or the smallest to the largest."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
