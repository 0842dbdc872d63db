"""A study's table in LaTeX: plain `tabular` environments that need no package."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.grid import Grid
from toolkit.analysis.printing.layout import caption, grids, sentences

SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\ensuremath{<}",
    ">": r"\ensuremath{>}",
    "|": r"\ensuremath{|}",
    "[": "{[}",  # a bracket after a row's end would be taken for an option
    "]": "{]}",
    "`": r"\textasciigrave{}",
    '"': r"\char34{}",
    "−": r"\ensuremath{-}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "±": r"\ensuremath{\pm}",
    "‖": r"\ensuremath{\Vert}",
    "×": r"\ensuremath{\times}",
    "≤": r"\ensuremath{\le}",
    "≥": r"\ensuremath{\ge}",
    "’": "'",
    "ρ": r"\ensuremath{\rho}",
    "§": r"\S{}",
    "…": r"\ldots{}",
}


def render(data: dict[str, Any]) -> str:
    """The caption as a quotation, then one `table` environment a grid, then what was found, as another quotation."""
    lines = ["\\begin{quote}\\small", *(escape(line) + r"\\" for line in caption(data)), "\\end{quote}"]
    for grid in grids(data):
        lines += ["", *_grid(grid)]
    if found := sentences(data):
        lines += ["", "\\begin{quote}\\small", *(escape(line) + r"\\" for line in found), "\\end{quote}"]
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return (
        "".join(SPECIAL.get(char, char) for char in " ".join(text.split())).replace("--", "-{}-").replace("--", "-{}-")
    )


def _grid(grid: Grid) -> list[str]:
    columns = "".join("r" if grid.numeric(at) else "l" for at in range(len(grid.heading)))
    body = []
    for at, row in enumerate(grid.rows):
        if at and at in grid.breaks:
            body.append(r"\hline")
        body.append(_row(row))
    return [
        r"\begin{table}",
        r"\scriptsize",
        rf"\caption{{{escape(grid.caption)}.}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\hline",
        _row(grid.heading),
        r"\hline",
        *body,
        r"\hline",
        r"\end{tabular}",
        r"\end{table}",
    ]


def _row(cells: list[str]) -> str:
    return " & ".join(escape(cell) for cell in cells) + r" \\"
