"""The figures of a fine-tuning study, by their names."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.analysis.printing import drawing
from toolkit.analysis.printing.trained.frontier_figure import frontier_figure
from toolkit.analysis.printing.trained.strips_figure import strips_figure
from toolkit.analysis.printing.trained.summary import summary
from toolkit.analysis.printing.trained.tuning_figure import tuning_figure
from toolkit.errors import InputError, closest

KINDS = {"strips": strips_figure, "frontier": frontier_figure, "tuning": tuning_figure}


def figure(study: str | os.PathLike[str], out: str | os.PathLike[str], *, kind: str = "strips") -> Path:
    """Draw a fine-tuning study: `strips`, `frontier` or `tuning`.

    Args:
        study: a study's folder, its `study.yaml`, its results folder, or the `--out` folder of a run.
        out: the picture to write; its ending tells the format, png, pdf or svg.

    Raises:
        InputError: another ending or kind; and as the figures and
            `toolkit.analysis.printing.trained.summary.summary`.
    """
    if kind not in KINDS:
        raise InputError(f"a fine-tuning study has no figure {kind!r}; {closest(kind, KINDS)}")
    drawing.kind_of(out)
    return KINDS[kind](summary(study), out)
