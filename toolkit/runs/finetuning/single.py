"""`train`: one fine-tuning without a study, from a plan to a report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit.records.finetuning import Use
from toolkit.records.io import digest
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.records.trained import Trained
from toolkit.runs import results, starts
from toolkit.runs.finetuning import starting
from toolkit.runs.finetuning.attempt import AGAIN, Planned, Setup
from toolkit.runs.finetuning.bench import Bench
from toolkit.runs.finetuning.data import hashes, read_use
from toolkit.runs.finetuning.design import Run
from toolkit.runs.started import CALIBRATE, initializers

if TYPE_CHECKING:
    from toolkit.runs.training import Pacing


def train(
    model: str | os.PathLike[str],
    plan: Plan,
    task: str | Use,
    *,
    out: str | os.PathLike[str],
    levers: Levers | None = None,
    seeds: Seeds | int = 0,
    batch: int = 32,
    keep_adapter: bool = True,
    start: str | os.PathLike[str] | None = None,
    device: str | None = None,
    dtype: str | None = None,
    report_to: Sequence[str] = (),
    pacing: Pacing | None = None,
    progress: bool = True,
) -> Trained:
    """Train one model on one task and score it; the report, which lies in `out` with rows, curve and adapter beside it.

        protected = tk.select("top-error", tk.profile("demo"), "layers=0.2")
        plan = tk.Plan.protecting(protected, "nf4", rank=8, alpha=16)
        report = tk.train("demo", plan, "arithmetic", levers=tk.Levers(steps=100, length=64), out="trained")
        print(report.scores[""].score, report.course.last_loss)

    The same call again reads what is there, or goes on where a run was interrupted. Adapters are the plan's: its rank
    and alpha stand in the report in place of the levers'.

    Args:
        model: a Hugging Face id, a local directory, or `demo`.
        plan: with adapters.
        task: its key; or a `Use`, which names data, rows, and another task to train on.
        out: folder of the run.
        levers: by default the paper's.
        seeds: one for everything, or apart.
        batch: rows a forward pass of the scoring.
        keep_adapter: save the adapter in PEFT's format.
        start: folder of what the plan's layers start from; where they do not start plainly and need no calibration, it
            is made in `out` if left out.

    Raises:
        InputError: what cannot be trained as asked, or the folder holds another run.
        RunError: the disk is full; what was done is kept.
    """
    from toolkit.runs.building import checked
    from toolkit.runs.models import choose_device, compute_dtype
    from toolkit.weights.profiling import profile
    from toolkit.weights.sources import refuse_missing

    for name, value, kinds in (
        ("plan", plan, (Plan,)),
        ("task", task, (str, Use)),
        ("levers", levers, (Levers, type(None))),
        ("seeds", seeds, (Seeds, int)),
        ("model", model, (str, os.PathLike)),
    ):
        if not isinstance(value, kinds):
            raise InputError(
                f"{name}: {value!r:.60} is a {type(value).__name__}, and a {kinds[0].__name__} is asked for"
            )
    if isinstance(seeds, int) and not 0 <= seeds < 2**32:
        raise InputError(f"seeds: {seeds}; a number from 0 to {2**32 - 1} is asked for")
    refuse_missing(model)
    levers, folder = levers or Levers(), Path(out)
    checked(plan)
    levers = _of_plan(plan, levers)
    used = Use(task=task) if isinstance(task, str) else task
    rows = read_use(used, used.task)
    begin = initializers(plan)
    if start is not None and not begin:
        raise InputError(f"start: {os.fspath(start)}, and the plan starts every layer plainly")
    if start is None and (calibrated := [each.key for each in begin if each.needs_calibration]):
        raise InputError(
            f"initializer {calibrated[0]} is calibrated: make its starts by `{CALIBRATE}`, and give start=DIR"
        )
    target = choose_device(device)
    computed = str(compute_dtype(target, dtype)).removeprefix("torch.")
    with results.locked(folder):
        results.tidy(folder)
        made = profile(model, [plan.default.quantizer], progress=None if progress else False)
        if os.path.isdir(model):
            made = made.model_copy(update={"model": Path(model).name})  # where it lies is the machine's matter
        settings = {
            "fingerprint": made.fingerprint,
            "compute_dtype": computed,
            "device": target.type,
            "batch": batch,
            "rows": hashes({used.task: rows}),
        }
        name = folder.absolute().name
        where = None if start is None else Path(start)
        if where is None:
            where = starting.start_for(
                folder.absolute() / starts.STARTS,
                plan,
                model=model,
                device=str(target),
                dtype=computed,
                progress=progress,
            )
        planned = Planned(
            Run(name, "arm", name, used.task, Seeds.all(seeds) if isinstance(seeds, int) else seeds, levers),
            plan,
            None,
            None,
            digest(settings),
            where,
        )
        kept = _kept(folder, planned)
        if kept is not None:
            return kept
        setup = Setup(
            study=name,
            form="full",
            folder=folder.absolute().parent,
            home=folder.absolute().parent,
            model=os.fspath(model),
            profile=made,
            rows={used.task: rows},
            device=str(target),
            dtype=computed,
            batch=batch,
            keep_adapters=keep_adapter,
            report_to=tuple(report_to),
            pacing=pacing,
        )
        with Bench(setup, progress=progress) as bench:
            report = bench.do(planned)
        assert report is not None
        return report


def _of_plan(plan: Plan, levers: Levers) -> Levers:
    """The levers with the plan's rank and alpha, so that the report says what was trained.

    Raises:
        InputError: the plan has no adapters.
    """
    layers = [plan.default, *plan.layers.values()]
    adapters = [layer.adapter for layer in layers if layer.adapter is not None]
    if not adapters:
        raise InputError("the plan has no adapters, and nothing would be trained: give it a rank")
    return levers.model_copy(update={"rank": adapters[0].rank, "alpha": adapters[0].alpha})


def _kept(folder: Path, planned: Planned) -> Trained | None:
    """The report of this very run, where it is there.

    Raises:
        InputError: the folder holds another run.
    """
    report, _ = results.finished(folder, planned.settings, Trained)
    if report is None or (not report.finished and any(flag.check in AGAIN for flag in report.flags)):
        return None
    run = planned.run
    for what, was, now in (
        ("plan", report.plan.hash, planned.plan.hash),
        ("levers", report.levers, run.levers),
        ("seeds", report.seeds, run.seeds),
        ("start", report.start, None if planned.start is None else starting.begun(planned.start)),
    ):
        if was != now:
            raise InputError(f"{folder} holds a run with another {what}: give another folder as `out`")
    return report
