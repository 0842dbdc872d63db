"""Layouts: how checkpoints of other libraries hold the weights of one quantizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from toolkit.interfaces.quantizer import Packed, Quantizer


class Layout(ABC):
    """What a checkpoint format writes for a quantized weight (out, in), and what its config says of all of them.

    Attributes:
        name: of the layout, as the format's own library calls it.
        multiple: input features must be a whole number of so many; 1: any width.
    """

    name: ClassVar[str]
    multiple: ClassVar[int] = 1

    @abstractmethod
    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """The config's `quantization_config`, without the list of layers that are left out.

        Args:
            dtype: that layers compute in.
        """

    @abstractmethod
    def tensors(self, packed: Packed, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Name below the layer's path → tensor; every packed code and scale as it is.

        Args:
            dtype: that the weight is decoded to.

        Raises:
            InputError: a library that is needed is not installed.
        """

    @abstractmethod
    def packed(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Packed:
        """The weight that `tensors` hold, as the quantizer keeps it: the inverse of `tensors`.

        Args:
            shape: (out, in) of the weight.
            dtype: of the dense weight.

        Raises:
            InputError: a tensor is missing, or of another shape than a weight of this shape has.
        """

    @abstractmethod
    def decoded(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Ŵ (out, in) as the format's own library computes it from `tensors`, rounded to `dtype` as it does."""

    def caution(self, shape: tuple[int, int]) -> str | None:
        """What is known to go wrong when the format's library computes a weight of this shape; None: nothing."""
        return None

    def scale(self, packed: Packed) -> float | None:
        """The scale of the whole tensor, which layers that engines fuse must share; None where there is none."""
        return None

    def covering(self, weights: Sequence[torch.Tensor]) -> Quantizer | None:
        """The quantizer with one scale for all of these weights, whatever it is given; None: nothing need be shared.

        Args:
            weights: each (out, in), dense.
        """
        return None

    def at_scale(self, weight: torch.Tensor, scale: float) -> Packed:
        """The weight quantized under a tensor's scale that is given, no smaller than its own.

        Args:
            weight: (out, in).
            scale: as `scale` answers.

        Raises:
            InputError: the weight cannot be quantized.
            NotImplementedError: the format has no scale of a tensor (`scale` answers None).
        """
        raise NotImplementedError(f"{self.name} has no scale of a tensor")
