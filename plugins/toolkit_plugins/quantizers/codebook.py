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
from toolkit.interfaces import Errors, Grid, Quantizer
from toolkit.weights import native

FACTORS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5)
"""Of a block's maximum, tried where scales are searched (our choice): below 1 the largest weights are clipped; at 1.5
a maximum falls on 4 of 6, about which E2M1 is finer."""

CACHED = 2**16
"""Values compared at a time on a CPU."""


class CodebookQuantizer(Quantizer):
    """A block quantizer with 16 levels.

    Attributes:
        levels: the value of each code, 0 to 15.
        block_size: weights a block.
        by_row: blocks lie along the last dimension and restart at each row (a short last block holds what is
            there); otherwise they run through all weights in row-major order.
        mode: how `factor` acts on a weight, as `toolkit.weights.native.codebook_errors` names it.
        first_nibble: where the first of two codes in a byte lies.
        scale_name: the tensor that keeps one entry a block, from which its scale is read back.
    """

    levels: ClassVar[tuple[float, ...]]
    by_row: ClassVar[bool]
    mode: ClassVar[Literal["multiply", "divide", "divide-partial"]]
    first_nibble: ClassVar[Literal["high", "low"]]
    scale_name: ClassVar[str] = "scales"

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
        return _middles(tuple(self.levels), device)

    def choose(self, ratio: torch.Tensor) -> torch.Tensor:
        """The code of each y, uint8."""
        order = _order(tuple(self.levels), ratio.device)
        found = passed(ratio, self.thresholds(ratio.device)[0])
        return order.index_select(0, found.view(-1)).view(ratio.shape)

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`codes`: two a byte, uint8, in row-major order; and what `pack_scales` keeps."""
        columns, block = self._columns(tuple(weight.shape)), self.block_size
        absmax = native.block_absmax(weight, block, columns)
        kept, factor = self.pack_scales(absmax, partial=columns % block != 0)
        values = weight.detach().reshape(-1, columns).float()
        ratio = native.reference.scaled(values, factor, block, self.mode).view(-1)
        return {"codes": self.pack_codes(self.choose(ratio)), **kept}

    def pack_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Two codes a byte, uint8, of flat codes; an unused half byte holds the code of zero."""
        if codes.numel() % 2:
            codes = torch.cat([codes, self.choose(torch.zeros(1, device=codes.device))])
        first, second = codes[::2], codes[1::2]
        high, low = (first, second) if self.first_nibble == "high" else (second, first)
        return (high << 4) | low

    def scale_entries(
        self, kept: Mapping[str, torch.Tensor], blocks: torch.Tensor, absmax: torch.Tensor
    ) -> torch.Tensor:
        """The format's own entries for blocks whose maxima have changed, the tensor's constants being as kept.

        Args:
            kept: what `pack_scales` gave.
            blocks: (n,) int64, the blocks' indices in order.
            absmax: (n,) float32, their new maxima.
        """
        return self.pack_scales(absmax, partial=False)[0][self.scale_name]

    def scale_candidates(
        self, kept: Mapping[str, torch.Tensor], blocks: torch.Tensor, entries: torch.Tensor
    ) -> torch.Tensor:
        """Entries (c, n) around the format's own (n,), which come first, for a search of the best."""
        scale = self.scale_values(kept, blocks, entries)
        return torch.stack([entries, *(self.scale_entries(kept, blocks, self.maxima(scale) * f) for f in FACTORS)])

    def scale_values(
        self, kept: Mapping[str, torch.Tensor], blocks: torch.Tensor, entries: torch.Tensor
    ) -> torch.Tensor:
        """The scales that entries (…, n) of some blocks are read back as, float32."""
        return self.unpack_scales({**kept, self.scale_name: entries})

    def maxima(self, scale: torch.Tensor) -> torch.Tensor:
        """The largest magnitude under each scale, from which `scale_entries` gives that scale back."""
        return scale * max(self.levels)

    def grid(self, weight: torch.Tensor) -> Grid:
        """As the interface says; groups are the blocks where each lies within one row.

        Raises:
            InputError: as `quantize`, or the weight has not two dimensions.
        """
        from toolkit_plugins.quantizers.grid import BlockGrid

        return BlockGrid(self, self.valid(weight))

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


def passed(values: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """How many of the ascending thresholds lie below each value, int32, as `torch.bucketize` counts them.

    On a CPU its search costs two to three times as much as comparing with each of so few, cache by cache.
    """
    if values.device.type != "cpu":
        return torch.bucketize(values, thresholds, out_int32=True)
    found = torch.empty(values.shape, dtype=torch.int32)
    for part, into in zip(values.reshape(-1).split(CACHED), found.view(-1).split(CACHED), strict=True):
        count = torch.zeros(part.shape, dtype=torch.uint8)
        for threshold in thresholds:
            count.add_(part > threshold)
        into.copy_(count)
    return found


@functools.cache
def _on_device(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The levels by code, copied to the device once: a layer that decodes in every step must not wait for the copy."""
    return torch.tensor(levels, dtype=torch.float32, device=device)


@functools.cache
def _middles(levels: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ordered = torch.tensor(levels, dtype=torch.float32).sort().values
    return ((ordered[:-1] + ordered[1:]) / 2).to(device), ordered.to(device)


@functools.cache
def _order(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(sorted(range(16), key=levels.__getitem__), dtype=torch.uint8).to(device)
