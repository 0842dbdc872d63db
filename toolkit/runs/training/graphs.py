"""Forward and backward of a micro-batch as CUDA graphs, one a shape.

A small model's step is thousands of short kernels, and launching them one by one from Python takes many times longer
than computing them. A graph launches them all at once. The first micro-batch of a shape is computed plainly, the
second is captured, and it and all later ones are replayed on the same kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Work = Callable[[Batch, torch.Tensor], torch.Tensor]
"""(micro-batch, target tokens of the step) → its loss, detached; gradients are added to the parameters'."""


@dataclasses.dataclass(frozen=True)
class _Captured:
    """One shape's graph, what it reads, and where it leaves the loss."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    count: torch.Tensor
    loss: torch.Tensor


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all runs of a process: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has seen."""
    return torch.cuda.Stream(device)


class Graphs:
    """Replays micro-batches whose shapes come again; what cannot be captured is computed plainly.

    The shapes' graphs share one memory pool: each replay is used up before the next one begins, and nothing but the
    loss, which is copied, and the gradients, which lie outside, is read afterwards.

    Args:
        work: what is captured; it must not wait for the device.
        trained: parameters; their gradients get fixed places.

    Attributes:
        replayed: micro-batches so far.
        failed: why nothing is captured any more, or None.
    """

    def __init__(self, work: Work, trained: Sequence[nn.Parameter]) -> None:
        self._work, self._trained = work, list(trained)
        self._gradients = [torch.zeros_like(p) for p in self._trained]
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._device = self._gradients[0].device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), _stream(self._device)
        self.replayed = 0
        self.failed: str | None = None

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """A stream of its own, which can be captured as the default one cannot; work before and after is waited for."""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    def __call__(self, batch: Batch, count: float) -> torch.Tensor:
        """The loss of one micro-batch (on the device, not to be kept beyond the next call); gradients are added."""
        key = tuple(n for name in sorted(batch) for n in batch[name].shape)
        self._bind()
        if key in self._seen and key not in self._captured and self.failed is None:
            self._capture(key, batch, count)
        captured = self._captured.get(key)
        if captured is None:
            self._seen.add(key)
            return self._work(batch, torch.full((), float(count), device=self._device))
        for name, fixed in captured.batch.items():
            fixed.copy_(batch[name], non_blocking=True)
        captured.count.fill_(float(count))
        captured.graph.replay()
        self.replayed += 1
        return captured.loss

    def _bind(self) -> None:
        """Gradients that were given up after a step start anew in their places, at zero."""
        if self._trained[0].grad is None:
            torch._foreach_zero_(self._gradients)
            for parameter, gradient in zip(self._trained, self._gradients, strict=True):
                parameter.grad = gradient

    def _capture(self, key: tuple[int, ...], batch: Batch, count: float) -> None:
        fixed = {name: tensor.clone() for name, tensor in batch.items()}
        number = torch.full((), float(count), device=self._device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                loss = self._work(fixed, number)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            self.failed = " ".join(str(error).split())[:200]
            self._captured.clear()
            return
        self._captured[key] = _Captured(graph, fixed, number, loss)


def refused(levers_checkpointing: bool, device: torch.device, processes: int, scaled: bool) -> str | None:
    """Why a run cannot be captured, or None."""
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device; this one is {device.type}"
    if levers_checkpointing:
        return "checkpointing asks for the state of the random numbers in every step, which cannot be captured"
    if processes > 1:
        return "several processes exchange gradients in every step"
    if scaled:
        return "the loss scale is read in every step"
    return None
