"""Reading a study's reports: every one checked, alone and against the others; results are never mixed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from toolkit.analysis.reading.report_file import OUTCOMES, Common, Draws, Run
from toolkit.analysis.reading.workers import read_reports
from toolkit.errors import InputError, closest
from toolkit.records.declared import study_file
from toolkit.records.profile import PROFILE, Profile, Reference
from toolkit.records.report import REPORT, SIXTEEN_BIT, Text
from toolkit.records.study import STUDY_COPY, Study


class Mark(NamedTuple):
    """One report's claim on a locked analysis: its file, the lock's hash, and when it was measured (UTC)."""

    path: Path
    lock: str | None
    started: str | None


@dataclass(frozen=True)
class Results:
    """All reports of one study that belong together, and the study that declared them.

    Attributes:
        references: arm name → run, of the reference runs.
        arms: (budget, arm) → run.
        controls: (budget, arm, control) → run; the draws of several reports of one control are put together.
        sweeps: `restore` or `quantize` → run, whose draw i is layer i alone.
        oracles: (budget, arm, name) → run of a reference selection at the arm's memory.
        repeat: the base run once more, otherwise computed.
        marks: which lock each report carries and when it was measured, in the order of their paths.
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
    sweeps: dict[str, Run] = field(default_factory=dict)
    oracles: dict[tuple[str, str, str], Run] = field(default_factory=dict)
    repeat: Run | None = None
    marks: tuple[Mark, ...] = ()

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


def profile_of(results: Results) -> Profile:
    """The profile beside a study's runs.

    Raises:
        InputError: there is none, or it is of other weights or layers than the reports.
    """
    path = results.folder / PROFILE
    if not path.exists():
        raise InputError(f"there is no {PROFILE} in {results.folder}; `toolkit run` keeps it beside the reports")
    profile = Profile.load(path)
    profile.expect(results.model, results.fingerprint, f"the reports in {results.folder}")
    if results.layers is not None and list(results.layers) != profile.names:
        raise InputError(f"{path} has other layers than the reports in {results.folder}")
    return profile


def _everything(run: Run) -> bool:
    """Whether a reference run is the 16-bit one: it holds every layer, or carries that name."""
    if run.selection is not None:
        return len(run.selection.layers) == run.selection.of["layers"]
    return run.arm == SIXTEEN_BIT


def locate(study: str | os.PathLike[str]) -> Path:
    """The folder that holds `<run>/report.json` files: of a study's folder or file, or of an `--out` folder.

    Raises:
        InputError: nothing is there, or no run has left a report yet.
    """
    path = Path(study)
    if not path.exists():
        raise InputError(f"no study or results folder at {path}; {_elsewhere(path)}")
    folder = path.parent if path.is_file() else path
    for candidate in (folder / "results", folder):
        if candidate.is_dir() and any(candidate.glob(f"*/{REPORT}")):
            return candidate
    others = sorted({str(found.parent.parent) for found in folder.glob(f"results*/*/{REPORT}")})
    hint = f"there are some in {', '.join(others)}" if others else f"`toolkit run {study}` makes them"
    raise InputError(f"no run has left a report in {folder / 'results'} or {folder}; {hint}")


def _elsewhere(path: Path) -> str:
    """What to do about a folder that is not there: the closest names of those that are, or make it."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either"
    hint = closest(path.name, [p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix == ".yaml"])
    return hint if hint.startswith("did you mean") else f"`toolkit run STUDY --out {path}` makes results there"


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
            in study, form, model, weights, settings, texts or layers; two reports tell of the same run; or two
            draws of one control are the same set, where its law draws without replacement.
    """
    folder = locate(study)
    paths = sorted(folder.glob(f"*/{REPORT}"))
    commons, runs = map(list, zip(*read_reports(paths), strict=True))
    _agree(paths, commons)
    same(paths, [r.layers for r in runs], "layers", lambda v: f"{len(v)} layers")
    common = commons[0]
    declaration = declared(folder, study, common.form == "small")
    if declaration.name != common.study:
        raise InputError(f"{folder} holds reports of study {common.study!r}, and {declaration.name!r} is asked for")
    order = list(declaration.texts)
    return Results(
        folder=folder,
        study=declaration,
        form=common.form,
        model=common.model,
        fingerprint=common.fingerprint,
        reference=common.reference,
        settings=common.settings,
        texts=dict(sorted(common.texts, key=lambda item: order.index(item[0]) if item[0] in order else len(order))),
        layers=next((run.layers for run in runs if run.layers is not None), None),
        count=len(runs),
        marks=tuple(Mark(run.path, run.lock, run.started) for run in runs),
        **_group(runs),
    )


LABELS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "study": ("study", str),
    "form": ("form", str),
    "model": ("model", str),
    "fingerprint": ("weights fingerprint", lambda v: v[:12]),
    "settings": ("settings hash", lambda v: v[:12]),
    "texts": ("texts", lambda v: ", ".join(f"{n} (SHA-256 {t.sha256[:12]}, {t.tokens} tokens)" for n, t in v)),
    "reference": ("reference weights", lambda v: repr(v.note)),
}
"""What all reports share → how an error names it, and how it shows one value."""


def _agree(paths: list[Path], commons: list[Common]) -> None:
    """Refuse reports that do not share what reports of one study share."""
    if len(set(commons)) == 1:
        return
    for field_, (label, show) in LABELS.items():
        same(paths, [getattr(common, field_) for common in commons], label, show)


def same(paths: list[Path], values: list[Any], label: str, show: Callable[[Any], str]) -> None:
    """Refuse reports that do not share one value; where there is none, a report has no say.

    Raises:
        InputError: the files that hold another value than most.
    """
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


def _group(runs: list[Run]) -> dict[str, Any]:
    kept: dict[str, dict[Any, Run]] = {"references": {}, "arms": {}, "sweeps": {}, "oracles": {}, "repeat": {}}
    parts: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        budget, control = str(run.budget), str(run.control)
        if run.role == "control":
            parts.setdefault((budget, run.arm, control), []).append(run)
            continue
        place, key = {
            "reference": ("references", run.arm),
            "arm": ("arms", (budget, run.arm)),
            "sweep": ("sweeps", run.arm),
            "oracle": ("oracles", (budget, run.arm, control)),
            "repeat": ("repeat", None),
        }[run.role]
        if key in kept[place]:
            other = kept[place][key].path
            raise InputError(f"{other} and {run.path} both tell of {run.role} {run.arm!r}; keep one of them")
        kept[place][key] = run
    repeat = kept.pop("repeat").get(None)
    return {**kept, "repeat": repeat, "controls": {key: _joined(group) for key, group in parts.items()}}


def _joined(group: list[Run]) -> Run:
    """One control from the reports that share its draws: none counted twice, all in order."""
    first = group[0]
    assert first.law is not None
    for run in group:
        if run.law != first.law:
            raise InputError(
                f"{first.path} and {run.path} hold draws of one control under different laws; they are not put together"
            )
    families = first.law.chain or first.law.shared
    if families:  # a set may come up twice, a numbered draw may not
        _numbered(group)
    else:
        _distinct(group)
    return first if len(group) == 1 else replace(first, draws=_together(group, families), rows=None)


def _numbered(group: list[Run]) -> None:
    """Refuse draws that go together with others by their number, and lack one or have it twice."""
    found = np.concatenate([run.draws.index for run in group if run.draws is not None])
    counts = np.bincount(found[found >= 0], minlength=len(found))
    for number, what in ((np.argmax(counts > 1), "stands twice"), (np.argmin(counts), "is missing")):
        if counts[number] != 1:
            raise InputError(
                f"{group[-1].path}: draw {int(number)} {what}, there or in another report of the same control; draws "
                "of this law go together by their numbers, from 0 on"
            )


def _distinct(group: list[Run]) -> None:
    """Refuse a set of layers that is drawn twice."""
    seen: set[str] = set()
    for run in group:
        assert run.draws is not None
        masks = run.draws.masks.split(" ")
        before = len(seen)
        seen.update(masks)
        if len(seen) < before + len(masks):
            raise InputError(
                f"{run.path}: a set of layers is drawn twice, there or in an earlier report of the same control; the "
                "draws of a control are distinct"
            )


def _together(group: list[Run], families: bool) -> Draws:
    """The draws of several reports; by their numbers where those go together with others, else as they come."""
    draws = [run.draws for run in group if run.draws is not None]
    index = np.concatenate([d.index for d in draws])
    order = np.argsort(index, kind="stable") if families else slice(None)
    masks = " ".join(d.masks for d in draws)
    if families:
        apart = masks.split(" ")
        masks = " ".join([apart[at] for at in order])

    def column(values: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(values))[order]

    return Draws(
        index=column(d.index for d in draws),
        masks=masks,
        layers=column(d.layers for d in draws),
        parameters=column(d.parameters for d in draws),
        bytes=column(d.bytes for d in draws),
        mismatch=column(d.mismatch for d in draws),
        outcomes={
            text: {outcome: column(d.outcomes[text][outcome] for d in draws) for outcome in OUTCOMES}
            for text in draws[0].outcomes
        },
    )
