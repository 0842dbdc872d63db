"""The grid of a block format, whose scales can be fitted anew where blocks lie within rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from toolkit.errors import InputError
from toolkit.interfaces import Grid, Packed, Quantizer
from toolkit.weights import native
from toolkit_plugins.quantizers.codebook import CodebookQuantizer

CHUNK = 2**25
"""Numbers that a search of scales holds at once, at most."""


class BlockGrid(Grid):
    """ŵ = scale[block]·level[code] of one weight (out, in), code by code as its format has them.

    The scales begin as the format's own for the weight, and rounding every column of that weight gives what
    `quantize` gives, bit for bit. Those that `fit` has fixed are the scales as they are read back (E4M3, a power of
    two, an 8-bit code of a maximum, or a float32), under the constants of the whole tensor (NVFP4's tensor scale, the
    offset and the groups' maxima of the double quantization), which stay as the weight gave them.

    Raises:
        InputError: the weight has not two dimensions.
    """

    def __init__(self, quantizer: CodebookQuantizer, weight: torch.Tensor) -> None:
        if weight.ndim != 2:
            raise InputError(f"a grid of columns needs a weight (out, in); found the shape {tuple(weight.shape)}")
        self.quantizer, self.dtype = quantizer, weight.dtype
        self.rows, self.columns = weight.shape
        self.block = quantizer.block_size
        self.group = self.block if quantizer.by_row or self.columns % self.block == 0 else None
        span = self.columns if quantizer.by_row else weight.numel()
        short = span % self.block != 0
        absmax = native.block_absmax(weight, self.block, span)
        self.kept, factor = quantizer.pack_scales(absmax, partial=short)
        scale = quantizer.unpack_scales(self.kept)
        if self.group is None:
            self.factor, self.scale = factor.reshape(-1), scale.reshape(-1)
            whole = weight.numel() - weight.numel() % self.block
            self.divided = whole if quantizer.mode == "divide-partial" and short else weight.numel()
            self.flat = torch.arange(self.rows, device=weight.device) * self.columns
        else:  # (groups, rows): one group's are contiguous
            self.factor = factor.view(self.rows, -1).T.contiguous()
            self.scale = scale.view(self.rows, -1).T.contiguous()
        self.codes = torch.empty(self.columns, self.rows, dtype=torch.uint8, device=weight.device)
        self.done = torch.zeros(self.columns, dtype=torch.bool, device=weight.device)
        self.levels = torch.tensor(quantizer.levels, dtype=torch.float32, device=weight.device)

    def fit(
        self,
        columns: torch.Tensor,
        values: torch.Tensor,
        importance: torch.Tensor | None = None,
        spread: torch.Tensor | None = None,
    ) -> None:
        """As the interface says; the search tries the format's own scale for `values` and its `scale_candidates`."""
        number = _group(self, columns, self.columns)
        values = values.T.float().contiguous()
        quantizer, name = self.quantizer, self.quantizer.scale_name
        blocks = torch.arange(self.rows, device=values.device) * len(self.scale) + number
        entries = quantizer.scale_entries(self.kept, blocks, values.abs().amax(0))
        if importance is not None:
            tried = quantizer.scale_candidates(self.kept, blocks, entries)
            scales = quantizer.scale_values(self.kept, blocks, tried)
            step = max(1, CHUNK // (len(values) * len(tried)))
            best = [
                self._losses(values[:, at : at + step], scales[:, at : at + step], importance, spread).argmin(0)
                for at in range(0, self.rows, step)
            ]
            raw = tried.view(torch.uint8) if tried.element_size() == 1 else tried  # no gather of 8-bit floats
            entries = raw.gather(0, torch.cat(best)[None])[0].view(tried.dtype)
        stored = self.kept[name].view(self.rows, -1)
        stored[:, number] = entries
        self.scale[number] = quantizer.scale_values(self.kept, blocks, entries)
        self.factor[number] = self._factors(self.scale[number])

    def round(self, columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """As the interface says."""
        values = values.T.contiguous()
        if self.group is None:
            flat = self.flat + columns[:, None]
            block = flat // self.block
            ratio = self._ratio(values, self.factor[block])
            if self.divided < self.rows * self.columns:
                ratio = torch.where(flat >= self.divided, values / self.factor[block], ratio)
            scale = self.scale[block]
        else:
            block = columns // self.group
            ratio, scale = self._ratio(values, self.factor[block]), self.scale[block]
        codes = self.quantizer.choose(ratio)
        self.codes[columns] = codes
        self.done[columns] = True
        return (self.levels[codes.int()] * scale).T

    def pack(self) -> Packed:
        """As the interface says."""
        if not bool(self.done.all()):
            raise ValueError(f"{int((~self.done).sum())} of {self.columns} columns were not rounded")
        codes = self.quantizer.pack_codes(self.codes.T.reshape(-1))
        tensors = {"codes": codes, **{name: tensor.clone() for name, tensor in self.kept.items()}}
        return Packed(self.quantizer, tensors, (self.rows, self.columns), self.dtype)

    def _ratio(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return values / factor if self.quantizer.mode == "divide" else values * factor

    def _factors(self, scale: torch.Tensor) -> torch.Tensor:
        """What values are divided or multiplied by under scales as they are read back."""
        if self.quantizer.mode == "divide":
            return scale
        return 1.0 / scale.clamp(min=torch.finfo(torch.float32).tiny)

    def _losses(
        self, values: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor, spread: torch.Tensor | None
    ) -> torch.Tensor:
        """Σ_j importance_j·(w_j − ŵ_j)² of every candidate, (c, rows), from w (columns, rows), scales (c, rows)."""
        factor = self._factors(scales)
        if spread is None:
            codes = self.quantizer.choose(self._ratio(values[:, None], factor))
            error = values[:, None] - self.levels[codes.int()] * scales
            return torch.einsum("jcr,j->cr", error.square_(), importance.float())
        spread = spread.to(values)
        moved = values[:, None].repeat(1, len(scales), 1)
        loss = torch.zeros_like(scales)
        for j in range(len(values)):
            codes = self.quantizer.choose(self._ratio(moved[j], factor))
            error = moved[j] - self.levels[codes.int()] * scales
            loss.add_(error.square() * importance[j])
            if j + 1 < len(values):
                moved[j + 1 :] -= spread[j, j + 1 :, None, None] * error
        return loss


class Shifted(Grid):
    """The grid of a second stage over a first one that stays: ŵ = q + ŵ₂, ŵ₂ on the grid of W − q.

    Args:
        quantizer: of both stages, whose tensors are named `inner.…` and `residual.…`.
        dtype: the weight's.
        first: what the first stage keeps.
        base: q, (out, in), float32.
        rest: the grid of W − q.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        dtype: torch.dtype,
        first: Mapping[str, torch.Tensor],
        base: torch.Tensor,
        rest: Grid,
    ) -> None:
        self.quantizer, self.dtype, self.first, self.base, self.rest = quantizer, dtype, first, base, rest
        self.group = rest.group

    def fit(
        self,
        columns: torch.Tensor,
        values: torch.Tensor,
        importance: torch.Tensor | None = None,
        spread: torch.Tensor | None = None,
    ) -> None:
        """As the interface says; the second stage's scales."""
        _group(self, columns, self.base.shape[1])
        self.rest.fit(columns, values.float() - self.base[:, columns], importance, spread)

    def round(self, columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """As the interface says."""
        base = self.base[:, columns]
        return base + self.rest.round(columns, values - base)

    def pack(self) -> Packed:
        """As the interface says."""
        second = self.rest.pack()
        kept = {f"inner.{name}": tensor for name, tensor in self.first.items()}
        kept |= {f"residual.{name}": tensor for name, tensor in second.tensors.items()}
        return Packed(self.quantizer, kept, second.shape, self.dtype)


def _group(grid: Grid, columns: torch.Tensor, count: int) -> int:
    """The number of the group that these columns are."""
    if grid.group is None:
        raise ValueError("the blocks of this weight run over the ends of its rows: no columns share a scale")
    found = sorted(columns.tolist())
    number = found[0] // grid.group if found else 0
    if found != list(range(number * grid.group, min((number + 1) * grid.group, count))):
        raise ValueError(f"columns {found} are not all of one group of {grid.group} columns of {count}")
    return number
