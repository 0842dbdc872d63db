"""A printed table as text cells, and numbers as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from toolkit.analysis.statistics import sentences

NOTHING = "–"


@dataclass(frozen=True)
class Grid:
    """One printed table: a caption, a heading, rows of text cells, and the rows before which a line is drawn."""

    caption: str
    heading: list[str]
    rows: list[list[str]]
    breaks: list[int] = field(default_factory=list)

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers, which are set to the right."""
        return all(not row[column] or row[column][0] in "0123456789+−<–" for row in self.rows)


def signed(value: float) -> str:
    """Four decimals with a sign; a real minus."""
    text = f"{value:+.4f}"
    return ("0.0000" if float(text) == 0 else text).replace("-", "−")


def probability(p: float) -> str:
    """Three decimals, or `<0.001`."""
    return f"{p:.3f}" if p >= 0.0005 else "<0.001"


def percent(fraction: float) -> str:
    """A signed percentage: three decimals below 1%, one above."""
    value = 100 * fraction
    text = f"{value:+.3f}" if abs(value) < 1 else f"{value:+.1f}"
    return ("0" if float(text) == 0 else text).replace("-", "−") + "%"


def share(fraction: float | None) -> str:
    """A percentage without decimals."""
    return NOTHING if fraction is None else sentences.percent(fraction)


def count(number: int | None) -> str:
    """An integer of any length: in full below a million, else rounded to two digits and a power of ten."""
    if number is None:
        return NOTHING
    if number < 10**6:
        return f"{number:,}"
    return f"{Decimal(number):.1e}".replace("e+", "e")
