"""Precision that this process has given away, taken back for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 matrices in float32, whatever shorter format (TF32) this process lets them be computed in.

    Also a decorator. A fit in TF32 would err by a thousandth of what it fits, and report a residual that is not so.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
