"""The model of a study on its device, and what is measured of it: selections, and the base once more."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.errors import InputError, RunError
from toolkit.records.profile import PROFILE, Profile
from toolkit.records.study import Study
from toolkit.runs.models import load_model
from toolkit.runs.ranking import kept
from toolkit.runs.ranking.sweep import Sweep
from toolkit.runs.texts.documents import Windows
from toolkit.runs.texts.evaluation import Evaluation, window_scores

if TYPE_CHECKING:
    import torch

IN_FLIGHT = {"cpu": 1, "other": 32}
"""Measurements that may wait on the device before their numbers are fetched and kept."""


@dataclasses.dataclass(frozen=True)
class Again:
    """What was measured otherwise: the outcome, what differed in words, threads, and batches recomputed."""

    outcome: kept.Outcome
    said: str
    threads: int
    recomputed: int


class Bench:
    """A study's model, loaded once, whose layers are switched between measurements.

    Args:
        study: names the model and the two quantizers.
        profile: of the model.
        windows: text → its windows.
        device, dtype: of the computation.

    Raises:
        InputError: the model has other layers than the profile.
        RunError: the model that is built has other weights than its files.
    """

    def __init__(
        self,
        study: Study,
        profile: Profile,
        windows: Mapping[str, Windows],
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
        names = [layer.name for layer in layers_of(model)]
        if names != profile.names:
            raise InputError(
                f"{PROFILE} lists {len(profile)} layers, and the model has {len(names)} (or others): remove "
                "that file from the results folder to have it made anew"
            )
        self.device = device
        self._batch, self._names = study.batch, profile.names
        self._ids = {name: each.ids for name, each in windows.items()}
        self._window = {name: each.record.window for name, each in windows.items()}
        self._sweep = Sweep(model.to(device), names, base=study.base, protect=study.protect, dtype=dtype)
        self._evaluation = Evaluation(self._sweep.model, self._ids, batch=study.batch)

    @property
    def recomputed(self) -> int:
        """Batches whose reference logits did not fit and are recomputed for every measurement."""
        return self._evaluation.recomputed

    def reference(self) -> kept.Outcome:
        """Everything in 16 bit, kept as the reference of what is measured afterwards."""
        self._sweep.set(self._names)
        return self._numbers(self._evaluation.keep_reference(), "16-bit reference")

    def measure(
        self, name: str, selections: Sequence[Sequence[str]], todo: Sequence[int]
    ) -> Iterator[list[tuple[int, kept.Outcome]]]:
        """Outcomes of the selections whose indexes are asked for, a few at a time, so that the device never waits.

        Args:
            name: of the run, for errors.
            selections: the protected layers of each.
        """
        waiting: list[tuple[int, dict[str, torch.Tensor]]] = []
        limit = IN_FLIGHT.get(self.device.type, IN_FLIGHT["other"])
        for index in todo:
            self._sweep.set(selections[index])
            waiting.append((index, self._evaluation.measure(self._sweep.everything)))
            if len(waiting) == limit or index == todo[-1]:
                yield [(i, self._numbers(measured, f"{name}, draw {i}")) for i, measured in waiting]
                waiting = []

    def again(self, protected: Sequence[str]) -> Again:
        """A selection measured otherwise: another batch size, on another number of threads.

        Half the batch (twice where it is 1), and one thread fewer (one more where there is 1); what differs from
        the first measurement is then the rounding of sums taken in another order. Its own 16-bit reference is made
        in the same way.
        """
        import torch

        batch = min(self._batch, max(len(ids) for ids in self._ids.values()))
        other = batch // 2 if batch > 1 else 2
        threads = torch.get_num_threads()
        fewer = threads - 1 if threads > 1 else 2
        with _threads(torch.set_num_threads, fewer, threads):
            evaluation = Evaluation(self._sweep.model, self._ids, batch=other)
            self._sweep.set(self._names)
            evaluation.keep_reference()
            self._sweep.set(protected)
            found = self._numbers(evaluation.measure(self._sweep.everything), "the base, measured again")
        said = f"measured with batch {other} in place of {batch}, and {fewer} threads in place of {threads}"
        return Again(found, said, fewer, evaluation.recomputed)

    def _numbers(self, measured: dict[str, torch.Tensor], what: str) -> kept.Outcome:
        try:
            return window_scores(measured, self._window)
        except RunError as error:
            raise RunError(f"{what}: {error}") from None


@contextlib.contextmanager
def _threads(use: Callable[[int], None], count: int, before: int) -> Iterator[None]:
    """So many threads for the length of a block."""
    use(count)
    try:
        yield
    finally:
        use(before)
