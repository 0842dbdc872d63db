"""Where a step's time goes: one cycle under torch's profiler, outside the samples.

On a GPU the kernels' own times are taken from the profile, and the wall time of a step from the samples, which no
profiler slowed; what is left of it is time in which the device waits for the host to launch work. On a CPU there
is no such gap to see: shares are of the operators' own times.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from toolkit.runs.timing.cycling import Driver

GAP = "waiting for the host"

KINDS = (
    ("optimizer", r"adam|multi_tensor_apply|_fused_|_foreach_"),
    ("attention", r"flash|fmha|attention|sdpa|softmax_warp"),
    ("dequantization", r"dequant|gemv_4bit|gemm_4bit|decode|unpack|quantize"),
    ("matrix products", r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|aten::(mm|addmm|bmm|baddbmm|matmul|linear)\b"),
    ("copies and casts", r"memcpy|memset|copy|aten::(to|_to_copy|clone|contiguous|fill_|zero_)\b"),
    ("embedding, loss and sums", r"softmax|nll|cross_entropy|embedding|index|gather|scatter|reduce|sum|mean|norm"),
)
"""Kind → what its kernels are called, the first that fits; everything else is elementwise work, mostly."""

REST = "elementwise and the rest"


def kind_of(name: str) -> str:
    """The kind of a kernel or operator, by its name."""
    lower = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lower)), REST)


def union(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of (start, end) spans: kernels of several streams may overlap."""
    total, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def shares(device: torch.device, driver: Driver, step_seconds: float) -> dict[str, float]:
    """Share of a step's wall time by kind of work, summing to 1; `step_seconds` is the samples' median."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # its start and stop are no news
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=False)
    driver.run(cycles=1, begin=profiler.start, end=profiler.stop)
    if not cuda:
        spent: dict[str, float] = defaultdict(float)
        for event in profiler.key_averages():
            if event.self_cpu_time_total > 0 and not event.key.startswith(("ProfilerStep", "profiler")):
                spent[kind_of(event.key)] += event.self_cpu_time_total
        total = sum(spent.values())
        return _rounded({kind: value / total for kind, value in spent.items()} if total else {})
    spans, spent = [], defaultdict(float)
    for name, start, length in _kernels(profiler):
        spans.append((start, start + length))
        spent[kind_of(name)] += length
    if not spans:
        return {}
    wall = step_seconds * 1e9 * driver.steps
    busy = min(union(spans), wall)
    scale = busy / sum(spent.values()) / wall
    return _rounded({kind: value * scale for kind, value in spent.items()} | {GAP: 1 - busy / wall})


def _kernels(profiler: torch.profiler.profile) -> list[tuple[str, int, int]]:
    """Name, start and length (ns) of everything that ran on the device."""
    from torch.autograd import DeviceType

    inner = profiler.profiler
    results = getattr(inner, "kineto_results", None)
    if results is not None:
        raw = [e for e in results.events() if e.device_type() == DeviceType.CUDA]
        return [(e.name(), e.start_ns(), e.duration_ns()) for e in raw if not _annotation(e)]
    return [
        (e.name, int(e.time_range.start * 1000), int(e.time_range.elapsed_us() * 1000))
        for e in profiler.events()
        if e.device_type == DeviceType.CUDA
    ]


def _annotation(event: Any) -> bool:
    """Whether an event is a name for a stretch of time, such as an optimizer's step, and nothing that ran."""
    marked = getattr(event, "is_user_annotation", None)
    return (marked is not None and marked()) or event.name().startswith(("Optimizer.", "ProfilerStep"))


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {kind: round(share, 4) for kind, share in sorted(found.items(), key=lambda item: -item[1])}
