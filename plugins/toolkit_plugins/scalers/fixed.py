"""A scaling that neither alpha nor rank changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.errors import InputError
from toolkit.interfaces import Scaler


@dataclass
class Fixed(Scaler):
    """s = `value`, whatever alpha and rank are: for ablations that hold the scaling still."""

    name = "fixed"

    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise InputError(f"option 'value' of scaler 'fixed' is {self.value}; a finite number is needed")

    def __call__(self, alpha: float, rank: int) -> float:
        """`value`.

        Raises:
            InputError: the rank is below 1.
        """
        if rank < 1:
            raise InputError(f"an adapter has a rank of at least 1; found {rank}")
        return self.value
