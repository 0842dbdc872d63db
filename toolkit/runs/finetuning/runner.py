"""The runner of fine-tuning studies: one command from a study file to a folder of reports.

results/settings.json           what fixes the numbers; a run under other settings is refused
results/study.json              the study as it ran
results/profile.json            the profile, made once (profile--<task>.json where a selector was measured on data)
results/starts/<digest>/        what layers start from, where an arm's initializer is not plain; once a plan
results/runs/<run>/report.json  rows.jsonl.gz, curve.csv and the adapter beside it

What is on disk is not done again, an interrupted run goes on from its last checkpoint, and results of different
settings are never mixed. Under `torchrun` all processes train one model together, and the first writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.records.finetuning import FineTuning
from toolkit.records.io import digest
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.trained import RUNS, Trained
from toolkit.registry import registry
from toolkit.runs import locking, results, starts
from toolkit.runs.finetuning import design, kept, plans, sealing, starting, tuning
from toolkit.runs.finetuning.asking import asked
from toolkit.runs.finetuning.attempt import AGAIN, Planned, Setup
from toolkit.runs.finetuning.bench import Bench, Stopped
from toolkit.runs.finetuning.data import hashes, read_rows
from toolkit.runs.finetuning.pool import Pool
from toolkit.runs.models import choose_device, compute_dtype
from toolkit.runs.progress import Progress, say, spell

if TYPE_CHECKING:
    import torch

    from toolkit.runs.training import Pacing


def run(
    study: str | os.PathLike[str] | FineTuning,
    *,
    model: str | os.PathLike[str] | None = None,
    data: Mapping[str, str | os.PathLike[str]] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    workers: int = 1,
    report_to: Sequence[str] = (),
    pacing: Pacing | None = None,
    progress: bool = True,
) -> Path:
    """Run a fine-tuning study, or what is missing of it; the folder of its results.

    Runs that ended early for want of memory, or because their process died, are tried again; those whose loss was
    not finite are not.

    Args:
        study: a study's folder or its `study.yaml`; or a FineTuning, and then `out` is needed.
        model: instead of the study's: a Hugging Face id, a local directory, or `demo`.
        data: instead of the study's: task name → folder of rows, or `NAME=PATH` items; `NAME:train` for those
            trained on.
        out: folder for the results; by default `results` beside the study, or `results-small` for its small form.
        small: run the small form that the study declares.
        device: `cpu`, `cuda` (all that are visible) or `cuda:1`; by default CUDA where there is one.
        dtype: compute dtype; by default bfloat16 where the device has it natively, else float32.
        workers: runs side by side on each device. On a CPU the threads are shared among them, and a run's numbers
            are those of a serial run with as many threads.
        report_to: trackers of the Trainer.
        pacing: when a run in the background pauses.
        progress: show how far it is, on stderr.

    Raises:
        InputError: the study, the model or the data cannot be used, or the folder holds results of other settings.
        RunError: the disk is full, or worker processes cannot be started; what was finished is kept.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InputError(f"workers: {workers}; at least one is needed")
    what = asked(study, model=model, data=data, out=out, small=small)
    together = _Together()
    if together.count > 1 and workers > 1:
        raise InputError(
            f"workers: {workers} beside {together.count} processes that train one model (torchrun): choose one of them"
        )
    if together.count > 1:
        design.divided(what.study, together.count)
    target = choose_device(together.device(device))
    runner = _Runner(
        what.study,
        what.folder,
        what.home,
        target,
        compute_dtype(target, dtype),
        _devices(device, target) if together.count == 1 else [str(target)],
        workers,
        tuple(report_to),
        pacing,
        progress and together.first,
        together,
    )
    with results.locked(what.folder) if together.first else contextlib.nullcontext():
        if together.first:
            results.tidy(what.folder)
        return runner.run()


def _devices(asked_for: str | None, target: torch.device) -> list[str]:
    """The device asked for, or every visible one where none is named by number."""
    import torch

    if target.type != "cuda" or (asked_for is not None and torch.device(asked_for).index is not None):
        return [str(target)]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


class _Together:
    """The processes that train one model together, as `torchrun` starts them; usually one."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.first = int(os.environ.get("RANK", "0")) == 0
        self._state: Any = None

    def device(self, device: str | None) -> str | None:
        """This process's own device."""
        import torch

        if self.count == 1:
            return device
        from accelerate import PartialState

        cpu = device == "cpu" or not torch.cuda.is_available()
        self._state = PartialState(cpu=cpu)
        return "cpu" if cpu else f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"

    @contextlib.contextmanager
    def first_first(self) -> Iterator[None]:
        """The first process does the block before the others."""
        if self._state is None:
            yield
            return
        with self._state.main_process_first():
            yield

    def wait(self) -> None:
        """Until all processes are here."""
        if self._state is not None:
            self._state.wait_for_everyone()


@dataclasses.dataclass
class _Runner:
    """One study in one folder."""

    study: FineTuning
    folder: Path
    home: Path
    device: torch.device
    dtype: torch.dtype
    devices: list[str]
    workers: int
    report_to: tuple[str, ...]
    pacing: Pacing | None
    progress: bool
    together: _Together
    starts: dict[str, Path | None] = dataclasses.field(default_factory=dict)

    def run(self) -> Path:
        runs = design.expand(self.study)
        self.rows = {name: read_rows(self.study, name) for name in self.study.tasks}
        with self.together.first_first():
            self.profile = self._profile()
            self.profiles = {name: self._calibrated(name) for name in self.study.tasks}
        self.calibration = starting.text_of(self.study.calibration)
        if self.together.first:
            kept.same_study(self.folder, self.study)
        self.settings = self._settings()
        if self.together.first:
            results.same_settings(self.folder, self.settings | {"tasks": self._tasks()})
        planned = [self._planned(one) for one in runs]
        self.lock, differing = locking.standing(
            self.folder,
            self.study,
            self.profile.fingerprint,
            hashes(self.rows) | self.calibration,
            plans.components(self.study),
            sealing.PACKAGES,
        )
        self._only_these(runs)
        with self.together.first_first():
            todo = self._missing(planned)
            self.together.wait()
        if self.together.first:
            for note in design.notes(self.study, runs):
                say(f"note: {note}")
            if todo and differing:
                say(f"warning: exploratory: {'; '.join(differing)}")
        try:
            self._do(todo, len(planned))
            if self.study.tune is not None:
                self._own()
        except Stopped as stop:
            say(f"stopped during {stop}; nothing is lost, the same command goes on from there")
        return self.folder

    def _own(self) -> None:
        """The runs at each arm's own value of the tuned lever, now that its trials are done; none at the shared one."""
        assert self.study.tune is not None
        self.together.wait()
        chosen, labels = tuning.choose(self.study, self._reports("tune"))
        runs = design.own(self.study, chosen, labels)
        planned = [self._planned(one) for one in runs]
        with self.together.first_first():
            todo = self._missing(planned)
            self.together.wait()
        if todo and self.together.first:
            say(f"trials are done; now {len(todo)} runs at each arm's own {self.study.tune.lever}")
        apart = {(run.task, run.arm) for run in runs}
        if self.together.first and (same := [f"{arm} on {task}" for task, arm in chosen if (task, arm) not in apart]):
            say(f"own {self.study.tune.lever} is the shared one, so that the shared runs serve: {'; '.join(same)}")
        self._do(todo, len(planned))

    def _reports(self, role: str) -> list[Trained]:
        paths = sorted((self.folder / RUNS).glob("*/report.json"))
        return [report for report in map(Trained.load, paths) if report.role == role]

    # -- what is measured before -------------------------------------------------------------------------------

    def _profile(self) -> Profile:
        return kept.profile_of(self.folder, self.study, progress=self.progress)

    def _calibrated(self, task: str) -> Profile:
        return kept.calibrated_for(
            self.folder, self.study, task, self.profile, self.rows[task].train, device=str(self.device)
        )

    # -- what must not change ----------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "fingerprint": self.profile.fingerprint,
            "compute_dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "batch": self.study.batch,
            **self.calibration,
        }

    def _tasks(self) -> dict[str, Any]:
        return {name: self._of_task(name) for name in self.study.tasks}

    def _of_task(self, name: str) -> dict[str, Any]:
        """What all runs of a task share: its rows, by hash and not by folder, and the levers that are no factor."""
        rows = self.rows[name]
        free = {*self.study.factors, *([self.study.tune.lever] if self.study.tune else [])}
        levers = self.study.levers_of(name).model_dump(mode="json")
        return {
            "task": rows.task.key,
            "levers": {key: value for key, value in levers.items() if key not in free},
            **{key: {"sha256": split.sha256, "rows": len(split.examples)} for key, split in rows.splits.items()},
        }

    def _planned(self, run: design.Run) -> Planned:
        made, protect, adapt = plans.plan(
            self.study, run.arm, self.profiles[run.task], run.seeds, run.draw, task=run.task, levers=run.levers
        )
        shared = digest(self.settings | self._of_task(run.task))
        return Planned(run, made, protect, adapt, shared)

    def _only_these(self, runs: Sequence[design.Run]) -> None:
        """Refuse reports of runs that the study does not have."""
        names = [run.name for run in runs]
        if self.study.tune is not None:
            names += [f"{run.name}--own" for run in runs if run.role == "arm"]
        results.only_these(self.folder / RUNS, names)

    def _missing(self, planned: Sequence[Planned]) -> list[Planned]:
        """The runs that no sound report tells of, and those that ended early by the moment's fault."""
        todo = []
        for one in planned:
            report, message = results.finished(self.folder / RUNS / one.run.name, one.settings, Trained)
            if message:
                say(f"warning: {message}")
            if report is None:
                todo.append(one)
                continue
            self._expect(report, one)
            if not report.finished and any(flag.check in AGAIN for flag in report.flags):
                say(f"{one.run.name} ended early ({report.flags[0].reason:.120}); it is tried again")
                todo.append(one)
        return todo

    def _expect(self, report: Trained, one: Planned) -> None:
        """Raise where a report is of another plan or other levers than the study now gives."""
        where = self.folder / RUNS / one.run.name
        told = tuple(getattr(report, key) for key in ("run", "role", "arm", "task", "seeds", "draw"))
        if told != (one.run.name, one.run.role, one.run.arm, one.run.task, one.run.seeds, one.run.draw):
            raise InputError(
                f"{where} holds the report of another run ({report.run}: {report.arm} on {report.task}, "
                f"{report.seeds}); move it away, and this run is made again"
            )
        for key, was, now in (
            ("plan", report.plan.hash, one.plan.hash),
            ("levers", report.levers, one.run.levers),
            ("value", report.value, one.run.value),
        ):
            if was != now:
                raise InputError(
                    f"{where} was made with another {key} than the study now gives: the arm was changed. Give it "
                    "another name, use --out for another folder, or remove that run"
                )

    # -- doing it ----------------------------------------------------------------------------------------------

    def _do(self, todo: Sequence[Planned], planned: int) -> None:
        if len(todo) < planned and self.together.first:
            say(f"{planned - len(todo)} of {planned} runs are on disk already")
        if not todo:
            return
        todo = [dataclasses.replace(one, start=self._start(one.plan)) for one in todo]
        setup = self._setup()
        if self._side_by_side(len(todo)):
            _portable(self.study)
            with Progress(len(todo), shown=self.progress) as bar, Pool(setup, self.devices, self.workers) as pool:
                pool.do(todo, bar)
            return
        with Bench(setup, progress=self.progress, writes=self.together.first) as bench:
            self._one_by_one(bench, todo)

    def _start(self, plan: Plan) -> Path | None:
        """The folder of what a plan's layers start from, made by the first process where it is missing."""
        if plan.hash not in self.starts:
            with self.together.first_first():
                self.starts[plan.hash] = starting.start_for(
                    self.folder.absolute() / starts.STARTS,
                    plan,
                    model=self.study.model,
                    device=str(self.device),
                    dtype=str(self.dtype).removeprefix("torch."),
                    calibration=self.study.calibration,
                    progress=self.progress,
                )
        return self.starts[plan.hash]

    def _one_by_one(self, bench: Bench, todo: Sequence[Planned]) -> None:
        started = time.monotonic()
        for number, one in enumerate(todo):
            if self.progress:
                left = (time.monotonic() - started) / number * (len(todo) - number) if number else None
                say(f"run {number + 1} of {len(todo)}: {one.run.name}" + (f", {spell(left)} left" if left else ""))
            report = bench.do(one)
            self.together.wait()
            for flag in report.flags if report is not None else ():
                if flag.severity == "fatal":
                    say(f"{one.run.name} ended early: {flag.reason}")

    def _side_by_side(self, runs: int) -> bool:
        """Whether other processes do the runs: several at once, or one that must see one GPU of many only."""
        import torch

        if self.together.count > 1:
            return False
        many = self.device.type == "cuda" and torch.cuda.device_count() > 1
        return many or (runs > 1 and self.workers > 1)

    def _setup(self) -> Setup:
        return Setup(
            study=self.study.name,
            form=self.study.form,
            folder=self.folder / RUNS,
            home=self.home,
            model=self.study.model,
            profile=self.profile,
            rows=self.rows,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            batch=self.study.batch,
            keep_adapters=self.study.keep_adapters,
            lock=self.lock,
            report_to=self.report_to,
            pacing=self.pacing,
        )


def _portable(study: FineTuning) -> None:
    """Refuse, for several processes, components that only this one knows.

    Raises:
        InputError: a component that was registered in a script or a notebook's cell.
    """
    for kind, key in plans.components(study):
        component = registry.make(kind, key)
        try:
            pickle.dumps(component)
            known = type(component).__module__ != "__main__"
        except Exception:
            known = False
        if not known:
            raise InputError(
                f"{kind} {key!r} was registered in this script or notebook, which worker processes do not see: put it "
                "into a module with an entry point, or use workers=1"
            )
