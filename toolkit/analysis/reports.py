"""Reading a study's reports: fast, every one checked, and never two kinds of results mixed.

A report is validated in full and then cut down to what tables and figures need: numbers of draws become
arrays. Rows files are opened only by statistics that need them (`toolkit.analysis.windows`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from toolkit.errors import InputError, closest
from toolkit.records.io import read_bytes
from toolkit.records.profile import Reference
from toolkit.records.report import REPORT, Draw, Law, Report, Rows, Score, Text
from toolkit.records.selection import Selection
from toolkit.records.study import Study, study_file

OUTCOMES = ("loss", "kl", "agreement")
STUDY_COPY = "study.json"
"""The study as it ran, kept beside its runs."""


@dataclass(frozen=True)
class Draws:
    """The draws of one control, as columns.

    Attributes:
        masks: the sets, as hexadecimal bit masks over the profile's layers.
        layers, parameters, bytes: totals of each draw, int64.
        mismatch: (reached − target)/target, signed, float64.
        outcomes: text → outcome (`loss` and `kl` in nats a token, `agreement` as a share) → float64 values.
    """

    masks: tuple[str, ...]
    layers: np.ndarray
    parameters: np.ndarray
    bytes: np.ndarray
    mismatch: np.ndarray
    outcomes: dict[str, dict[str, np.ndarray]]

    def __len__(self) -> int:
        return len(self.masks)


@dataclass(frozen=True)
class Run:
    """One report, cut down; the attributes are those of `toolkit.records.report.Report`."""

    path: Path
    name: str
    role: str
    arm: str
    control: str | None
    budget: str | None
    selection: Selection | None
    law: Law | None
    layers: tuple[str, ...] | None
    scores: dict[str, Score]
    draws: Draws | None
    rows: Rows | None


@dataclass(frozen=True)
class Results:
    """All reports of one study that belong together, and the study that declared them.

    Attributes:
        references: arm name → run, of the reference runs.
        arms: (budget, arm) → run.
        controls: (budget, arm, control) → run; the draws of several reports of one control are put together.
    """

    folder: Path
    study: Study
    form: str
    model: str
    fingerprint: str
    reference: Reference
    settings: str
    texts: dict[str, Text]
    layers: tuple[str, ...] | None
    count: int
    references: dict[str, Run] = field(default_factory=dict)
    arms: dict[tuple[str, str], Run] = field(default_factory=dict)
    controls: dict[tuple[str, str, str], Run] = field(default_factory=dict)

    @property
    def budgets(self) -> list[str]:
        """Budgets in the study's order, as `layers=0.2`."""
        return [str(b) for b in self.study.budgets]

    @property
    def sixteen_bit(self) -> Run | None:
        """The reference run in which every layer is protected."""
        return next((r for r in self.references.values() if _everything(r)), None)

    @property
    def base(self) -> Run | None:
        """The reference run in which no layer is protected."""
        return next((r for r in self.references.values() if not _everything(r)), None)


def _everything(run: Run) -> bool:
    """Whether a reference run is the 16-bit one: it holds every layer, or carries that name."""
    if run.selection is not None:
        return len(run.selection.layers) == run.selection.of["layers"]
    return run.arm == "16-bit"


def locate(study: str | os.PathLike[str]) -> Path:
    """The folder that holds `<run>/report.json` files: of a study's folder or file, or of an `--out` folder.

    Raises:
        InputError: nothing is there, or no run has left a report yet.
    """
    path = Path(study)
    if not path.exists():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = closest(path.name, near) if near else f"there is no folder {path.parent} either"
        raise InputError(f"no study or results folder at {path}; {hint}")
    folder = path.parent if path.is_file() else path
    for candidate in (folder / "results", folder):
        if candidate.is_dir() and any(candidate.glob(f"*/{REPORT}")):
            return candidate
    others = sorted({str(found.parent.parent) for found in folder.glob(f"results*/*/{REPORT}")})
    hint = f"there are some in {', '.join(others)}" if others else f"`toolkit run {study}` makes them"
    raise InputError(f"no run has left a report in {folder / 'results'} or {folder}; {hint}")


def declared(folder: Path, given: str | os.PathLike[str], small: bool) -> Study:
    """The study behind a results folder: the copy kept beside the runs, else its `study.yaml`.

    Raises:
        InputError: there is neither, so that the side and the level of the analysis are not known.
    """
    copy = folder / STUDY_COPY
    if copy.exists():
        return Study.load(copy)
    given = Path(given)
    places = [given] if given.is_file() else []
    places += [place / "study.yaml" for place in (given, folder, folder.parent)]
    for place in places:
        if place.is_file():
            return Study.read(study_file(place), small=small)
    raise InputError(
        f"{folder} holds reports, and neither {STUDY_COPY} nor a study.yaml stands beside them: the side and the "
        "level of the analysis are declared there"
    )


def read(study: str | os.PathLike[str]) -> Results:
    """Every report of a study, checked one by one and against each other.

    Args:
        study: a study's folder, its `study.yaml`, its results folder, or the `--out` folder of a run.

    Raises:
        InputError: a report is damaged or foreign, holds a score that is not finite, or differs from the others
            in study, form, model, weights, settings, texts or layers; two reports tell of the same run, or two
            draws of one control are the same set.
    """
    folder = locate(study)
    paths = sorted(folder.glob(f"*/{REPORT}"))
    runs: list[Run] = []
    marks: list[tuple[Any, ...]] = []
    texts: dict[Hashable, dict[str, Text]] = {}
    layers: dict[tuple[str, ...], tuple[str, ...]] = {}
    references: dict[Hashable, Reference] = {}
    for path in paths:
        report = _report(path)
        text_mark = tuple(sorted((k, tuple(t.__dict__.values())) for k, t in report.texts.items()))
        texts.setdefault(text_mark, report.texts)
        reference_mark = (report.reference.dtype, report.reference.lattice, report.reference.note)
        references.setdefault(reference_mark, report.reference)
        names = None if report.layers is None else tuple(report.layers)
        names = None if names is None else layers.setdefault(names, names)
        marks.append(
            (report.study, report.form, report.model, report.fingerprint, report.settings, text_mark, reference_mark)
        )
        runs.append(_cut(report, path, names))
    _agree(paths, marks)
    _same(paths, [r.layers for r in runs], "layers", lambda v: f"{len(v)} layers")  # type: ignore[arg-type]
    name, form, model, fingerprint, settings, text_mark, reference_mark = marks[0]
    declaration = declared(folder, study, form == "small")
    if declaration.name != name:
        raise InputError(f"{folder} holds reports of study {name!r}, and {declaration.name!r} is asked for")
    return Results(
        folder=folder,
        study=declaration,
        form=form,
        model=model,
        fingerprint=fingerprint,
        reference=references[reference_mark],
        settings=settings,
        texts=texts[text_mark],
        layers=next(iter(layers), None),
        count=len(runs),
        **_group(runs),
    )


def _report(path: Path) -> Report:
    """One validated report. The quick path reads JSON straight into the record; errors come from the slow one."""
    content = read_bytes(path)
    try:
        report = Report.model_validate_json(content)
        if report.schema_ == Report.version and '"schema"' in content[:4096].decode("utf-8", "replace"):
            return report
    except (ValidationError, InputError):
        pass
    try:
        return Report.load(path)
    except InputError as error:
        raise InputError(
            f"{error}\n{path} is damaged or no report: move it away, and `toolkit run` repeats its run"
        ) from None


_LABELS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("study", str),
    ("form", str),
    ("model", str),
    ("weights fingerprint", lambda v: v[:12]),
    ("settings hash", lambda v: v[:12]),
    ("texts", lambda v: ", ".join(f"{name} (SHA-256 {text[1][:12]}, {text[3]} tokens)" for name, text in v)),
    ("reference weights", lambda v: repr(v[2])),
)


def _agree(paths: list[Path], marks: list[tuple[Any, ...]]) -> None:
    """Every report of one study shares what is in its marks."""
    if len(set(marks)) == 1:
        return
    for at, (label, show) in enumerate(_LABELS):
        _same(paths, [m[at] for m in marks], label, show)


def _same(paths: list[Path], values: list[Any], label: str, show: Callable[[Any], str]) -> None:
    counts = Counter(v for v in values if v is not None)
    if len(counts) <= 1:
        return
    usual = counts.most_common(1)[0][0]
    odd = [(p, v) for p, v in zip(paths, values, strict=True) if v is not None and v != usual]
    named = "; ".join(f"{p}: {show(v)}" for p, v in odd[:3]) + (f"; and {len(odd) - 3} more" if len(odd) > 3 else "")
    raise InputError(
        f"the reports differ in {label}, and results of different {label} make no table together. Most have "
        f"{show(usual)}; not so {named}. Move them away, or write other runs to a folder of their own (--out)"
    )


def _cut(report: Report, path: Path, names: tuple[str, ...] | None) -> Run:
    """What tables and figures need of a report, checked."""
    texts = list(report.texts)
    control = report.role == "control"
    if control and (report.law is None or report.control is None or not report.draws or names is None):
        raise InputError(f"{path}: a control's report has a control, a law, layers and draws; one of them is missing")
    if not control:
        _complete(report.scores, texts, str(path))
    if report.role != "reference" and report.budget is None:
        raise InputError(f"{path}: the report of an {report.role} has a budget; found none")
    if report.role == "arm" and report.selection is None:
        raise InputError(f"{path}: the report of an arm has a selection; found none")
    law = report.law
    return Run(
        path=path,
        name=report.run,
        role=report.role,
        arm=report.arm,
        control=report.control,
        budget=None if report.budget is None else str(report.budget),
        selection=report.selection,
        law=None if law is None else law.model_copy(update={"inclusion": None}),
        layers=names,
        scores=report.scores,
        draws=_columns(report.draws, texts, path) if control else None,
        rows=report.rows,
    )


def _complete(scores: dict[str, Score], texts: Iterable[str], where: str) -> None:
    for text in texts:
        if text not in scores:
            raise InputError(f"{where}: no score on text {text!r}; scores are on {', '.join(scores) or 'none'}")
        for outcome in OUTCOMES:
            if not np.isfinite(getattr(scores[text], outcome)):
                raise InputError(f"{where}: {outcome} on text {text!r} is {getattr(scores[text], outcome)}")


def _columns(draws: list[Draw], texts: list[str], path: Path) -> Draws:
    outcomes: dict[str, dict[str, np.ndarray]] = {}
    for text in texts:
        try:
            scores = [d.scores[text] for d in draws]
        except KeyError:
            bad = next(d for d in draws if text not in d.scores)
            raise InputError(f"{path}: draw {bad.index} has no score on text {text!r}") from None
        outcomes[text] = {
            "loss": np.array([s.loss for s in scores]),
            "kl": np.array([s.kl for s in scores]),
            "agreement": np.array([s.agreement for s in scores]),
        }
        for outcome, values in outcomes[text].items():
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                raise InputError(
                    f"{path}: {outcome} of draw {draws[at].index} on text {text!r} is {values[at]}; "
                    "a draw without a finite score cannot be ranked"
                )
    return Draws(
        masks=tuple(d.mask for d in draws),
        layers=np.array([d.layers for d in draws], dtype=np.int64),
        parameters=np.array([d.parameters for d in draws], dtype=np.int64),
        bytes=np.array([d.bytes for d in draws], dtype=np.int64),
        mismatch=np.array([d.mismatch for d in draws]),
        outcomes=outcomes,
    )


def _group(runs: list[Run]) -> dict[str, Any]:
    references: dict[str, Run] = {}
    arms: dict[tuple[str, str], Run] = {}
    parts: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if run.role == "control":
            parts.setdefault((str(run.budget), run.arm, str(run.control)), []).append(run)
            continue
        kept: dict[Any, Run] = references if run.role == "reference" else arms
        key: Any = run.arm if run.role == "reference" else (str(run.budget), run.arm)
        if key in kept:
            raise InputError(f"{kept[key].path} and {run.path} both tell of {run.role} {run.arm!r}; keep one of them")
        kept[key] = run
    return {
        "references": references,
        "arms": arms,
        "controls": {key: _joined(group) for key, group in parts.items()},
    }


def _joined(group: list[Run]) -> Run:
    """One control from the reports that share its draws, no set counted twice."""
    first = group[0]
    seen: dict[int, Path] = {}
    for run in group:
        if run.law != first.law:
            raise InputError(
                f"{first.path} and {run.path} hold draws of one control under different laws; they are not put together"
            )
        assert run.draws is not None
        for text in run.draws.masks:
            value = _bits(text, run.path)
            if value in seen:
                raise InputError(
                    f"{run.path}: a set of layers is drawn twice (also in {seen[value]}); the draws of a control are "
                    "distinct"
                )
            seen[value] = run.path
    if len(group) == 1:
        return first
    draws = [run.draws for run in group if run.draws is not None]
    together = Draws(
        masks=tuple(m for d in draws for m in d.masks),
        layers=np.concatenate([d.layers for d in draws]),
        parameters=np.concatenate([d.parameters for d in draws]),
        bytes=np.concatenate([d.bytes for d in draws]),
        mismatch=np.concatenate([d.mismatch for d in draws]),
        outcomes={
            text: {outcome: np.concatenate([d.outcomes[text][outcome] for d in draws]) for outcome in OUTCOMES}
            for text in draws[0].outcomes
        },
    )
    return Run(**{**first.__dict__, "draws": together})


def _bits(text: str, path: Path) -> int:
    try:
        return int(text, 16)
    except ValueError:
        raise InputError(f"{path}: mask {text!r} is no hexadecimal number") from None
