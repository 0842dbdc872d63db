"""The study runner: one command from a study file to a folder of reports.

The model is loaded once and its layers are switched between selections. What is on disk is not measured again,
an interrupted study goes on where it stopped, and results of different settings are never mixed. A run that is
fitted on others' results comes after them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.records.report import SIXTEEN_BIT, Report
from toolkit.records.study import Study
from toolkit.runs import locking, results
from toolkit.runs.models import choose_device, compute_dtype, load_tokenizer
from toolkit.runs.progress import Progress, say
from toolkit.runs.provenance import Recorder
from toolkit.runs.ranking import design, headroom, kept, reporting, sealing
from toolkit.runs.ranking.asking import asked
from toolkit.runs.ranking.bench import Bench
from toolkit.runs.texts import documents as reading

if TYPE_CHECKING:
    import torch


def run(
    study: str | os.PathLike[str] | Study,
    *,
    model: str | os.PathLike[str] | None = None,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> Path:
    """Run a study, or what is missing of it; the folder of its results.

    Where a lock stands in that folder (`toolkit.runs.locking`) and everything still is as it was locked, each
    report carries the lock's hash; else what differs is said, and the reports carry none.

    Args:
        study: a study's folder or its `study.yaml`; or a Study, and then `out` is needed.
        model: instead of the study's: a Hugging Face id, a local directory, or `demo`.
        texts: instead of the study's: name → source, or `[NAME=]SOURCE` items.
        out: folder for the results; by default `results` beside the study, or `results-small` for its small form.
        small: run the small form that the study declares.
        device: `cpu` or `cuda`; by default CUDA where there is one.
        dtype: compute dtype; by default bfloat16 where the device has it natively, else float32.
        progress: show how far it is, on stderr.

    Raises:
        InputError: the study, the model or a text cannot be used, or the folder holds results of other settings.
        RunError: the disk is full, or a loss is not finite; what was finished is kept.
    """
    what = asked(study, model=model, texts=texts, out=out, small=small)
    target = choose_device(device)
    with results.locked(what.folder):
        results.tidy(what.folder)
        return _Runner(what.study, what.folder, target, compute_dtype(target, dtype), what.home, progress).run()


@dataclasses.dataclass
class _Runner:
    """One study in one folder."""

    study: Study
    folder: Path
    device: torch.device
    dtype: torch.dtype
    home: Path
    progress: bool

    def run(self) -> Path:
        documents = {name: reading.read_text(source) for name, source in self.study.texts.items()}
        wanted = design.quantizers(self.study)
        self.profile = results.profile_of(self.folder, self.study.model, wanted, progress=self.progress)
        tokenizer = load_tokenizer(self.study.model)
        self.windows = {
            name: reading.cut(document, tokenizer, window=self.study.window, tokens=self.study.tokens)
            for name, document in documents.items()
        }
        design.enough_windows(self.study, {name: w.record.windows for name, w in self.windows.items()})
        runs = design.expand(self.study, self.profile)
        kept.same_study(self.folder, self.study)
        self.settings = results.same_settings(self.folder, self._settings())
        results.only_these(self.folder, [run.name for run in runs])
        self.fit = headroom.Fit(self.study, self.profile, self.folder)
        todo = self._missing(runs)
        if len(todo) < len(runs):
            say(f"{len(runs) - len(todo)} of {len(runs)} runs are on disk already")
        hashes = {name: w.record.sha256 for name, w in self.windows.items()}
        self.lock, differing = locking.standing(
            self.folder, self.study, self.profile.fingerprint, hashes, sealing.components(self.study)
        )
        for label in design.labels(self.study, todo):
            say(f"note: {label}")
        if todo:
            if differing:
                say(f"warning: exploratory: {'; '.join(differing)}")
            self._measure(todo)
        return self.folder

    def _settings(self) -> dict[str, Any]:
        """What fixes the numbers."""
        from toolkit.registry import registry

        return {
            "fingerprint": self.profile.fingerprint,
            "base": registry.make("quantizer", self.study.base).key,
            "protect": registry.make("quantizer", self.study.protect).key,
            "texts": reading.fixed(self.windows),
            "batch": self.study.batch,
            "compute_dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
        }

    def _missing(self, runs: list[design.Run]) -> list[design.Run]:
        """The runs that no sound report tells of; what is fitted on a missing one is looked at when its turn comes."""
        todo: list[design.Run] = []
        for run in runs:
            if not run.selections:
                if {one.name for one in todo} & set(headroom.needs(self.study, run)):
                    todo.append(run)
                    continue
                run = self._fitted(run)
            if not self._finished(run):
                todo.append(run)
        return todo

    def _fitted(self, run: design.Run) -> design.Run:
        return dataclasses.replace(run, selections=(self.fit.selection(run),))

    def _finished(self, run: design.Run) -> bool:
        """Whether a sound report tells of this very run.

        Raises:
            InputError: a sound report tells of other selections than the study now gives.
        """
        where = self.folder / run.name
        report, message = results.finished(where, self.settings)
        if message:
            say(f"warning: {message}")
        if report is not None:
            self._expect(report, run, where)
        return report is not None

    def _expect(self, report: Report, run: design.Run, where: Path) -> None:
        if run.many:
            planned, found = reporting.masks(run, self.profile), [draw.mask for draw in report.draws]
            if found != planned:
                raise InputError(
                    f"{where} holds {len(found)} draws, and the study asks for {len(planned)} (or others): use --out "
                    "for another folder, or remove that run"
                )
        elif report.selection is None or report.selection.layers != list(run.selections[0].layers):
            raise InputError(
                f"{where} protects other layers than the study now asks for; use --out for another folder, or remove "
                "that run"
            )

    def _measure(self, todo: list[design.Run]) -> None:
        partial = {
            run.name: kept.Partial(self.folder / run.name, self.settings, reporting.masks(run, self.profile))
            for run in todo
            if run.many
        }
        done = sum(len(p.done) for p in partial.values())
        if done:
            say(f"{done} draws of an interrupted run are kept")
        steps = sum(max(1, len(run.selections)) for run in todo) - done
        with Progress(1 + steps, shown=self.progress) as bar:
            bar.step("loading the model", 0)
            bench = Bench(self.study, self.profile, self.windows, self.device, self.dtype)
            recorder = Recorder(
                self.home, self.device, self.dtype, ignore=[self.folder], fallbacks=self.profile.fallbacks
            )
            recorder.start()
            bar.step("16-bit reference", 0)
            reference = bench.reference()
            bar.step("16-bit reference")
            for run in todo:
                if run.name != todo[0].name:
                    recorder.start()
                if not run.selections:  # what it is fitted on is on disk now
                    run = self._fitted(run)
                    if self._finished(run):
                        bar.step(run.name)
                        continue
                self._one(run, bench, recorder, reference, partial.get(run.name), bar)

    def _one(
        self,
        run: design.Run,
        bench: Bench,
        recorder: Recorder,
        reference: kept.Outcome,
        partial: kept.Partial | None,
        bar: Progress,
    ) -> None:
        """Measure one run and write its report; the draws of a run of many are kept on disk as they come."""
        labels, threads, recomputed = [], None, bench.recomputed
        if run.arm == SIXTEEN_BIT and run.role == "reference":
            outcomes = [reference]
            bar.step(run.name)
        elif run.role == "repeat":
            bar.step(run.name, 0)
            again = bench.again(run.selections[0].layers)
            outcomes, labels, threads, recomputed = [again.outcome], [again.said], again.threads, again.recomputed
            bar.step(run.name)
        else:
            outcomes = self._outcomes(run, bench, partial, bar)
        where = self.folder / run.name
        report = reporting.report(
            run,
            outcomes,
            study=self.study,
            profile=self.profile,
            texts={name: w.record for name, w in self.windows.items()},
            settings=self.settings,
            lock=self.lock,
            rows=kept.write_rows(where, outcomes, many=run.many),
            provenance=recorder.finish({"reference logits recomputed (batches)": recomputed}, threads=threads),
            labels=labels,
        )
        results.write_report(where, report, "draws")
        if partial is not None:
            partial.remove()

    def _outcomes(
        self, run: design.Run, bench: Bench, partial: kept.Partial | None, bar: Progress
    ) -> list[kept.Outcome]:
        done = partial.done if partial else {}
        masks = reporting.masks(run, self.profile)
        bar.step(run.name, 0)
        todo = [index for index in range(len(run.selections)) if index not in done]
        for measured in bench.measure(run.name, [s.layers for s in run.selections], todo):
            if partial is not None:
                partial.add([(index, masks[index], outcome) for index, outcome in measured])
            else:
                done |= dict(measured)
            bar.step(run.name, len(measured))
        return [done[index] for index in range(len(run.selections))]
