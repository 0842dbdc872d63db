"""What every figure shares: palette, markers, captions, and pictures written the same each time."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError, closest
from toolkit.records.io import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart by colour-blind readers; each thing also has a marker of its own."""
MARKERS = ("^", "v", "D", "s", "o", "P", "X")
DRAW, FAINT, INK = "#5F5F5F", "#A3A3A3", "#222222"
LINE = 0.165
"""Inches: height of a line of the caption."""


def kind_of(out: str | os.PathLike[str]) -> str:
    """The picture's format, by the ending of its name.

    Raises:
        InputError: another ending than png, pdf or svg.
    """
    kind = Path(out).suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise InputError(f"a figure is written as png, pdf or svg; found {Path(out).name!r}; {closest(kind, FORMATS)}")
    return kind


def empty(width: float, height: float) -> Figure:
    """A white picture of so many inches, which knows no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(picture)
    return picture


def wrapped(sentences: list[str], width: float) -> list[str]:
    """A caption's lines in a picture so many inches wide."""
    return [line for text in sentences for line in textwrap.wrap(text, int(width * 16.5))]


def write_caption(picture: Figure, lines: list[str]) -> None:
    """The caption's lines, the last one at the bottom."""
    width, height = picture.get_size_inches()
    for at, line in enumerate(lines):
        place = (0.1 + LINE * (len(lines) - 1 - at)) / height
        picture.text(0.12 / width, place, line, fontsize=7.5, color=INK)


def save(picture: Figure, out: str | os.PathLike[str]) -> Path:
    """Write a picture atomically, without the time at which it was made."""
    out, kind = Path(out), kind_of(out)
    metadata = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
    with atomic(out) as temporary:
        picture.savefig(temporary, format=kind, dpi=160, metadata=metadata)
    return out
