"""LoRA's own scaling."""

from __future__ import annotations

from toolkit.errors import InputError
from toolkit.interfaces import Scaler


class LoRA(Scaler):
    """s = α/r: LoRA's scaling (Hu et al., 2021, §4.1)."""

    name = "lora"

    def __call__(self, alpha: float, rank: int) -> float:
        """α/r; at α = 16 and r = 8 it is 2.

        Raises:
            InputError: the rank is below 1.
        """
        if rank < 1:
            raise InputError(f"an adapter has a rank of at least 1; found {rank}")
        return alpha / rank
