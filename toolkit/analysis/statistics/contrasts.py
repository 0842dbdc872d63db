"""Two arms compared over shared rows: every number that a table prints of them, in one call."""

from __future__ import annotations

from toolkit.analysis.statistics.runs import Contrast, Runs


def contrast(
    first: Runs,
    second: Runs,
    *,
    paired: bool = False,
    coverage: float = 0.95,
    margin: float | None = None,
    resamples: int = 2000,
    seed: int = 0,
    what: str = "the contrast",
) -> Contrast:
    """first − second over their shared rows."""
    raise NotImplementedError
