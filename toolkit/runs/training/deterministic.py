"""Deterministic kernels by the lever."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS is deterministic with a workspace of fixed size alone; it reads this at its first product."""


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Deterministic kernels only, inside; afterwards as it was."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ[WORKSPACE]
