"""The arithmetic that all 4-bit formats share: one scale a block, one of 16 levels a weight.

    y = x ∘ factor[block]      (· or /, whichever the format's own library uses)
    code = nearest level to y  (ties as the format has them)
    x̂ = scale[block] · level[code]

All of it in float32. A format gives its levels, its blocks, and what it makes of the blocks' maxima.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from toolkit.errors import InputError
from toolkit.interfaces import Errors, Quantizer
from toolkit.weights import native


class CodebookQuantizer(Quantizer):
    """A block quantizer with 16 levels.

    Attributes:
        levels: the value of each code, 0 to 15.
        block_size: weights a block.
        by_row: blocks lie along the last dimension and restart at each row (a short last block holds what is
            there); otherwise they run through all weights in row-major order.
        mode: how `factor` acts on a weight, as `toolkit.weights.native.codebook_errors` names it.
        first_nibble: where the first of two codes in a byte lies.
    """

    levels: ClassVar[tuple[float, ...]]
    by_row: ClassVar[bool]
    mode: ClassVar[Literal["multiply", "divide", "divide-partial"]]
    first_nibble: ClassVar[Literal["high", "low"]]

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Weights a block."""

    @abstractmethod
    def pack_scales(self, absmax: torch.Tensor, partial: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """(what is kept of the blocks' maxima, factor).

        Args:
            absmax: max|w| of each block, float32, (rows, blocks a row), finite.
            partial: whether the last block of a row is short.

        Returns:
            The tensors to keep, and `factor` of the same shape as `absmax`.
        """

    @abstractmethod
    def unpack_scales(self, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`scale` of every block in float32, in order, from what was kept."""

    def thresholds(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(15 thresholds, 16 sorted levels) in float32: level i holds for threshold[i−1] < y ≤ threshold[i].

        By default the thresholds are the midpoints, so that a tie goes to the lower level.
        """
        levels = torch.tensor(self.levels, dtype=torch.float32).sort().values
        return ((levels[:-1] + levels[1:]) / 2).to(device), levels.to(device)

    def choose(self, ratio: torch.Tensor) -> torch.Tensor:
        """The code of each y, uint8."""
        order = torch.tensor(self.order, dtype=torch.uint8, device=ratio.device)
        return order[torch.bucketize(ratio, self.thresholds(ratio.device)[0], out_int32=True)]

    @property
    def order(self) -> list[int]:
        """The codes by ascending level."""
        return sorted(range(16), key=lambda code: self.levels[code])

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`codes`: two a byte, uint8, in row-major order; and what `pack_scales` keeps."""
        columns, block = self._columns(tuple(weight.shape)), self.block_size
        absmax = native.block_absmax(weight, block, columns)
        kept, factor = self.pack_scales(absmax, partial=columns % block != 0)
        values = weight.detach().reshape(-1, columns).float()
        ratio = native.reference.scaled(values, factor, block, self.mode).view(-1)
        if ratio.numel() % 2:
            ratio = torch.nn.functional.pad(ratio, (0, 1))  # the unused half byte holds the code of zero
        codes = self.choose(ratio)
        first, second = codes[::2], codes[1::2]
        high, low = (first, second) if self.first_nibble == "high" else (second, first)
        return {"codes": (high << 4) | low, **kept}

    def decode(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """scale[block]·level[code] in float32, (rows, columns)."""
        columns, count = self._columns(shape), math.prod(shape)
        packed = tensors["codes"]
        high, low = packed >> 4, packed & 15
        pair = (high, low) if self.first_nibble == "high" else (low, high)
        codes = torch.stack(pair, dim=1).view(-1)[:count]
        levels = _on_device(tuple(self.levels), packed.device)
        scale = self.unpack_scales(tensors).view(count // columns, -1)
        values = levels[codes.int()].view(-1, columns)
        return native.reference.scaled(values, scale, self.block_size, "multiply")

    def measure(self, weight: torch.Tensor) -> Errors:
        """As the interface says; equal to the plain way but for the order of the double sums (1e-12 relative)."""
        if not weight.is_floating_point() or weight.numel() == 0:
            return super().measure(weight)  # refuses it
        sums, kept_bytes = self.sums(weight.detach())
        n = weight.numel()
        return Errors(
            mse=sums.square / n,
            mae=sums.absolute / n,
            relative=math.sqrt(sums.square / sums.weight_square) if sums.weight_square else 0.0,
            max=sums.largest,
            bytes=kept_bytes,
        )

    def sums(self, weight: torch.Tensor) -> tuple[native.Sums, int]:
        """The error's sums, in one pass over the weight after one over its blocks' maxima; and the bytes kept.

        Raises:
            InputError: the weight holds NaN or infinity.
        """
        columns, block = self._columns(tuple(weight.shape)), self.block_size
        absmax = native.block_absmax(weight, block, columns)
        if not math.isfinite(absmax.amax().item()):  # the maximum of numbers with a NaN is NaN
            raise InputError(f"the weight holds NaN or infinity; {self.key} quantizes finite weights only")
        kept, factor = self.pack_scales(absmax, partial=columns % block != 0)
        scale = self.unpack_scales(kept).view_as(factor)
        found = native.codebook_errors(
            weight, block, factor, scale, *self.thresholds(weight.device), columns=columns, mode=self.mode
        )
        return found, -(-weight.numel() // 2) + sum(t.numel() * t.element_size() for t in kept.values())

    def _columns(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if self.by_row and shape else math.prod(shape)


@functools.cache
def _on_device(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The levels by code, copied to the device once: a layer that decodes in every step must not wait for the copy."""
    return torch.tensor(levels, dtype=torch.float32, device=device)
