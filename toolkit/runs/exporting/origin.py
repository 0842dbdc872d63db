"""What is exported: a run, an adapter, a folder of starts or a plan, read from disk and made sure of."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from toolkit.errors import InputError, closest
from toolkit.records.io import read_json
from toolkit.records.plan import Plan
from toolkit.records.report import REPORT
from toolkit.records.start import StartFile
from toolkit.records.trained import Trained
from toolkit.registry import registry
from toolkit.runs import adapters, starts

STEPS = 5
"""How many folders are looked into, from the run's own upwards."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """What is exported.

    Attributes:
        path: as it was named.
        plan: with `start`, the digest of the bases that initializers changed.
        model: what the dense weights are loaded from.
        adapter: folder of a trained adapter; None where there is none.
        start: folder of starts; None where there is none.
        started: its report.
        dtype: that a run computed in; None where it is not known.
        seed: of a run's adapters.
        begun: whether the adapter is the one that the starts hold, for want of a trained one.
        fitted: whether A and B may hold what the base lost, as an initializer that is not plain fits them.
    """

    path: Path
    plan: Plan
    model: str
    adapter: Path | None = None
    start: Path | None = None
    started: StartFile | None = None
    dtype: str | None = None
    seed: int = 0

    @property
    def begun(self) -> bool:
        """Whether the starts' own A and B are what is exported."""
        return self.adapter is None and self.start is not None

    @property
    def fitted(self) -> bool:
        """Also where every base stayed the quantizer's own, as low-rank fits of its error leave it."""
        keys = {layer.initializer for layer in (self.plan.default, *self.plan.layers.values()) if layer.adapter}
        return self.plan.start is not None or not all(registry.make("initializer", key).plain for key in keys)


def read(
    run: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    start: str | os.PathLike[str] | None = None,
) -> Origin:
    """What a path holds: a run's folder, an adapter's, a folder of starts, or a plan file.

    Args:
        model: what the dense weights are loaded from; by default the model that the plan names.
        start: folder of the starts that the adapter was trained on, where initializers changed the base.

    Raises:
        InputError: none of these; a run that did not finish or kept no adapter; no model is named; or starts that are
            missing, incomplete or of another base.
    """
    path = Path(run)
    if not path.exists():
        near = closest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise InputError(f"there is no {path} to export" + (f"; {near}" if near.startswith("did you mean") else ""))
    adapter: Path | None = None
    dtype, seed = None, 0
    beginning = None if start is None else Path(start)
    if path.is_file():
        plan = Plan.load(path)
    elif (path / REPORT).is_file():
        report = _run(path)
        plan, adapter, beginning = _of_run(path, report, beginning)
        dtype, seed = report.provenance.compute_dtype, report.seeds.adapter
    elif (path / starts.REPORT).is_file():
        if beginning is not None and beginning != path:
            raise InputError(f"{path} is a folder of starts itself, and {beginning} is given as another: give one")
        plan, beginning = _plan_in(path), path
    elif (path / adapters.CONFIG).is_file():
        plan, adapter = _plan_in(path), path
    else:
        held = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise InputError(
            f"{path} is no run ({REPORT}), no adapter ({adapters.CONFIG} and {adapters.PLAN}), no folder of starts "
            f"({starts.REPORT}) and no plan file; found {held}"
        )
    started = None if beginning is None else _started(beginning)
    plan = _with_start(path, plan, beginning, started)
    source = os.fspath(model) if model is not None else plan.model or (started and started.model)
    if source is None:
        raise InputError(f"{path} does not say which model it is of: name it (--model)")
    return Origin(path, plan, source, adapter, beginning, started, dtype, seed)


def _run(path: Path) -> Trained:
    """The report of a fine-tuning run that finished."""
    data = read_json(path / REPORT)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != "trained":
        raise InputError(f"{path} is a run of kind {kind!r}; runs of fine-tuning studies (kind 'trained') have a plan")
    report = Trained.load(path / REPORT)
    if not report.finished:
        why = next((flag.reason for flag in report.flags if flag.severity == "fatal"), "it ended early")
        raise InputError(f"run {report.run} did not finish ({why}): run the study again, it goes on from there")
    return report


def _of_run(path: Path, report: Trained, start: Path | None) -> tuple[Plan, Path | None, Path | None]:
    """Plan, adapter and starts of a run; its starts lie in `starts` beside it or above."""
    if start is None and report.start is not None:
        above = [path.absolute(), *path.absolute().parents][:STEPS]
        found = [f for p in above if ((f := p / starts.STARTS / report.start.folder) / starts.REPORT).is_file()]
        start = found[0] if found else None
        if start is None and report.start.calibration is not None:
            raise InputError(
                f"run {report.run} began with the starts {report.start.folder}, which are not in a folder "
                f"{starts.STARTS} beside {path} or above: name their folder (--start)"
            )
    if report.adapter is None:
        return report.plan, None, start
    folder = path / report.adapter
    if not (folder / adapters.WEIGHTS).is_file():
        raise InputError(f"{path / REPORT} names the adapter {report.adapter!r}, and {folder} holds none")
    return _plan_in(folder), folder, start


def _plan_in(path: Path) -> Plan:
    if not (path / adapters.PLAN).is_file():
        raise InputError(f"{path} holds no {adapters.PLAN}: which layers are quantized how, and which weights it is of")
    return Plan.load(path / adapters.PLAN)


def _started(folder: Path) -> StartFile:
    if not (folder / starts.REPORT).is_file():
        raise InputError(f"{folder} holds no {starts.REPORT}: no folder of starts, or one that was not finished")
    return StartFile.load(folder / starts.REPORT)


def _with_start(path: Path, plan: Plan, folder: Path | None, started: StartFile | None) -> Plan:
    """The plan with the digest of the changed bases, made sure that these starts are its own."""
    if started is None or folder is None:
        return plan
    if None not in (plan.fingerprint, started.fingerprint) and plan.fingerprint != started.fingerprint:
        raise InputError(
            f"{path} is of weights {(plan.fingerprint or '')[:12]}, and the starts in {folder} of "
            f"{started.fingerprint[:12]}: another model"
        )
    changed = {name: layer.base for name, layer in started.layers.items() if layer.base is not None}
    digest = starts.digest_over(changed) if changed else None
    if folder != path and plan.start is not None and plan.start != digest:
        raise InputError(
            f"{path} belongs to the base {_shown(plan.start)}, and the starts in {folder} make {_shown(digest)}: "
            "another base"
        )
    return plan.model_copy(update={"start": digest, "fingerprint": started.fingerprint})


def _shown(digest: str | None) -> str:
    return "that the quantizers give" if digest is None else digest[:12]
