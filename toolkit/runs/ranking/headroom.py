"""The reference selections of a study: the best and the worst set at an arm's memory, as far as effects add up.

Gains are fitted on the first half of each text's windows (`toolkit.records.study.split`), from files in the
results folder alone, so that an interrupted study comes to the same selections. From the sweep, the gain of a
layer is

    g_ℓ = mean over texts of (loss of the base − loss of the base with ℓ in 16 bit),  nats a token;

from the draws of the declared control, it is the layer's coefficient in a ridge regression, per arm and budget
(`toolkit.selection.effects.ridge`). The set with the largest sum of gains at that memory, and the one with the
smallest, are then measured on all windows, and judged on those of the second half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from toolkit.errors import InputError
from toolkit.records import rows
from toolkit.records.profile import Profile
from toolkit.records.report import BASE, ORACLE, REPORT, RESTORE, Report, Text
from toolkit.records.selection import Selection
from toolkit.records.study import Study, slug, split
from toolkit.runs.ranking import design
from toolkit.selection import effects


def needs(study: Study, run: design.Run) -> list[str]:
    """The runs whose results a reference selection is fitted on, by name."""
    assert study.headroom is not None
    if study.headroom.fit == "sweep":
        return [f"reference--{BASE}", f"sweep--{RESTORE}"]
    return [f"{slug(str(run.budget))}--{run.arm}--{study.analysis.control}"]


class Fit:
    """Reference selections from the results in a folder; gains are fitted once for all runs that share them."""

    def __init__(self, study: Study, profile: Profile, folder: Path) -> None:
        self._study, self._profile, self._folder = study, profile, folder
        self._gains: dict[tuple[str, ...], list[float]] = {}

    def selection(self, run: design.Run) -> Selection:
        """The reference selection of a run, at the memory of its arm.

        Raises:
            InputError: no set lies within the tolerance of the arm's parameters, or a file it is fitted on is
                damaged.
        """
        assert run.like is not None and run.control is not None and self._study.headroom is not None
        sources = tuple(needs(self._study, run))
        if sources not in self._gains:
            fit = self._from_sweep if self._study.headroom.fit == "sweep" else self._from_draws
            self._gains[sources] = fit(*sources)
        gains = self._gains[sources]
        wanted = gains if run.control == ORACLE else [-gain for gain in gains]
        try:
            return effects.reference_selection(
                self._profile, wanted, run.like, self._study.headroom.within, run.control
            )
        except InputError as error:
            raise InputError(f"{run.name}: {error} (headroom.within)") from None

    def _from_sweep(self, base: str, restored: str) -> list[float]:
        report = self._report(base)
        before = fitting_losses({text: [sums] for text, sums in self._one(report, base).items()}, report.texts)
        after = fitting_losses(self._many(self._report(restored), restored), report.texts)
        return [float(gain) for gain in before - after]

    def _from_draws(self, control: str) -> list[float]:
        report = self._report(control)
        names = self._profile.names
        indicators = [[int(draw.mask, 16) >> at & 1 for at in range(len(names))] for draw in report.draws]
        losses = fitting_losses(self._many(report, control), report.texts)
        try:
            gains = effects.ridge(np.array(indicators, dtype=np.float64), losses)
        except InputError as error:
            raise InputError(f"{control}: {error} (headroom.fit: ridge)") from None
        return [float(gain) for gain in gains]

    def _report(self, run: str) -> Report:
        return Report.load(self._folder / run / REPORT)

    def _one(self, report: Report, run: str) -> dict[str, list[float]]:
        assert report.rows is not None
        return rows.by_window(self._folder / run / report.rows.file, report.rows, f"{run}/{REPORT}")

    def _many(self, report: Report, run: str) -> dict[str, list[list[float]]]:
        assert report.rows is not None
        return rows.draws_by_window(self._folder / run / report.rows.file, report.rows, f"{run}/{REPORT}")


def fitting_losses(sums: Mapping[str, Sequence[Sequence[float]]], texts: Mapping[str, Text]) -> np.ndarray:
    """Loss of each draw on the fitting windows, nats a token, the mean over texts; float64 (draws,).

    Args:
        sums: text → draw → summed negative log-likelihood of each window (nats).
        texts: text → how it was cut; a window scores all of its tokens but the first.
    """
    losses = []
    for name, text in texts.items():
        fitting = split(text.windows)
        values = np.array(sums[name], dtype=np.float64)[:, :fitting]
        losses.append(values.sum(axis=1) / (fitting * (text.window - 1)))
    return np.mean(losses, axis=0)
