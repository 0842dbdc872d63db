"""How fast the kernels are on a GPU, beside a copy by PyTorch of as many bytes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import torch

from toolkit_plugins.dataflows.pact.kernels import gated, norm, quantize, unpack

FLUSHED = 256 * 2**20
"""Bytes written between two launches, more than any cache holds."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """One kernel on one shape.

    Attributes:
        name: of what was computed.
        seconds: median of a launch, with cold caches.
        bytes: read and written, each tensor once.
        copy_seconds: of `Tensor.copy_`, as many bytes in all.
    """

    name: str
    seconds: float
    bytes: int
    copy_seconds: float

    @property
    def gigabytes(self) -> float:
        """GB/s."""
        return self.bytes / self.seconds / 1e9

    @property
    def share(self) -> float:
        """Of the copy's bandwidth."""
        return self.copy_seconds / self.seconds


def measure(count: int, width: int, dtype: torch.dtype = torch.bfloat16, repeats: int = 30) -> list[Speed]:
    """Every kernel on `count` rows of `width` values, on the current CUDA device.

    Raises:
        RuntimeError: PyTorch finds no CUDA device.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    speeds = []
    for name, (call, tensors) in _calls(count, width, dtype, device).items():
        given = call()
        made = given if isinstance(given, tuple) else (given,)
        moved = sum(_size(each) for each in (*tensors, *made))
        half = torch.empty(max(1, moved // 2), dtype=torch.uint8, device=device)
        into = torch.empty_like(half)
        copying = _seconds(lambda a=into, b=half: a.copy_(b), flush, repeats)
        speeds.append(Speed(name, _seconds(call, flush, repeats), moved, copying))
    return speeds


def _calls(count: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Callable, tuple]]:
    """Name → (what is called, what it reads)."""
    generator = torch.Generator(device).manual_seed(0)
    x, gradient = (torch.randn(count, width, generator=generator, device=device).to(dtype) for _ in range(2))
    gate, up = torch.randn(count, 2 * width, generator=generator, device=device).to(dtype).chunk(2, -1)
    weight = torch.ones(width, dtype=dtype, device=device)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    y, rows, rstd = norm.norm(x, weight, 1e-6, dtype, rounded=True)
    _, _, of_gate, of_up = gated.gated(gate, up, dtype, keep=True, round_first=False)
    return {
        "rows": (lambda: quantize.quantize(x), (x,)),
        "rounded values": (lambda: quantize.quantize(x, codes=False, dtype=dtype), (x,)),
        "stochastically rounded values": (lambda: quantize.quantize(x, seed=seed, codes=False, dtype=dtype), (x,)),
        "unpacked rows": (lambda: unpack.unpack(rows, dtype), (rows,)),
        "norm": (lambda: norm.norm(x, weight, 1e-6, dtype, rounded=True), (x, weight)),
        "norm's gradient, from rows": (
            lambda: norm.norm_gradient(gradient, rows, weight, rstd),
            (gradient, rows, weight, rstd),
        ),
        "norm's gradient, from values": (
            lambda: norm.norm_gradient(gradient, y, weight, rstd),
            (gradient, y, weight, rstd),
        ),
        "gated": (lambda: gated.gated(gate, up, dtype, keep=False, round_first=False), (gate, up)),
        "gated, gate and up kept": (lambda: gated.gated(gate, up, dtype, keep=True, round_first=False), (gate, up)),
        "gated's gradients": (lambda: gated.gated_gradient(gradient, of_gate, of_up), (gradient, of_gate, of_up)),
    }


def _size(given: object) -> int:
    """Bytes of a tensor, of rows, or of nothing."""
    return 0 if given is None else given.nbytes


def _seconds(call: Callable[[], object], flush: torch.Tensor, repeats: int) -> float:
    """Median over launches; the flush before each lets the host run ahead, so that launching is not timed."""
    for _ in range(3):
        call()
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3
