"""The rows file beside a report: what each draw scored, window by window.

A line is a JSON array in the order of the report's `rows.columns`, one a draw and text: the draw's number, the
text's name, then one list a measured sum, with one number a window. All windows of a text score
`Text.window` − 1 tokens. A run of one selection holds nll, kl and top; one of many draws holds nll alone, and
its report their totals.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pydantic_core

from toolkit.errors import InputError, closest
from toolkit.records.io import atomic, read_bytes
from toolkit.records.report import ROWS, Rows

ONE = ["draw", "text", "nll", "kl", "top"]
"""Columns of a run of one selection."""
MANY = ["draw", "text", "nll"]
"""Columns of a run of many draws."""


def write(folder: Path, columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> Rows:
    """Write a rows file atomically, the same bytes each time, and describe it for its report.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    text = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as packed:
        packed.write("".join(text).encode())
    content = buffer.getvalue()
    with atomic(folder / ROWS) as temporary:
        temporary.write_bytes(content)
    return Rows(file=ROWS, sha256=hashlib.sha256(content).hexdigest(), count=len(text), columns=list(columns))


def read(path: Path, rows: Rows, report: str) -> dict[str, list[Any]]:
    """The rows, column by column: one value a draw and text.

    Args:
        path: of the file.
        rows: what the report says of it.
        report: the report's name, for errors.

    Raises:
        InputError: the file is missing, its hash is not the report's, or a line does not have the stated columns.
    """
    content = read_bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if found != rows.sha256:
        raise InputError(
            f"{path} is not the file that {report} tells of: SHA-256 {found[:12]}, and {rows.sha256[:12]} is stated"
        )
    try:
        lines = gzip.decompress(content).splitlines()
    except (OSError, EOFError, zlib.error) as error:  # no gzip, cut short
        raise InputError(f"{path}: {error}") from None
    if len(lines) != rows.count:
        raise InputError(f"{path} has {len(lines)} rows, and {report} states {rows.count}")
    width = len(rows.columns)
    try:  # all lines as one array, which is parsed at once
        values = pydantic_core.from_json(b"[" + b",".join(lines) + b"]", cache_strings="all")
        if len(values) != len(lines) or any(type(row) is not list or len(row) != width for row in values):
            raise ValueError
    except ValueError:
        raise InputError(_reason(lines, width, str(path))) from None
    columns = zip(*values, strict=True) if values else ((),) * width
    return dict(zip(rows.columns, map(list, columns), strict=True))


def _reason(lines: list[bytes], width: int, path: str) -> str:
    """Which line is not a list of so many values."""
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            return f"{path}:{number}: {error}"
        if not isinstance(values, list) or len(values) != width:
            return f"{path}:{number}: a list of {width} values is asked for; found {line.decode(errors='replace'):.80}"
    return f"{path} holds no JSON arrays of {width} values"


def by_window(path: Path, rows: Rows, report: str) -> dict[str, list[float]]:
    """Text → summed negative log-likelihood of each window (nats), of a run of one selection.

    Raises:
        InputError: as `read`; a column is missing, a text stands twice, or a value is no finite number.
    """
    found: dict[str, list[float]] = {}
    for draw, text, nll in _sums(path, rows, report):
        if draw != 0 or text in found:
            raise InputError(f"{path} holds text {text!r} more than once, and {report} tells of one selection")
        found[text] = nll
    return found


def draws_by_window(path: Path, rows: Rows, report: str) -> dict[str, list[list[float]]]:
    """Text → draw → summed negative log-likelihood of each window (nats), of a run of many draws.

    Raises:
        InputError: as `read`; a column is missing, a draw is missing or stands elsewhere, draws have different
            numbers of windows, or a value is no finite number.
    """
    found: dict[str, list[list[float]]] = {}
    for draw, text, nll in _sums(path, rows, report):
        of_text = found.setdefault(text, [])
        if draw != len(of_text):
            raise InputError(f"{path}: draw {draw} of text {text!r} stands where draw {len(of_text)} is asked for")
        if of_text and len(nll) != len(of_text[0]):
            raise InputError(
                f"{path}: draw {draw} of text {text!r} has {len(nll)} windows, and the draws before it "
                f"{len(of_text[0])}"
            )
        of_text.append(nll)
    return found


def _sums(path: Path, rows: Rows, report: str) -> Iterable[tuple[int, str, list[float]]]:
    """(draw, text, summed nll a window) of each row, checked."""
    columns = read(path, rows, report)
    for name in MANY:
        if name not in columns:
            raise InputError(f"{path} has no column {name!r}; {closest(name, columns)}")
    found = zip(columns["draw"], columns["text"], columns["nll"], strict=True)
    for number, (draw, text, nll) in enumerate(found, 1):
        try:
            sound = isinstance(text, str) and bool(nll) and math.isfinite(sum(nll))
        except (TypeError, OverflowError):
            sound = False
        if not sound:
            raise InputError(f"{path}:{number}: nll is {nll!s:.80}, and a list of finite numbers is asked for")
        yield draw, text, nll
