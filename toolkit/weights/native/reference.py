"""The same results as the native kernel in plain tensor operations: the fall-back, and the kernel's oracle."""

from __future__ import annotations

import torch
import xxhash

CHUNK = 2**16
"""Elements a chunk of the digest."""


def scan_chunk(values: torch.Tensor) -> tuple[bytes, float, float, float]:
    """(digest, Σ|w|, Σw², max|w|) of one chunk of contiguous float32 values on the CPU."""
    wide = values.double()
    digest = xxhash.xxh3_128_digest(values.numpy().data)
    return digest, wide.abs().sum().item(), wide.square().sum().item(), wide.abs().max().item()


def block_absmax(flat: torch.Tensor, rows: int, columns: int, block: int) -> torch.Tensor:
    """max|w| of each block, float32, shape (rows, ⌈columns/block⌉); a short last block holds what is there."""
    values = flat.reshape(rows, columns).abs().float()
    full = columns - columns % block
    parts = []
    if full:
        parts.append(values[:, :full].reshape(rows, full // block, block).amax(-1))
    if full < columns:
        parts.append(values[:, full:].amax(-1, keepdim=True))
    return torch.cat(parts, dim=1)


def scaled(values: torch.Tensor, factor: torch.Tensor, block: int, mode: str) -> torch.Tensor:
    """x·factor block by block (`multiply`), x/factor (`divide`), or x/factor in a short last block alone
    (`divide-partial`), in float32; values (rows, columns), factor (rows, ⌈columns/block⌉)."""
    rows, columns = values.shape
    full = columns - columns % block
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    if full:
        part, by = values[:, :full].reshape(rows, -1, block), factor[:, : full // block, None]
        out[:, :full] = (part / by if mode == "divide" else part * by).view(rows, full)
    if full < columns:
        part, by = values[:, full:], factor[:, -1:]
        out[:, full:] = part * by if mode == "multiply" else part / by
    return out
