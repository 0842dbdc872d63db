"""A packed NVFP4 weight whose rows begin at a byte of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.interfaces import Packed
from toolkit_plugins.dataflows.pact.products.factors import kept

if TYPE_CHECKING:
    from torch import nn

BLOCK = 16


def aligned(layer: nn.Module, name: str, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 (rows, 8·⌈K/16⌉), scales E4M3 (rows, ⌈K/16⌉)); what lies beyond K holds the code of zero.

    The weight's own memory where K is a multiple of 16, else a copy that is kept with the layer.
    """
    codes, scales = packed.tensors["codes"], packed.tensors["scales"]
    rows, columns = packed.shape
    if columns % BLOCK == 0:
        return codes.view(rows, -1), scales
    return kept(layer, f"rows of {name}", packed, lambda: (_padded(codes, rows, columns), scales))


def _padded(codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    flat = torch.stack([codes & 15, codes >> 4], dim=-1).view(-1)[: rows * columns]
    whole = torch.nn.functional.pad(flat.view(rows, columns), (0, -columns % BLOCK))
    return whole[:, ::2] | whole[:, 1::2] << 4
