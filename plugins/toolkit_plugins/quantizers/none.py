"""No quantization: the weight in 16 bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch

from toolkit.errors import InputError
from toolkit.interfaces import Quantizer


@dataclasses.dataclass(frozen=True)
class NoQuantization(Quantizer):
    """16-bit storage: float16 and bfloat16 weights are kept bit for bit, wider ones are rounded to bfloat16.

    Attributes:
        dtype: `keep` as above, or `float16` or `bfloat16` to round every weight to that.

    Raises:
        InputError: (`encode`) a weight beyond the range of the 16-bit dtype.
    """

    name = "none"

    dtype: Literal["keep", "float16", "bfloat16"] = "keep"

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """`weight`, a contiguous copy in 16 bit."""
        half = weight.dtype in (torch.float16, torch.bfloat16)
        keep = weight.dtype if half else torch.bfloat16
        dtype = keep if self.dtype == "keep" else getattr(torch, self.dtype)
        stored = weight.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        if not bool(stored.isfinite().all()):
            raise InputError(f"{self.key}: the largest weight, {weight.abs().max().item():.4g}, is beyond {dtype}")
        return {"weight": stored}

    def decode(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """The stored weight in float32."""
        return tensors["weight"].float()

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether the dtype is 16-bit already, and the one that is asked for."""
        return dtype in (torch.float16, torch.bfloat16) and self.dtype in ("keep", str(dtype).removeprefix("torch."))
