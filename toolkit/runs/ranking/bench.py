"""The model of a study on its device, and what is measured of it: selections, and the base once more."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.records.profile import Profile
from toolkit.records.study import Study
from toolkit.runs.models import load_profiled
from toolkit.runs.ranking import kept
from toolkit.runs.ranking.sweep import Sweep
from toolkit.runs.texts.documents import Windows
from toolkit.runs.texts.evaluation import Evaluation

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
        model, layers = load_profiled(study.model, profile)
        self.device = device
        self._batch, self._names = study.batch, list(layers)
        self._ids = {name: each.ids for name, each in windows.items()}
        self._sweep = Sweep(model.to(device), self._names, base=study.base, protect=study.protect, dtype=dtype)
        self._evaluation = Evaluation(self._sweep.model, self._ids, batch=study.batch)

    @property
    def recomputed(self) -> int:
        """Batches whose reference logits did not fit and are recomputed for every measurement."""
        return self._evaluation.recomputed

    def reference(self) -> kept.Outcome:
        """Everything in 16 bit, kept as the reference of what is measured afterwards."""
        self._sweep.set(self._names)
        return self._evaluation.scores(self._evaluation.keep_reference(), "16-bit reference")

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
                yield [(i, self._evaluation.scores(measured, f"{name}, draw {i}")) for i, measured in waiting]
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
            found = evaluation.scores(evaluation.measure(self._sweep.everything), "the base, measured again")
        said = f"measured with batch {other} in place of {batch}, and {fewer} threads in place of {threads}"
        return Again(found, said, fewer, evaluation.recomputed)


@contextlib.contextmanager
def _threads(use: Callable[[int], None], count: int, before: int) -> Iterator[None]:
    """So many threads for the length of a block."""
    use(count)
    try:
        yield
    finally:
        use(before)
