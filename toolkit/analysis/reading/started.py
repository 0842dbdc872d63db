"""Reading a study of starts: every report checked, alone and against the others; results are never mixed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from toolkit.analysis.reading.kinds import places
from toolkit.analysis.reading.reports import Mark, locate, same
from toolkit.errors import InputError, closest
from toolkit.records import rows as rows_file
from toolkit.records.initialization import CALIBRATION, Initialization
from toolkit.records.report import REPORT, SIXTEEN_BIT
from toolkit.records.started import COLUMNS, Started
from toolkit.records.study import STUDY_COPY

AGREES = 1e-9
"""Difference of a loss and the sum of its windows, nats a token, that another order of summing may make."""

Windows = dict[tuple[str, str], dict[str, np.ndarray]]
"""(Rounding of inputs, text) → `nll` and `kl`, summed over each window, nats, float64 (windows,)."""


@dataclass(frozen=True)
class StartedResults:
    """All reports of one study of starts that belong together, and the study that declared them.

    Attributes:
        sixteen: the 16-bit model's report; None where it is missing.
        runs: (arm, scaling) → report; scaling None: the report stands for every scaling.
        windows: run → its windows.
        missing: declared runs that left no report, in words.
        marks: one a report.
    """

    folder: Path
    study: Initialization
    sixteen: Started | None
    runs: dict[tuple[str, float | None], Started]
    windows: dict[str, Windows]
    missing: tuple[str, ...]
    marks: tuple[Mark, ...]

    def of(self, arm: str, scaling: float) -> Started | None:
        """The report that tells of an arm at a scaling."""
        return self.runs.get((arm, None)) or self.runs.get((arm, scaling))

    @property
    def any(self) -> Started:
        """One of the reports, for what all of them share."""
        return self.sixteen or next(iter(self.runs.values()))

    @property
    def hashes(self) -> dict[str, str]:
        """Text → SHA-256, that which is calibrated on included."""
        found = {name: text.sha256 for name, text in self.any.texts.items()}
        return found | ({} if self.any.calibration is None else {CALIBRATION: self.any.calibration.sha256})


def declared(folder: Path, given: str | os.PathLike[str]) -> Initialization:
    """The study behind a results folder: the copy kept beside the runs, else its `study.yaml` in the full form.

    Raises:
        InputError: there is neither, so that arms, scalings and analysis are not known.
    """
    copy = folder / STUDY_COPY
    if copy.is_file():
        return Initialization.load(copy)
    for file in [*places(given), *places(folder)]:
        if file.is_file() and file.suffix in (".yaml", ".yml"):
            return Initialization.read(file)
    raise InputError(
        f"{folder} holds reports, and neither {STUDY_COPY} nor a study.yaml stands beside them: the arms, the scalings "
        "and the analysis are declared there"
    )


def read(study: str | os.PathLike[str]) -> StartedResults:
    """Every report of a study of starts.

    Args:
        study: a study's folder, its `study.yaml`, its results folder, or the `--out` folder of a run.

    Raises:
        InputError: a report or its rows are damaged or foreign, hold a number that is not finite, do not agree with
            each other, or differ from the other reports in study, form, weights or settings; or two reports tell of
            the same run.
    """
    folder = locate(study)
    asked = declared(folder, study)
    paths = sorted(folder.glob(f"*/{REPORT}"))
    found = [Started.load(path) for path in paths]
    same(paths, [report.study for report in found], "study", str)
    same(paths, [report.form for report in found], "form", str)
    same(paths, [report.fingerprint for report in found], "weights fingerprint", lambda v: v[:12])
    same(paths, [report.settings for report in found], "settings", lambda v: v[:12])
    if (found[0].study, found[0].form) != (asked.name, asked.form):
        raise InputError(
            f"{folder} holds reports of study {found[0].study!r} ({found[0].form} form), and the study beside them is "
            f"{asked.name!r} ({asked.form} form)"
        )
    runs: dict[tuple[str, float | None], Started] = {}
    sixteen, windows, names = None, {}, [arm.name for arm in asked.arms]
    for path, report in zip(paths, found, strict=True):
        windows[report.run] = _windows(path, report)
        if report.role == "reference":
            sixteen = report
            continue
        if report.arm not in names:
            raise InputError(f"{path} tells of arm {report.arm!r}; {closest(report.arm, names)}")
        key = (report.arm, report.scaling)
        if key in runs:
            raise InputError(f"{path} and another report both tell of {report.arm} at s = {report.scaling}; keep one")
        runs[key] = report
    lost = [] if sixteen is not None else [f"the {SIXTEEN_BIT} model"]
    lost += [
        f"arm {arm} at s = {s:g}"
        for arm in names
        for s in asked.scalings
        if (arm, None) not in runs and (arm, s) not in runs
    ]
    marks = tuple(Mark(p, r.lock, r.provenance.started) for p, r in zip(paths, found, strict=True))
    return StartedResults(folder, asked, sixteen, runs, windows, tuple(lost), marks)


def _windows(path: Path, report: Started) -> Windows:
    """A report's rows, to which its scores are held."""
    if report.rows is None:
        raise InputError(f"{path} names no rows file: there are no outcomes of its windows")
    beside = path.parent / report.rows.file
    columns = rows_file.read(beside, report.rows, str(path))
    for name in COLUMNS:
        if name not in columns:
            raise InputError(f"{beside} has no column {name!r}; {closest(name, columns)}")
    found: Windows = {}
    for line, (key, text) in enumerate(zip(columns["activations"], columns["text"], strict=True)):
        values = {}
        for name in ("nll", "kl"):
            sums = columns[name][line]
            if not isinstance(sums, list) or not all(type(v) in (int, float) and math.isfinite(v) for v in sums):
                raise InputError(
                    f"{beside}:{line + 1}: {name} is {sums!s:.60}, and a list of finite numbers is asked for"
                )
            values[name] = np.array(sums, dtype=np.float64)
        found[key, text] = values
    stated = {(key, text): score for text, scores in report.scores.items() for key, score in scores.items()}
    if found.keys() != stated.keys():
        raise InputError(f"{path} has scores of {sorted(stated)}, and its rows are of {sorted(found)}")
    for (key, text), score in stated.items():
        if text not in report.texts or len(found[key, text]["nll"]) != report.texts[text].windows:
            raise InputError(f"{path}: text {text!r}: its rows and what it says of the text's windows do not agree")
        for name, value in (("nll", score.loss), ("kl", score.kl)):
            rows = float(found[key, text][name].sum()) / score.tokens
            if not math.isclose(rows, value, rel_tol=AGREES, abs_tol=AGREES):
                raise InputError(
                    f"{path}: text {text!r}, inputs {key}: {name} is {value:.9g} a token, and its rows add up to "
                    f"{rows:.9g}: the report or its rows were changed"
                )
    return found
