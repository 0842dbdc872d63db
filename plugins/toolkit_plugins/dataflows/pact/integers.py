"""Activations in group-wise integers, as HyC-LoRA keeps them (PACT, Table 10); an ablation of NVFP4 copies."""

from __future__ import annotations

import torch

GROUP = 128
"""Values that share a scale and a zero (our choice)."""


def quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, low) of each group of a row: code = RNE((x − low)/scale), scale = (high − low)/(2ᵇ − 1).

    Args:
        x: (M, K), any float dtype.
        bits: 2 or 4.

    Returns:
        codes uint8 (M, bits·K/8 rounded up to whole groups), the first in the lowest bits; scale and low in bfloat16
        (M, ⌈K/128⌉), which codes are computed under.
    """
    count, width = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -width % GROUP), mode="constant").view(count, -1, GROUP)
    if width % GROUP:  # what is not there must not widen the last group's range
        last = width % GROUP
        groups[:, -1, last:] = groups[:, -1, :1]
    low = groups.amin(-1).bfloat16()
    scale = ((groups.amax(-1) - low.float()) / (2**bits - 1)).bfloat16()
    step = scale.float()[..., None]
    ratio = torch.where(step > 0, (groups - low.float()[..., None]) / step, 0.0)
    codes = ratio.round().clamp(0, 2**bits - 1).to(torch.uint8).view(count, -1, 8 // bits)
    shifts = torch.arange(0, 8, bits, device=x.device, dtype=torch.uint8)
    return (codes << shifts).sum(-1, dtype=torch.uint8), scale, low


def values(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, *, bits: int, width: int) -> torch.Tensor:
    """x̂ = low + scale·code, float32 (M, width)."""
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    wide = ((codes[..., None] >> shifts) & (2**bits - 1)).view(len(codes), -1, GROUP).float()
    return (low.float()[..., None] + scale.float()[..., None] * wide).view(len(codes), -1)[:, :width]
