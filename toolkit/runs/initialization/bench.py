"""The model of a study of starts on its device: its 16-bit state, started states, and what is measured of both."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.records.initialization import AS_THEY_ARE, Initialization
from toolkit.records.profile import Profile
from toolkit.registry import registry
from toolkit.runs.initialization.inputs import rounding, second_moments
from toolkit.runs.models import cast, load_profiled
from toolkit.runs.progress import Progress
from toolkit.runs.texts.documents import Windows
from toolkit.runs.texts.evaluation import Evaluation, WindowScore

if TYPE_CHECKING:
    import torch

Outcome = dict[str, dict[str, list[WindowScore]]]
"""Quantizer that inputs are rounded by → text → its windows' scores."""


class Bench:
    """A study's model, loaded once; its layers' weights are put in and taken out by pointer.

    Args:
        study: names the model and the roundings of inputs.
        profile: of the model.
        windows: text → its windows; `calibration`: those of the calibration text.
        device, dtype: of the computation.
        bar: told of every batch of windows; `steps` in all.

    Attributes:
        dense: layer name → W (out, in) as the checkpoint stores it, on the device.
        moments: layer name → R of the 16-bit model's inputs on the calibration text; empty without one.

    Raises:
        InputError: the model has other layers than the profile.
        RunError: the model that is built has other weights than its files.
    """

    def __init__(
        self,
        study: Initialization,
        profile: Profile,
        windows: Mapping[str, Windows],
        calibration: Windows | None,
        device: torch.device,
        dtype: torch.dtype,
        bar: Progress,
    ) -> None:
        bar.begin("loading the model")
        model, self.layers = load_profiled(study.model, profile)
        self.model, self.device, self.dtype = model.to(device), device, dtype
        self.dense = {name: layer.weight().clone() for name, layer in self.layers.items()}
        cast(self.model, dtype)
        self._keys = list(study.activations)
        self._sixteen = {name: self._stored(name, weight) for name, weight in self.dense.items()}
        self._started: dict[str, torch.Tensor] | None = None
        self._put(self._sixteen)
        self._bar, self._doing = bar, ""
        self._evaluation = Evaluation(
            self.model, {n: w.ids for n, w in windows.items()}, batch=study.batch, scored=self._scored
        )
        self.moments: Mapping[str, torch.Tensor] = {}
        if calibration is not None:
            doing = "moments of the 16-bit model's inputs on the calibration text"
            bar.begin(doing)
            self.moments = second_moments(
                self.model,
                list(self.layers.values()),
                calibration.ids,
                batch=study.batch,
                counted=functools.partial(bar.step, doing),
            )

    @staticmethod
    def steps(study: Initialization, windows: Mapping[str, Windows], calibration: Windows | None) -> tuple[int, int]:
        """Batches before the first run (moments and the 16-bit reference), and batches of one run's scores."""
        once = sum(_batches(each, study.batch) for each in windows.values())
        rounded = sum(key != AS_THEY_ARE for key in study.activations)
        moments = 0 if calibration is None else _batches(calibration, study.batch)
        return moments + once * (1 + rounded), once * len(study.activations)

    @property
    def recomputed(self) -> int:
        """Batches whose reference logits did not fit and are recomputed for every measurement."""
        return self._evaluation.recomputed

    def reference(self) -> Outcome:
        """The 16-bit model, its inputs as they are and rounded; the former is what is measured against afterwards."""
        self._started = None
        self._put(self._sixteen)
        self._doing = "scoring the 16-bit model"
        self._bar.begin(self._doing)
        kept = self._evaluation.scores(self._evaluation.keep_reference(), "16-bit reference")
        measured = self._measure("16-bit reference", list(self.layers), [k for k in self._keys if k != AS_THEY_ARE])
        return {key: measured.get(key, kept) for key in self._keys}

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Give one layer the weight (out, in) that it starts with, rounded once to the compute dtype."""
        if self._started is None:
            self._started = dict(self._sixteen)
        self._started[name] = self._stored(name, weight)

    def measure(self, what: str, rounded: list[str]) -> Outcome:
        """Score the model with the weights that were put, and forget them.

        Args:
            what: for errors.
            rounded: layers whose inputs are rounded, where inputs are.
        """
        assert self._started is not None
        try:
            self._put(self._started)
            return self._measure(what, rounded, self._keys)
        finally:
            self._started = None
            self._put(self._sixteen)

    def _measure(self, what: str, rounded: list[str], keys: list[str]) -> Outcome:
        found: Outcome = {}
        layers = [self.layers[name] for name in rounded]
        for key in keys:
            self._doing = f"scoring {what}" + (f", inputs {key}" if key != AS_THEY_ARE else "")
            self._bar.step(self._doing, 0)
            inputs = contextlib.nullcontext
            if key != AS_THEY_ARE:
                inputs = functools.partial(rounding, layers, registry.make("quantizer", key))
            with contextlib.ExitStack() as hooks:
                hooks.enter_context(inputs())
                as_reference = functools.partial(self._as_reference, hooks, inputs)
                found[key] = self._evaluation.scores(self._evaluation.measure(as_reference), f"{what}, inputs {key}")
        return found

    @contextlib.contextmanager
    def _as_reference(self, hooks: contextlib.ExitStack, inputs: Callable[[], Any]) -> Iterator[None]:
        """The 16-bit state with inputs as they are, for the length of a block."""
        hooks.close()
        self._put(self._sixteen)
        try:
            yield
        finally:
            self._put(self._started or self._sixteen)
            hooks.enter_context(inputs())

    def _scored(self) -> None:
        self._bar.step(self._doing)

    def _stored(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return self.layers[name].stored(weight.to(device=self.device, dtype=self.dtype))

    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            self.layers[name].put(weight)


def _batches(windows: Windows, batch: int) -> int:
    return -(-len(windows.ids) // batch)
