"""A study's table, from its report files alone: Markdown, JSON, CSV or LaTeX."""

from __future__ import annotations

import os

from toolkit.analysis.printing.formats import known, rendered
from toolkit.analysis.printing.starts import summary as started
from toolkit.analysis.printing.summary import summary
from toolkit.analysis.printing.trained import summary as trained
from toolkit.analysis.reading.kinds import SELECTIONS, TRAINED, kind_in
from toolkit.errors import InputError


def table(study: str | os.PathLike[str], format: str = "md", *, paired: bool = False) -> str:
    """The table of a study, as text without a last line break.

    It says first whether the results are confirmatory. For each text: the 16-bit and base runs; each arm with its
    loss, perplexity, KL(16-bit ‖ arm), agreement of the top token, share of the base-to-16-bit gap recovered, and
    what it protects; and each arm against its own draws under each law: gap to their median, how many are at least
    as good, p beside the smallest p, mismatch, feasible subsets. Then the declared claims, their verdicts under
    every law, headroom, what chance means under each law, the numerical floor, the replica of the paper's own
    tests, and everything that is claimed in sentences. Runs that are missing are named and the rest is printed.

    A fine-tuning study's table holds instead: each task's arms with loss, score, memory and health; averages with and
    without flagged sets; the declared contrasts with their interval, p, attainable p, detectable difference, seeds
    asked for and equivalence; flips; the A/A arm; the tuned lever, shared and own; and the timing sessions with their
    floors (`toolkit.analysis.printing.trained.summary`). That of a study of starts: each text's arms at each scaling
    with residual, loss and the difference to the baseline with its interval over windows; the declared pairs; residuals
    and output errors by role, and after each iteration (`toolkit.analysis.printing.starts.summary`).

    Args:
        study: a study's folder, its `study.yaml`, its results folder, or the `--out` folder of a run.
        format: `md`, `json` (plain data with a schema version), `csv` (full precision) or `latex`.
        paired: add each arm's paired difference to the references with its standard error over windows, read
            from the rows files. Only for a study of selections.

    Raises:
        InputError: an unknown format, or `paired` for a study of another kind, which declares how it is paired; and as
            `toolkit.analysis.reading.reports.read`, `toolkit.analysis.printing.trained.summary.summary` and
            `toolkit.analysis.printing.starts.summary.summary`.
    """
    known(format)
    kind = kind_in(study)
    if kind == TRAINED:
        if paired:
            raise InputError(
                "a fine-tuning study declares in `analysis.paired` whether runs are paired by seed; --paired is for a "
                "study of selections"
            )
        return rendered(trained.summary(study), format)
    if kind != SELECTIONS:
        if paired:
            raise InputError("a study of starts is always paired by window; --paired is for a study of selections")
        return rendered(started.summary(study), format)
    return rendered(summary(study, paired=paired), format)
