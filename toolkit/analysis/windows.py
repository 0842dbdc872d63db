"""Per-window outcomes of a run, from the rows file beside its report; read only by statistics that need them.

Every window of a text scores `Text.window` − 1 tokens, and windows come in the text's order. Which of them fit
the reference selections and which score them, `toolkit.records.study.split` says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from toolkit.analysis.report_file import Run
from toolkit.errors import InputError
from toolkit.records import rows
from toolkit.records.report import Rows


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


def _beside(run: Run) -> tuple[Path, Rows, str]:
    if run.rows is None:
        raise InputError(f"{run.path} names no rows file: there are no per-window outcomes of this run")
    return run.path.parent / run.rows.file, run.rows, str(run.path)
