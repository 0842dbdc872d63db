"""How many rows and warps a program gets, and where the rows it makes are put."""

from __future__ import annotations

import dataclasses

import torch
import triton

from toolkit_plugins.quantizers.nvfp4_rows import BLOCK, Rows

TILE = 2048
"""Values that a program has at least: narrow rows share one (our choice)."""
MOST_WARPS = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """A kernel's rows (M, K), and the tile of one program.

    Attributes:
        count: M.
        width: K.
        tile: values that a program has at least, where there are so many.
    """

    count: int
    width: int
    tile: int = TILE

    @property
    def blocks(self) -> int:
        """Of a row in registers, a power of two; those beyond K are masked."""
        return triton.next_power_of_2(max(1, -(-self.width // BLOCK)))

    @property
    def rows(self) -> int:
        """A program."""
        return max(1, min(self.tile // (BLOCK * self.blocks), triton.next_power_of_2(max(1, self.count))))

    @property
    def grid(self) -> tuple[int]:
        """Programs."""
        return (triton.cdiv(self.count, self.rows),)

    def warps(self, values: int = 32) -> int:
        """So that a thread holds `values` of a tensor's, in powers of two up to 16 warps."""
        return max(1, min(MOST_WARPS, self.rows * self.blocks * BLOCK // (32 * values)))


def lying(x: torch.Tensor) -> torch.Tensor:
    """x (M, K) with its columns one after the other in memory; copied only where they are not."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def empty_rows(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes in int32 words, scales as bytes, g) that a kernel fills."""
    blocks = -(-shape.width // BLOCK)
    return (
        torch.empty(shape.count, 2 * blocks, dtype=torch.int32, device=device),
        torch.empty(shape.count, blocks, dtype=torch.uint8, device=device),
        torch.empty(shape.count, dtype=torch.float32, device=device),
    )


def rows_of(made: tuple[torch.Tensor, torch.Tensor, torch.Tensor], width: int) -> Rows:
    """What was filled, as `Rows`."""
    codes, scales, g = made
    return Rows(codes.view(torch.uint8), scales.view(torch.float8_e4m3fn), g, width)


def parts(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes in int32 words, scales as bytes, g) of rows."""
    # 16 values' codes are 8 bytes, so that words divide every row; a slice may start between them
    codes = rows.codes.contiguous()
    if codes.storage_offset() % 4:
        codes = codes.clone()
    return codes.view(torch.int32), rows.scales.contiguous().view(torch.uint8), rows.g.contiguous()
