"""Which exact product is the faster one: the library's after unpacking, or the fused kernel."""

from __future__ import annotations

FUSED: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
"""Compute capability → shape of a packed weight → most tokens for which the fused kernel was measured to be faster.

Shapes that are not here are unpacked and multiplied by the library.
"""


def fused(capability: tuple[int, int], shape: tuple[int, int], tokens: int) -> bool:
    """Whether the fused kernel is known to be faster."""
    return tokens <= FUSED.get(capability, {}).get(shape, -1)
