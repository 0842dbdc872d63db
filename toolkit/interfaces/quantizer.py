"""Quantizers, and the packed weights that they make."""

from __future__ import annotations

import dataclasses
import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit.interfaces.component import Component

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.interfaces.grid import Grid
    from toolkit.interfaces.layout import Layout


@dataclasses.dataclass(frozen=True)
class Errors:
    """What quantization does to one weight, E = W − Ŵ, all in float64 sums over float32 values.

    mse = ‖E‖²/n, mae = Σ|E|/n, relative = ‖E‖_F/‖W‖_F (0 for a zero weight), max = max|E|. `bytes` is what the
    packed weight keeps, scales and constants included.
    """

    mse: float
    mae: float
    relative: float
    max: float
    bytes: int


@dataclasses.dataclass(frozen=True)
class Packed:
    """A quantized weight: the tensors that a quantizer stores, and what is needed to read them back.

    `tensors` is everything that is kept (codes, scales, constants); `shape` and `dtype` are the weight's.
    """

    quantizer: Quantizer
    tensors: Mapping[str, torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Ŵ, shape as given to `quantize`; decoded in float32, rounded once to `dtype` (default: the weight's)."""
        return self.quantizer.decode(self.tensors, self.shape).reshape(self.shape).to(dtype or self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes kept, scales and constants included."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """8·nbytes / number of weights."""
        count = 1
        for n in self.shape:
            count *= n
        return 8.0 * self.nbytes / count

    def to(self, device: torch.device | str) -> Packed:
        """The same packed weight on another device."""
        return dataclasses.replace(self, tensors={k: t.to(device) for k, t in self.tensors.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically: the tensors, and the key, shape and dtype as metadata."""
        from safetensors.torch import save_file

        from toolkit.records.io import atomic

        about = {"quantizer": self.quantizer.key, "shape": json.dumps(self.shape), "dtype": str(self.dtype)}
        with atomic(path) as temporary:
            save_file({k: t.contiguous() for k, t in self.tensors.items()}, temporary, metadata=about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Packed:
        """Read what `save` wrote, bit for bit.

        Raises:
            InputError: the file is missing, no safetensors, or no packed weight; or its quantizer is unknown.
        """
        import torch
        from safetensors import SafetensorError, safe_open

        from toolkit.registry import registry

        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — no mapping
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {path} as a packed weight: {error}") from None
        if missing := {"quantizer", "shape", "dtype"} - set(about):
            raise InputError(f"{path} is no packed weight: its metadata lack {', '.join(sorted(missing))}")
        dtype = getattr(torch, about["dtype"].removeprefix("torch."))
        return cls(registry.make("quantizer", about["quantizer"]), tensors, tuple(json.loads(about["shape"])), dtype)


class Quantizer(Component):
    """weight → packed tensor → weight; knows its bits per weight, scales included.

    Implement `encode` and `decode` in plain tensor operations, in float32, for any shape and device. A fast
    path overrides `measure`, and a layer class that computes from packed weights is given by `linear`.
    """

    kind = "quantizer"

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors to keep for a finite floating-point weight of any shape, dtype and strides."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Ŵ in float32 (any shape of the right number of elements) from what `encode` kept."""

    def quantize(self, weight: torch.Tensor) -> Packed:
        """Pack one weight.

        Raises:
            InputError: the weight is empty, not floating-point, or holds NaN or infinity.
        """
        weight = self.valid(weight)
        return Packed(self, self.encode(weight), tuple(weight.shape), weight.dtype)

    def valid(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight, detached, if it can be quantized.

        Raises:
            InputError: as `quantize`.
        """
        weight = weight.detach()
        if not weight.is_floating_point() or weight.numel() == 0:
            raise InputError(
                f"{self.key} quantizes non-empty floating-point weights; "
                f"found {weight.dtype} of shape {tuple(weight.shape)}"
            )
        if not bool(weight.isfinite().all()):
            raise InputError(f"the weight holds NaN or infinity; {self.key} quantizes finite weights only")
        return weight

    def each_row(self, values: torch.Tensor) -> torch.Tensor:
        """x̂ of activations (…, in), every row (a token) rounded as a tensor of its own, in the dtype of `values`.

        A row's rounding depends on no other row, whatever batch it comes in. The default quantizes row by row; a format
        may give a row another tensor scale than `quantize` gives a tensor, which it then says.

        Raises:
            InputError: as `quantize`.
        """
        import torch

        rows = values.detach().reshape(-1, values.shape[-1])
        rounded = [self.quantize(row[None]).dequantize() for row in rows]
        return torch.cat(rounded).reshape(values.shape) if rounded else values

    def measure(self, weight: torch.Tensor) -> Errors:
        """The errors of quantizing a weight, against its float32 values, before any rounding to 16 bit."""
        exact = weight.detach().float()
        packed = self.quantize(weight)
        error = (exact - self.decode(packed.tensors, packed.shape).reshape(exact.shape)).double()
        square, norm = error.square().sum().item(), exact.double().square().sum().item()
        n = exact.numel()
        return Errors(
            mse=square / n,
            mae=error.abs().sum().item() / n,
            relative=(square / norm) ** 0.5 if norm else 0.0,
            max=error.abs().max().item(),
            bytes=packed.nbytes,
        )

    def linear(self, linear: nn.Linear, compute_dtype: torch.dtype, packed: Packed | None = None) -> nn.Module | None:
        """A layer of another library that stores this format natively, made from a dense linear layer.

        `None` (the default) leaves the choice to the data flow, whose generic frozen layer keeps `Packed`. With
        `packed`, the layer holds that weight, which an initializer made, bit for bit, instead of its own Q(W).
        """
        return None

    def grid(self, weight: torch.Tensor) -> Grid | None:
        """What this weight (out, in) can be rounded to column by column, on its device; None: there is no such grid.

        Raises:
            InputError: as `quantize`.
        """
        return None

    @property
    def has_grid(self) -> bool:
        """Whether `grid` gives one, known without a weight."""
        return type(self).grid is not Quantizer.grid

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether weights of this dtype are kept bit for bit, so that their layers may be left untouched."""
        return False

    def layout(self, form: str) -> Layout | None:
        """How a checkpoint format (`bnb`, `compressed-tensors`) holds these weights; None: it cannot."""
        return None
