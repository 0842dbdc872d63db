"""Rank-stabilized scaling."""

from __future__ import annotations

import math

from toolkit.errors import InputError
from toolkit.interfaces import Scaler


class RsLoRA(Scaler):
    """s = α/√r: rank-stabilized scaling (Kalajdzievski, 2023; AQLoRA Appendix D).

    It is √r times LoRA's: 2.8 at r = 8 and 5.7 at r = 32. Under a learning rate chosen for LoRA, high ranks
    fell to chance while the loss looked healthy (AQLoRA Appendix C).
    """

    name = "rslora"

    def __call__(self, alpha: float, rank: int) -> float:
        """α/√r; at α = 16 and r = 8 it is 5.657.

        Raises:
            InputError: the rank is below 1.
        """
        if rank < 1:
            raise InputError(f"an adapter has a rank of at least 1; found {rank}")
        return alpha / math.sqrt(rank)
