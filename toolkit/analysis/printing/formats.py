"""The formats of a table: Markdown, JSON, CSV and LaTeX, from its plain data."""

from __future__ import annotations

import json
from typing import Any

from toolkit.analysis.printing import csv_table, latex_table, markdown_table
from toolkit.errors import InputError, closest

FORMATS = {
    "md": markdown_table.render,
    "json": lambda data: json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False),
    "csv": csv_table.render,
    "latex": latex_table.render,
}


def rendered(data: dict[str, Any], format: str) -> str:
    """A table's plain data in one of the formats.

    Raises:
        InputError: an unknown format.
    """
    known(format)
    return FORMATS[format](data)


def known(format: str) -> None:
    """Refuse a format that does not exist."""
    if format not in FORMATS:
        raise InputError(f"no table format is called {format!r}; {closest(format, FORMATS)}")
