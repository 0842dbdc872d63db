"""The runner of studies of starts: one command from a study file to a folder of reports.

The model is loaded once; a run starts its layers, puts the weights that they begin with in their places, and scores
the model. What is on disk is not measured again, and results of different settings are never mixed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.interfaces import Start
from toolkit.records import rows
from toolkit.records.initialization import CALIBRATION, Initialization
from toolkit.records.report import SIXTEEN_BIT
from toolkit.records.started import COLUMNS, LayerOutcome, Started
from toolkit.registry import registry
from toolkit.runs import locking, results, starts
from toolkit.runs.initialization import design, sealing, starting
from toolkit.runs.initialization.asking import asked
from toolkit.runs.initialization.bench import Bench, Outcome
from toolkit.runs.models import choose_device, compute_dtype, load_tokenizer
from toolkit.runs.progress import Progress, say
from toolkit.runs.provenance import Recorder
from toolkit.runs.texts import documents as reading
from toolkit.runs.texts.evaluation import total

if TYPE_CHECKING:
    import torch

STARTS = "starts"
"""Beside a report that is not there yet: the starts of a calibrated run, so that it goes on where it stopped."""


def run(
    study: str | os.PathLike[str] | Initialization,
    *,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    calibration: str | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> Path:
    """Run a study of starts, or what is missing of it; the folder of its results.

    Where a lock stands in that folder (`toolkit.runs.locking`) and everything still is as it was locked, each
    report carries the lock's hash; else what differs is said, and the reports carry none.

    Args:
        study: a study's folder or its `study.yaml`; or an Initialization, and then `out` is needed.
        model: instead of the study's: a Hugging Face id, a local directory, or `demo`.
        texts: instead of the sources of the study's texts: name → source, or `[NAME=]SOURCE` items.
        calibration: instead of the source of its calibration text.
        out: folder for the results; by default `results` beside the study, or `results-small` for its small form.
        small: run the small form that the study declares.
        device: `cpu` or `cuda`; by default CUDA where there is one.
        dtype: compute dtype; by default bfloat16 where the device has it natively, else float32.
        progress: show how far it is, on stderr.

    Raises:
        InputError: the study, the model or a text cannot be used, the calibration text is one that is evaluated on,
            or the folder holds results of other settings.
        RunError: the disk is full, or a loss is not finite; what was finished is kept.
    """
    what = asked(study, model=model, texts=texts, calibration=calibration, out=out, small=small)
    target = choose_device(device)
    with results.locked(what.folder):
        results.tidy(what.folder)
        return _Runner(what.study, what.folder, target, compute_dtype(target, dtype), what.home, progress).run()


@dataclasses.dataclass
class _Runner:
    """One study in one folder."""

    study: Initialization
    folder: Path
    device: torch.device
    dtype: torch.dtype
    home: Path
    progress: bool

    def run(self) -> Path:
        study = self.study
        documents = {name: reading.read_text(source) for name, source in study.texts.items()}
        calibration = None if study.calibration is None else reading.read_text(study.calibration.text)
        for name, document in documents.items():
            if calibration is not None and document.sha256 == calibration.sha256:
                raise InputError(f"the calibration text {calibration.source!r} is text {name!r}: take another text")
        bases = list(dict.fromkeys(registry.make("quantizer", arm.base).key for arm in study.arms))
        self.profile = results.profile_of(self.folder, study.model, bases, progress=self.progress)
        runs = design.expand(study, self.profile)
        for run in runs:
            if run.plan is not None:
                design.expect(run, self.profile)
        tokenizer = load_tokenizer(study.model)
        self.windows = {
            name: reading.cut(document, tokenizer, window=study.window, tokens=study.tokens)
            for name, document in documents.items()
        }
        self.calibration = None
        if study.calibration is not None and calibration is not None:
            use = study.calibration
            self.calibration = reading.cut(calibration, tokenizer, window=use.window, tokens=use.windows * use.window)
        design.enough_windows(study, {name: w.record.windows for name, w in self.windows.items()})
        results.same_study(self.folder, study.published, ("name", "form", "analysis", "rank", "scaler", "seed"))
        self.settings = results.same_settings(self.folder, self._settings())
        results.only_these(self.folder, [run.name for run in runs])
        todo = [run for run in runs if not self._finished(run)]
        if len(todo) < len(runs):
            say(f"{len(runs) - len(todo)} of {len(runs)} runs are on disk already")
        hashes = {name: w.record.sha256 for name, w in self.windows.items()}
        if self.calibration is not None:
            hashes[CALIBRATION] = self.calibration.record.sha256
        self.lock, differing = locking.standing(
            self.folder, study, self.profile.fingerprint, hashes, design.components(study), sealing.PACKAGES
        )
        if todo:
            if differing:
                say(f"warning: exploratory: {'; '.join(differing)}")
            self._measure(todo)
        return self.folder

    def _settings(self) -> dict[str, Any]:
        """What fixes the numbers."""
        texts = dict(self.windows) | ({} if self.calibration is None else {CALIBRATION: self.calibration})
        return {
            "fingerprint": self.profile.fingerprint,
            "texts": reading.fixed(texts),
            "rank": self.study.rank,
            "seed": self.study.seed,
            "activations": [registry.make("quantizer", key).key for key in self.study.activations],
            "batch": self.study.batch,
            "compute_dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
        }

    def _finished(self, run: design.Run) -> bool:
        """Whether a sound report tells of this very run.

        Raises:
            InputError: a sound report tells of another plan than the study now gives.
        """
        where = self.folder / run.name
        report, message = results.finished(where, self.settings, Started)
        if message:
            say(f"warning: {message}")
        if report is not None and report.plan != run.plan:
            raise InputError(
                f"{where} was made from another plan than the study now asks for; use --out for another folder, or "
                "remove that run"
            )
        return report is not None

    def _measure(self, todo: list[design.Run]) -> None:
        names = self.profile.names
        before, scores = Bench.steps(self.study, self.windows, self.calibration)
        steps = [len(names) + starting.calibrations(run.plan, names) + scores for run in todo if run.plan is not None]
        with Progress(before + sum(steps), shown=self.progress) as bar:
            bench = Bench(self.study, self.profile, self.windows, self.calibration, self.device, self.dtype, bar)
            recorder = Recorder(
                self.home, self.device, self.dtype, ignore=[self.folder], fallbacks=self.profile.fallbacks
            )
            recorder.start()
            reference = bench.reference()
            outcomes = starting.Outcomes(bench)
            for run in todo:
                if run.name != todo[0].name:
                    recorder.start()
                if run.plan is None:
                    self._report(run, reference, {}, recorder, bench)
                    continue
                assert run.arm is not None
                found: dict[str, LayerOutcome] = {}
                for name, start, seconds in self._starts(run, bench, bar):
                    quantizer = run.plan.of(name).quantizer
                    found[name], weight = outcomes.of(name, quantizer, start, seconds)
                    bench.put(name, weight)
                    bar.step(f"{run.name}: {name}")
                base = registry.make("quantizer", run.arm.base).key
                measured = bench.measure(run.name, [n for n in found if run.plan.of(n).quantizer == base])
                self._report(run, measured, found, recorder, bench)
                shutil.rmtree(self.folder / run.name / STARTS, ignore_errors=True)

    def _starts(self, run: design.Run, bench: Bench, bar: Progress) -> Iterator[tuple[str, Start, float]]:
        assert run.plan is not None
        if not starting.calibrated(run.plan):
            return starting.computed(run.plan, bench, self.study.seed)
        return starting.after_calibration(run.plan, bench, self.study, self.folder / run.name / STARTS, bar)

    def _report(
        self,
        run: design.Run,
        measured: Outcome,
        layers: dict[str, LayerOutcome],
        recorder: Recorder,
        bench: Bench,
    ) -> None:
        """Write a run's rows and its report, one layer a line."""
        where, texts = self.folder / run.name, list(self.windows)
        lines = [
            [key, text, [w.nll for w in scored], [w.kl for w in scored], [w.top for w in scored]]
            for key, found in measured.items()
            for text, scored in found.items()
        ]
        report = Started(
            study=self.study.name,
            form=self.study.form,
            run=run.name,
            role="reference" if run.arm is None else "arm",
            arm=SIXTEEN_BIT if run.arm is None else run.arm.name,
            scaling=run.scaling,
            model=self.profile.model,
            fingerprint=self.profile.fingerprint,
            reference=self.profile.reference,
            settings=self.settings,
            lock=self.lock,
            seed=self.study.seed,
            plan=run.plan,
            layers=layers,
            fallbacks=starts.counts(layers),
            seconds=round(sum(layer.seconds for layer in layers.values()), 3),
            labels=["small form"] if self.study.form == "small" else [],
            scores={text: {key: total(found[text]) for key, found in measured.items()} for text in texts},
            texts={name: w.record for name, w in self.windows.items()},
            calibration=None if self.calibration is None else self.calibration.record,
            rows=rows.write(where, COLUMNS, lines),
            provenance=recorder.finish({"reference logits recomputed (batches)": bench.recomputed}),
        )
        results.write_report(where, report, "layers")
        for line in starts.said(report.fallbacks, len(layers)):
            say(f"{run.name}: {line}")
