"""Per-window outcomes: the rows file beside a report, read only by statistics that need it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from dataclasses import dataclass
from typing import Any

from toolkit.analysis.report_file import Run
from toolkit.errors import InputError, closest
from toolkit.records.io import read_bytes


def rows(run: Run) -> dict[str, list[Any]]:
    """The per-window outcomes of a run, column by column, from the rows file beside its report.

    Each line of the file is a JSON array in the order of `rows.columns`.

    Raises:
        InputError: the run has no rows file, the file is missing, its hash is not the report's, or a line does
            not have the stated columns.
    """
    if run.rows is None:
        raise InputError(f"{run.path} names no rows file: there are no per-window outcomes of this run")
    path = run.path.parent / run.rows.file
    content = read_bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if found != run.rows.sha256:
        raise InputError(
            f"{path} is not the file that {run.path} tells of: SHA-256 {found[:12]}, and {run.rows.sha256[:12]} is "
            "stated"
        )
    columns: dict[str, list[Any]] = {name: [] for name in run.rows.columns}
    count = 0
    try:
        with gzip.open(io.BytesIO(content), "rt", encoding="utf-8") as lines:
            for count, line in enumerate(lines, 1):
                values = json.loads(line)
                if not isinstance(values, list) or len(values) != len(columns):
                    raise InputError(f"{path}:{count}: a list of {len(columns)} values is asked for; found {line:.80}")
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    except (OSError, EOFError, ValueError) as error:  # no gzip, cut short, no JSON
        raise InputError(f"{path}:{count}: {error}") from None
    if count != run.rows.count:
        raise InputError(f"{path} has {count} rows, and {run.path} states {run.rows.count}")
    return columns


@dataclass(frozen=True)
class Windows:
    """One text's windows of one run: their numbers, scored tokens, and summed negative log-likelihood (nats)."""

    windows: list[int]
    tokens: list[int]
    nll: list[float]


def by_window(run: Run) -> dict[str, Windows]:
    """Text → its windows, from the rows of a reference or arm (columns `text`, `window`, `tokens`, `nll`)."""
    columns = rows(run)
    for name in ("text", "window", "tokens", "nll"):
        if name not in columns:
            raise InputError(f"the rows of {run.path} have no column {name!r}; {closest(name, columns)}")
    found: dict[str, Windows] = {}
    for text, window, tokens, nll in zip(
        columns["text"], columns["window"], columns["tokens"], columns["nll"], strict=True
    ):
        entry = found.setdefault(text, Windows([], [], []))
        entry.windows.append(window)
        entry.tokens.append(tokens)
        entry.nll.append(nll)
    return found
