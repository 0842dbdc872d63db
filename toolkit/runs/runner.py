"""The study runner: one command from a study file to a folder of reports.

The model is loaded once and its layers are switched between selections. What is on disk is not measured again,
an interrupted study goes on where it stopped, and results of different settings are never mixed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, RunError
from toolkit.records.io import parse
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.report import Draw, Law, Report, Text, mask
from toolkit.records.selection import Selection
from toolkit.records.study import Study, study_file
from toolkit.runs import design, results, texts
from toolkit.runs.evaluation import Evaluation, total, window_scores
from toolkit.runs.models import choose_device, compute_dtype, load_model, load_tokenizer
from toolkit.runs.progress import Progress
from toolkit.runs.provenance import Recorder
from toolkit.runs.sweep import Sweep

if TYPE_CHECKING:
    import torch

IN_FLIGHT = {"cpu": 1, "other": 32}
"""Measurements that may wait on the device before their numbers are fetched and kept."""


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
    if isinstance(study, Study):
        if out is None or small:
            raise InputError(
                "a Study given as an object needs `out`, and has its form already: Study.read(…, small=True)"
            )
        file, declared = Path(f"study {study.name}"), study
    else:
        file = study_file(study)
        declared = Study.read(file, small=small)
    declared = _with(declared, file, model, texts)
    design.check(declared)
    folder = Path(out) if out is not None else file.parent / ("results-small" if small else "results")
    target = choose_device(device)
    with results.locked(folder):
        results.tidy(folder)
        return _Runner(declared, folder, target, compute_dtype(target, dtype), file.parent, progress).run()


def _with(
    study: Study,
    file: Path,
    model: str | os.PathLike[str] | None,
    given: Mapping[str, str] | Iterable[str] | None,
) -> Study:
    """The study with another model or other texts."""
    data = study.to_json()
    if model is not None:
        data["model"] = os.fspath(model)
    if given is not None:
        data["texts"] = dict(given) if isinstance(given, Mapping) else texts.parse_texts(given)
        if not data["texts"]:
            raise InputError("no text is given; leave `texts` out for the study's own")
    return parse(Study, data, str(file), {})


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
        documents = {name: texts.read_text(source) for name, source in self.study.texts.items()}
        self.profile = self._profile()
        tokenizer = load_tokenizer(self.study.model)
        self.windows = {
            name: texts.cut(document, tokenizer, window=self.study.window, tokens=self.study.tokens)
            for name, document in documents.items()
        }
        runs = design.expand(self.study, self.profile)
        results.same_study(self.folder, self.study)
        self.settings = results.same_settings(self.folder, self._settings())
        results.only_these(self.folder, [run.name for run in runs])
        todo = []
        for run in runs:
            report, message = results.finished(self.folder / run.name, self.settings)
            if message:
                _say(f"warning: {message}")
            if report is None:
                todo.append(run)
            else:
                self._expect(report, run)
        for label in design.labels(self.study, todo):
            _say(f"note: {label}")
        if len(todo) < len(runs):
            _say(f"{len(runs) - len(todo)} of {len(runs)} runs are on disk already")
        if todo:
            self._measure(todo)
        return self.folder

    def _profile(self) -> Profile:
        """The profile in the folder, where it is of this model and measured what is needed; else a new one."""
        from toolkit.weights.profiling import fingerprint_of, profile

        path = self.folder / results.PROFILE
        wanted = design.quantizers(self.study)
        if path.exists():
            kept = Profile.load(path)
            found = fingerprint_of(self.study.model)
            if found != kept.fingerprint:
                raise InputError(
                    f"{self.folder} holds results on {kept.model} (weights {kept.fingerprint[:12]}), and the weights "
                    f"of {self.study.model} are {found[:12]}: another model, or changed weights; use --out for "
                    "another folder"
                )
            if set(wanted) <= set(kept.quantizers):
                return kept
            wanted = list(dict.fromkeys([*kept.quantizers, *wanted]))
        made = profile(self.study.model, wanted, progress=None if self.progress else False)
        made.save(path)
        return made

    def _settings(self) -> dict[str, Any]:
        """What fixes the numbers. Of a text that is its hash, not its source: a file may hold what the hub gives."""
        from toolkit.registry import registry

        return {
            "fingerprint": self.profile.fingerprint,
            "base": registry.make("quantizer", self.study.base).key,
            "protect": registry.make("quantizer", self.study.protect).key,
            "texts": {
                name: {"sha256": w.record.sha256, "tokens": w.record.tokens, "window": w.record.window}
                for name, w in self.windows.items()
            },
            "batch": self.study.batch,
            "compute_dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
        }

    def _expect(self, report: Report, run: design.Run) -> None:
        """Refuse a sound report that tells of other selections than the study now gives."""
        where = self.folder / run.name
        if run.role == "control":
            planned, found = self._masks(run), [draw.mask for draw in report.draws]
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

    def _masks(self, run: design.Run) -> list[str]:
        names = self.profile.names
        return [mask(frozenset(selection.layers), names) for selection in run.selections]

    def _measure(self, todo: list[design.Run]) -> None:
        partial = {
            run.name: results.Partial(self.folder / run.name, self.settings, self._masks(run))
            for run in todo
            if run.role == "control"
        }
        kept = sum(len(p.done) for p in partial.values())
        if kept:
            _say(f"{kept} draws of an interrupted run are kept")
        steps = sum(len(run.selections) for run in todo) - kept
        with Progress(1 + steps, shown=self.progress) as bar:
            bar.step("loading the model", 0)
            self._load()
            recorder = Recorder(
                self.home, self.device, self.dtype, ignore=[self.folder], fallbacks=self.profile.fallbacks
            )
            recorder.start()
            bar.step("16-bit reference", 0)
            self.sweep.set(self.profile.names)
            reference = self._numbers(self.evaluation.keep_reference(), "16-bit reference")
            bar.step("16-bit reference")
            for run in todo:
                if run.name != todo[0].name:
                    recorder.start()
                if run.arm == design.SIXTEEN_BIT and run.role == "reference":
                    outcomes = [reference]
                    bar.step(run.name)
                else:
                    outcomes = self._outcomes(run, partial.get(run.name), bar)
                self._write(run, outcomes, recorder)
                if run.name in partial:
                    partial[run.name].remove()

    def _load(self) -> None:
        from toolkit.weights.layers import layers_of
        from toolkit.weights.profiling import fingerprint_of

        model = load_model(self.study.model, device="cpu")
        found = fingerprint_of(model)
        if found != self.profile.fingerprint:
            raise RunError(
                f"the model that transformers builds from {self.study.model} has other weights ({found[:12]}) than its "
                f"files ({self.profile.fingerprint[:12]})"
            )
        names = [layer.name for layer in layers_of(model)]
        if names != self.profile.names:
            raise InputError(
                f"{self.folder / results.PROFILE} lists {len(self.profile)} layers, and the model has {len(names)} "
                "(or others): remove that file to have it made anew"
            )
        self.sweep = Sweep(
            model.to(self.device),
            self.profile.names,
            base=self.study.base,
            protect=self.study.protect,
            dtype=self.dtype,
        )
        ids = {name: w.ids for name, w in self.windows.items()}
        self.evaluation = Evaluation(self.sweep.model, ids, batch=self.study.batch)

    def _numbers(self, measured: dict[str, torch.Tensor], what: str) -> results.Outcome:
        try:
            return window_scores(measured, {name: w.record.window for name, w in self.windows.items()})
        except RunError as error:
            raise RunError(f"{what}: {error}") from None

    def _outcomes(self, run: design.Run, partial: results.Partial | None, bar: Progress) -> list[results.Outcome]:
        """One outcome a selection; a control's are kept on disk as they come."""
        done = partial.done if partial else {}
        masks = self._masks(run)
        waiting: list[tuple[int, dict[str, torch.Tensor]]] = []
        limit = IN_FLIGHT.get(self.device.type, IN_FLIGHT["other"])
        todo = [index for index in range(len(run.selections)) if index not in done]
        bar.step(run.name, 0)
        for index in todo:
            self.sweep.set(run.selections[index].layers)
            waiting.append((index, self.evaluation.measure(self.sweep.everything)))
            if len(waiting) < limit and index != todo[-1]:
                continue
            numbers = [(i, masks[i], self._numbers(m, f"{run.name}, draw {i}")) for i, m in waiting]
            if partial is not None:
                partial.add(numbers)
            else:
                done |= {i: outcome for i, _, outcome in numbers}
            bar.step(run.name, len(waiting))
            waiting = []
        return [done[index] for index in range(len(run.selections))]

    def _write(self, run: design.Run, outcomes: list[results.Outcome], recorder: Recorder) -> None:
        where = self.folder / run.name
        control = run.role == "control"
        rows = results.write_rows(where, outcomes, many=control)
        first = run.selections[0]
        report = Report(
            study=self.study.name,
            form=self.study.form,
            run=run.name,
            role=run.role,
            arm=run.arm,
            control=run.control,
            budget=run.budget,
            model=self.profile.model,
            fingerprint=self.profile.fingerprint,
            reference=self.profile.reference,
            settings=self.settings,
            seed=self.study.seed,
            plan=None if control else Plan.protecting(first, self.study.base, protect=self.study.protect),
            selection=None if control else first,
            law=_law(run) if control else None,
            layers=self.profile.names if control else None,
            labels=list(run.labels) + (["small form"] if self.study.form == "small" else []),
            scores={} if control else {name: total(w) for name, w in outcomes[0].items()},
            draws=self._draws(run, outcomes) if control else [],
            texts=self._texts(),
            rows=rows,
            provenance=recorder.finish({"reference logits recomputed (batches)": self.evaluation.recomputed}),
        )
        results.write_report(where, report)

    def _draws(self, run: design.Run, outcomes: list[results.Outcome]) -> list[Draw]:
        assert run.like is not None
        draws = []
        for index, (selection, text, outcome) in enumerate(
            zip(run.selections, self._masks(run), outcomes, strict=True)
        ):
            mismatch = selection.mismatch
            if mismatch is None:
                mismatch = (selection.parameters - run.like.parameters) / run.like.parameters
            draws.append(
                Draw(
                    index=index,
                    mask=text,
                    layers=len(selection.layers),
                    parameters=selection.parameters,
                    bytes=selection.bytes,
                    mismatch=mismatch,
                    scores={name: total(w) for name, w in outcome.items()},
                )
            )
        return draws

    def _texts(self) -> dict[str, Text]:
        return {name: w.record for name, w in self.windows.items()}


def _law(run: design.Run) -> Law:
    first: Selection = run.selections[0]
    return Law(
        selector=first.selector,
        options=first.options,
        like=run.arm,
        chain=run.chain,
        feasible_subsets=first.feasible_subsets,
        inclusion=first.inclusion,
        single_total=first.single_total,
    )


def _say(text: str) -> None:
    import sys

    print(text, file=sys.stderr, flush=True)
