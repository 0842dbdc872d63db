"""The model of a study of starts on its device: its 16-bit state, started states, and what is measured of both."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, RunError
from toolkit.records.initialization import AS_THEY_ARE, Initialization
from toolkit.records.profile import PROFILE, Profile
from toolkit.registry import registry
from toolkit.runs.initialization.inputs import rounding, second_moments
from toolkit.runs.models import cast, load_model
from toolkit.runs.texts.documents import Windows
from toolkit.runs.texts.evaluation import Evaluation, WindowScore, window_scores

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.weights.layers import Layer

Outcome = dict[str, dict[str, list[WindowScore]]]
"""Quantizer that inputs are rounded by → text → its windows' scores."""


class Bench:
    """A study's model, loaded once; its layers' weights are put in and taken out by pointer.

    Args:
        study: names the model and the roundings of inputs.
        profile: of the model.
        windows: text → its windows; `calibration`: those of the calibration text.
        device, dtype: of the computation.

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
    ) -> None:
        from toolkit.weights.layers import layers_of
        from toolkit.weights.profiling import fingerprint_of

        model = load_model(study.model, device="cpu")
        found = fingerprint_of(model)
        if found != profile.fingerprint:
            raise RunError(
                f"the model that transformers builds from {study.model} has other weights ({found[:12]}) than its "
                f"files ({profile.fingerprint[:12]})"
            )
        self.layers = {layer.name: layer for layer in layers_of(model)}
        if list(self.layers) != profile.names:
            raise InputError(
                f"{PROFILE} lists {len(profile)} layers, and the model has {len(self.layers)} (or others): remove "
                "that file from the results folder to have it made anew"
            )
        self.model, self.device, self.dtype = model.to(device), device, dtype
        self.dense = {name: layer.weight().clone() for name, layer in self.layers.items()}
        cast(self.model, dtype)
        self._keys = list(study.activations)
        self._window = {name: each.record.window for name, each in windows.items()}
        self._sixteen = {name: self._stored(name, weight) for name, weight in self.dense.items()}
        self._started: dict[str, nn.Parameter] | None = None
        self._put(self._sixteen)
        self._evaluation = Evaluation(self.model, {n: w.ids for n, w in windows.items()}, batch=study.batch)
        self.moments: Mapping[str, torch.Tensor] = {}
        if calibration is not None:
            self.moments = second_moments(self.model, list(self.layers.values()), calibration.ids, batch=study.batch)

    @property
    def recomputed(self) -> int:
        """Batches whose reference logits did not fit and are recomputed for every measurement."""
        return self._evaluation.recomputed

    def reference(self) -> Outcome:
        """The 16-bit model, its inputs as they are and rounded; the former is what is measured against afterwards."""
        self._started = None
        self._put(self._sixteen)
        kept = self._numbers(self._evaluation.keep_reference(), "16-bit reference")
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
            inputs = contextlib.nullcontext
            if key != AS_THEY_ARE:
                inputs = functools.partial(rounding, layers, registry.make("quantizer", key))
            with contextlib.ExitStack() as hooks:
                hooks.enter_context(inputs())
                as_reference = functools.partial(self._as_reference, hooks, inputs)
                found[key] = self._numbers(self._evaluation.measure(as_reference), f"{what}, inputs {key}")
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

    def _stored(self, name: str, weight: torch.Tensor) -> nn.Parameter:
        from torch import nn

        layer = self.layers[name]
        stored = weight.to(device=self.device, dtype=self.dtype)
        return nn.Parameter((stored.mT if layer.transposed else stored).contiguous(), requires_grad=False)

    def _put(self, weights: Mapping[str, nn.Parameter]) -> None:
        for name, weight in weights.items():
            layer: Layer = self.layers[name]
            if layer.index is None:  # a pointer; other owners of the old parameter keep it
                layer.module._parameters[layer.parameter] = weight
            else:  # one slice of a stacked parameter: its values are written over
                layer.module._parameters[layer.parameter].data[layer.index] = weight.data

    def _numbers(self, measured: dict[str, torch.Tensor], what: str) -> dict[str, list[WindowScore]]:
        try:
            return window_scores(measured, self._window)
        except RunError as error:
            raise RunError(f"{what}: {error}") from None
