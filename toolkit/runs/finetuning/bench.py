"""One run of a fine-tuning study: built, trained, scored, and its report written; and what is kept between runs.

A run that fails for its own reasons (the device has too little memory, a loss is not finite) leaves a report that
says so and at which step, and the study goes on. What fails for everyone's (a full disk, data that do not fit) ends
the study; what was finished is kept.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.errors import InputError, RunError
from toolkit.records.trained import Trained
from toolkit.registry import registry
from toolkit.runs import starts
from toolkit.runs.finetuning.attempt import ADAPTER, DIED, MEMORY, SCORING, Attempt, Planned, Setup
from toolkit.runs.finetuning.data import doubts, encoded, record
from toolkit.runs.tasks import Encoded, Evaluated, check_task, evaluate, padding

if TYPE_CHECKING:
    from torch import nn

    from toolkit.runs.training import Outcome

KEPT = 8 * 2**30
"""Bytes of the largest dense model that is kept in memory between runs; a larger one is read again for each."""


class Stopped(Exception):
    """The run was asked to stop, and goes on where it stopped when the same command is given again."""


class Crowded(Exception):
    """The device's memory was used up while other runs shared it: this run is to be tried again alone."""


class Bench:
    """Runs runs, one after another, in this process.

    Args:
        setup: what they share.
        progress: show each run's steps.
        writes: whether this process writes (of several that train one model, the first does).
    """

    def __init__(self, setup: Setup, *, progress: bool = False, writes: bool = True) -> None:
        from toolkit.runs.models import choose_device, compute_dtype, load_tokenizer
        from toolkit.runs.provenance import Recorder

        # plug-ins before PEFT, which imports their libraries: what a library says on import is theirs to leave out
        registry.of_kind("quantizer")
        self.setup, self._progress, self._writes = setup, progress, writes
        self.device = choose_device(setup.device)
        self.dtype = compute_dtype(self.device, setup.dtype)
        self.tokenizer = load_tokenizer(setup.model)
        self._recorder = Recorder(
            setup.home, self.device, self.dtype, ignore=[setup.folder], fallbacks=setup.profile.fallbacks
        )
        self._dense: dict[str, nn.Module] = {}
        self._frozen = False
        self._encoded: dict[tuple[str, int], tuple[list[Encoded], int]] = {}

    def do(self, planned: Planned, *, alone: bool = True) -> Trained | None:
        """Do one run and write its report; None where another process writes it.

        Args:
            alone: whether the device's memory is this run's; where it is not, a lack of it is no verdict.

        Raises:
            Stopped: the run was stopped by its pacing.
            Crowded: the memory was used up, and others shared it.
            InputError, RunError: what ends the whole study.
        """
        from toolkit.runs.provenance import out_of_memory

        run, where = planned.run, self.setup.folder / planned.run.name
        scored = self.setup.rows[run.task]
        split = scored.tune if run.role == "tune" else scored.test
        assert split is not None
        self._free()
        self._recorder.start()
        attempt = Attempt(planned, where, split)
        try:
            self._attempt(attempt)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if not alone:
                raise Crowded(str(error)) from error
            attempt.ended(MEMORY, error, attempt.doing)
        finally:
            self._free()
        return self._written(attempt)

    def _attempt(self, attempt: Attempt) -> None:
        """Build, train and score; what is reached is kept in the attempt."""
        from transformers import set_seed

        run, levers = attempt.planned.run, attempt.planned.run.levers
        data, cut = self._rows(run.task, levers.length)
        attempt.train = record(self.setup.rows[run.task].train, cut, shortened=sum(row.shortened > 0 for row in data))
        attempt.doing = "building the model"
        set_seed(run.seeds.adapter)
        model = self._built(attempt.planned)
        attempt.dataflow = getattr(model, "dataflow", None)
        check_task(model, self.setup.rows[run.task].task, levers.length)  # before the time of a training is spent
        self._recorder.mark()
        attempt.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if run.trains:
            attempt.doing = "training"
            outcome = self._trained(model, data, attempt)
            attempt.course, attempt.flags = outcome.course, [*outcome.flags, *doubts(attempt.train)]
            attempt.memory = self._recorder.memory()
            if not outcome.finished:
                if outcome.stopped:
                    raise Stopped(run.name)
                fatal = [flag for flag in outcome.flags if flag.severity == "fatal"]
                if any(flag.check == MEMORY for flag in fatal):
                    raise MemoryError(fatal[0].reason)
                return
        if self._writes:
            attempt.doing = "scoring"
            try:
                attempt.evaluated = self._scored(model, attempt)
            except RunError as error:  # a likelihood that is not finite: this run's own
                attempt.ended(SCORING, error, attempt.doing)
                return
            attempt.memory = attempt.memory | _named("scoring", self._recorder.memory(), attempt.memory)
            if self.setup.keep_adapters and run.trains:
                from toolkit.runs import adapters

                adapters.save(model, attempt.where / ADAPTER)
                attempt.adapter = ADAPTER
        attempt.fallbacks = _guarded(model) | starts.counts(model.starts)

    def _built(self, planned: Planned) -> nn.Module:
        from toolkit.runs.building import build

        run = planned.run
        return build(
            self._model(run.levers.attention),
            planned.plan,
            device=str(self.device),
            dtype=self.dtype,
            seed=run.seeds.adapter,
            attention=run.levers.attention,
            start=planned.start,
        )

    def load(self) -> None:
        """Read the dense model now rather than at the first run."""
        self._model()

    def _model(self, attention: str = "sdpa") -> nn.Module:
        """A dense model of its own: read once and copied, where it is not too large to be kept."""
        from toolkit.runs.models import load_model

        if "model" in self._dense:
            return copy.deepcopy(self._dense["model"])
        model = load_model(self.setup.model, device="cpu")
        if sum(p.numel() * p.element_size() for p in model.parameters()) > KEPT:
            return model
        self._dense["model"] = model
        return copy.deepcopy(model)

    def _rows(self, task: str, length: int) -> tuple[list[Encoded], int]:
        key = (task, length)
        if key not in self._encoded:
            try:
                self._encoded[key] = encoded(self.tokenizer, self.setup.rows[task].train, length)
            except InputError as error:
                raise InputError(f"task {task!r}: {error}") from None
        return self._encoded[key]

    def _trained(self, model: nn.Module, data: Sequence[Encoded], attempt: Attempt) -> Outcome:
        from toolkit.runs.training import train

        run = attempt.planned.run
        return train(
            model,
            data,
            run.levers,
            run.seeds,
            folder=attempt.where,
            pad=padding(self.tokenizer),
            pacing=self.setup.pacing,
            report_to=self.setup.report_to,
            progress=self._progress,
            name=run.name,
        )

    def _scored(self, model: nn.Module, attempt: Attempt) -> Evaluated:
        run, rows = attempt.planned.run, self.setup.rows[attempt.planned.run.task]
        model.eval()
        with self._autocast(model):
            return evaluate(
                model,
                self.tokenizer,
                rows.taught if run.role == "tune" else rows.task,
                attempt.split,
                length=run.levers.length,
                batch=self.setup.batch,
            )

    @contextlib.contextmanager
    def _autocast(self, model: nn.Module) -> Iterator[None]:
        """Scoring computes in the dtype that training computes in."""
        import torch

        from toolkit.runs import adapters

        if self.dtype == torch.float32:
            yield
            return
        with torch.autocast(self.device.type, dtype=self.dtype), adapters.uncast(model):
            yield

    def _written(self, attempt: Attempt) -> Trained | None:
        if not self._writes:
            return None
        provenance = self._recorder.finish(attempt.fallbacks, memory=attempt.memory or None)
        return attempt.write(self.setup, provenance)

    def died(self, planned: Planned, reason: str) -> Trained | None:
        """The report of a run whose process was ended from outside."""
        scored = self.setup.rows[planned.run.task]
        split = (scored.tune if planned.run.role == "tune" else scored.test) or scored.test
        self._recorder.start()
        attempt = Attempt(planned, self.setup.folder / planned.run.name, split)
        attempt.ended(DIED, reason, None)
        return self._written(attempt)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._frozen:
            gc.unfreeze()

    def _free(self) -> None:
        """Give back what the run held: the next one's memory is its own.

        A full collection looks at all that the libraries hold, most of a second, several times a run; what is there
        after the first run stays, and is passed over from then on.
        """
        import torch

        gc.collect()
        if self._dense and not self._frozen:
            gc.freeze()
            self._frozen = True
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_clearCublasWorkspaces()  # made anew when asked for; else a first run's base is smaller
                torch.cuda.empty_cache()


def _named(prefix: str, memory: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Peaks under another name; as they are, where nothing was measured before."""
    if not before:
        return dict(memory)
    return {f"{prefix}_{key}": value for key, value in memory.items() if key.startswith("peak")}


def _guarded(model: nn.Module) -> dict[str, int]:
    """What the range guards counted."""
    from toolkit.runs import guard

    return guard.totals(model)
