"""Peak memory in a pass of its own: one arm alone on the device, whole steps at the longest batch."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from toolkit.records.session import Memory

if TYPE_CHECKING:
    import torch

STEPS = 2
"""Optimizer steps of the pass: in the second the optimizer's state is there during forward and backward."""


def measure(device: torch.device, build: Callable[[], Any], train: Callable[[Any], Any]) -> Memory:
    """Base: after `build` and before the first step. Peak: over `train(built)`, the base included. In bytes.

    On a GPU allocated are the tensors, and reserved what PyTorch's allocator holds for them, both without the CUDA
    context. On a CPU all four are resident sizes of the process, the interpreter and its libraries included.
    """
    from toolkit.runs.provenance import peak_memory, reset_memory

    free(device)
    built = build()
    free(device)  # what building needed and gave back
    base = reset_memory(device)
    train(built)
    peak = peak_memory(device)
    del built
    free(device)
    return Memory(
        base_allocated=base.get("base_allocated", base.get("base_resident", 0)),
        base_reserved=base.get("base_reserved", base.get("base_resident", 0)),
        peak_allocated=peak.get("peak_allocated", peak.get("peak_resident", 0)),
        peak_reserved=peak.get("peak_reserved", peak.get("peak_resident", 0)),
    )


def free(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:  # else the first arm's workspace stands in the base of every later one
            clear()
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed pages, and they count as resident
    if trim is not None:
        trim(0)


def room(device: torch.device) -> int:
    """Bytes that models may fill beside what is there already."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def fits(memories: list[Memory], bases: int, space: int, share: float = 0.85) -> bool:
    """Whether all models fit at once, and beside them the most that one of them needs for a step.

    The sum of the bases plus the largest (peak − base), both reserved, within `share` of the room. On a CPU the
    first base (`bases` bytes) is the process's own and counts once.
    """
    resident = sum(m.base_reserved - bases for m in memories)
    step = max(m.peak_reserved - m.base_reserved for m in memories)
    return resident + step <= share * space
