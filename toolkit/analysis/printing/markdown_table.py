"""A study's table in Markdown, columns padded so that it also reads well in a terminal."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.grid import Grid
from toolkit.analysis.printing.layout import caption, grids, sentences


def render(data: dict[str, Any]) -> str:
    """Caption lines, then one table after the other, then what was found in sentences."""
    parts = ["\n".join(f"- {escape(line)}" for line in caption(data))]
    for grid in grids(data):
        parts += [f"**{escape(grid.caption)}**", table(grid.heading, grid.rows)]
    if found := sentences(data):
        parts += ["**In sentences**", "\n".join(f"- {escape(line)}" for line in found)]
    return "\n\n".join(parts)


def escape(text: str) -> str:
    """Text that Markdown shows as it is: a bar ends no cell, and stars, brackets and quotes mark nothing."""
    text = " ".join(text.split())
    for mark in "\\`*_|<>[]":
        text = text.replace(mark, "\\" + mark)
    return text


def table(heading: list[str], rows: list[list[str]]) -> str:
    """One table; columns of numbers are set to the right."""
    grid = Grid("", heading, rows)
    lines = [[escape(cell) for cell in row] for row in [heading, *rows]]
    widths = [max(3, *(len(line[at]) for line in lines)) for at in range(len(heading))]
    right = [grid.numeric(at) for at in range(len(heading))]

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - 1) + ":" if r else ":" + "-" * (w - 1) for w, r in zip(widths, right, strict=True)]
    return "\n".join([line(lines[0]), f"| {' | '.join(rule)} |", *(line(cells) for cells in lines[1:])])
