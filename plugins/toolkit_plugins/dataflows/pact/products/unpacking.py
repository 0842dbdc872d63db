"""A packed NVFP4 weight as a dense matrix without its tensor scale."""

from __future__ import annotations

import torch

from toolkit.interfaces import Packed
from toolkit_plugins.dataflows.pact.products.scratch import scratch
from toolkit_plugins.quantizers.e2m1 import MAGNITUDES

BLOCK = 16


def unpacked(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """U = s·e2m1(code) (rows, columns), W = g·U, in memory that the next call overwrites (`scratch`).

    A value has at most six significant bits and lies between 2⁻¹⁰ and 2688 or is zero: bfloat16, float16 and float32
    hold it exactly.
    """
    codes, scales = packed.tensors["codes"], packed.tensors["scales"]
    if codes.device.type != "cuda":
        return unpacked_plainly(codes, scales, packed.shape).to(dtype)
    from toolkit_plugins.dataflows.pact.products.unpack_kernel import unpack_into

    return unpack_into(scratch(tuple(packed.shape), dtype, codes.device), codes, scales)


def unpacked_plainly(codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The same in plain tensor operations, float32."""
    rows, columns = shape
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).view(-1)[: rows * columns]
    levels = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], device=codes.device)
    wide = scales.float().repeat_interleave(BLOCK, dim=1)[:, :columns]
    return levels[pairs.int()].view(rows, columns) * wide
