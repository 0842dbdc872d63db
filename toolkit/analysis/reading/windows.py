"""Per-window outcomes of a run, from the rows file beside its report; read only by statistics that need them.

Every window of a text scores `Text.window` − 1 tokens, and windows come in the text's order. Which of them fit
the reference selections and which score them, `toolkit.records.study.split` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from toolkit.analysis.reading.report_file import Run
from toolkit.errors import InputError
from toolkit.records import rows
from toolkit.records.report import Rows, Text

AGREES = 1e-9
"""Difference of a loss and the sum of its windows, nats a token, that another order of summing may make."""


def by_window(run: Run) -> dict[str, list[float]]:
    """Text → summed negative log-likelihood of each window (nats), of a run of one selection.

    Raises:
        InputError: the run has no rows file, or the file is missing, is not the one that the report tells of, or
            is damaged.
    """
    return rows.by_window(*_beside(run))


def draws_by_window(run: Run) -> dict[str, np.ndarray]:
    """Text → summed negative log-likelihoods (nats), float64 (draws × windows), of a run of many draws.

    Row i is draw i; of a sweep, that is the profile's layer i.

    Raises:
        InputError: as `by_window`; or the rows hold another number of draws than the report.
    """
    found = rows.draws_by_window(*_beside(run))
    for text, values in found.items():
        if run.draws is not None and len(values) != len(run.draws):
            raise InputError(
                f"the rows of {run.path} hold {len(values)} draws of text {text!r}, and the report {len(run.draws)}"
            )
    return {text: np.array(values, dtype=np.float64) for text, values in found.items()}


def expect_losses(run: Run, texts: Mapping[str, Text]) -> None:
    """Refuse a run whose report states other losses than its rows add up to: Σ nll/Σ tokens, to within 1e-9.

    Raises:
        InputError: as `by_window`; or the first loss that is another, by its text and draw.
    """
    found = draws_by_window(run) if run.draws is not None else by_window(run)
    for text, sums in found.items():
        if text not in texts:
            continue
        tokens = texts[text].windows * (texts[text].window - 1)
        rows = np.atleast_1d(np.asarray(sums, dtype=np.float64).sum(axis=-1)) / tokens
        stated = np.atleast_1d(run.draws.outcomes[text]["loss"] if run.draws is not None else run.scores[text].loss)
        off = np.flatnonzero(~np.isclose(stated, rows, rtol=AGREES, atol=AGREES))
        if len(off):
            draw = f"draw {off[0]}, " if run.draws is not None else ""
            raise InputError(
                f"{run.path}: {draw}text {text!r}: the loss is {stated[off[0]]:.9g}, and {run.rows and run.rows.file} "
                f"beside it adds up to {rows[off[0]]:.9g}: the report or its rows were changed"
            )


def _beside(run: Run) -> tuple[Path, Rows, str]:
    if run.rows is None:
        raise InputError(f"{run.path} names no rows file: there are no per-window outcomes of this run")
    return run.path.parent / run.rows.file, run.rows, str(run.path)
