"""Block scales in the order in which Blackwell's matrix instruction reads them."""

from __future__ import annotations

import torch

ROWS, COLUMNS, GROUP = 128, 4, 32


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Scales (rows, blocks) padded with zeros to tiles of 128 × 4, each tile as 32 rows of 4 × 4; flat.

        tile (R, C), row r, column c  →  ((R·tiles a row + C)·32 + r mod 32)·16 + ⌊r/32⌋·4 + c

    What cuBLAS calls the 1D block-scaling layout, and PyTorch SWIZZLE_32_4_4.
    """
    rows, blocks = scales.shape
    bits = torch.nn.functional.pad(scales.view(torch.uint8), (0, -blocks % COLUMNS, 0, -rows % ROWS))
    tiles = bits.view(len(bits) // ROWS, ROWS // GROUP, GROUP, bits.shape[1] // COLUMNS, COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)
