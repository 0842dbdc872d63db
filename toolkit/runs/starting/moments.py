"""Second moments of a layer's inputs, gathered batch by batch."""

from __future__ import annotations

import torch

from toolkit.interfaces import Moments
from toolkit.weights.precision import full_float32

WIDEST = 8192
"""Input features up to which sums are float64 (512 MB at most), float32 beyond: our choice."""


class Gathered:
    """R = (1/n)·Σ xxᵀ over tokens, whatever batches they come in.

    Products of one batch are float32, and its contribution is added to sums in float64 up to `WIDEST` features.

    Attributes:
        tokens: n so far.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._sum: torch.Tensor | None = None

    @full_float32()
    def add(self, inputs: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
        """Count a batch of inputs, (…, in); answers whether all of them are finite.

        Args:
            mask: of the shape of `inputs` without its last; tokens where it is 0, padding, are not counted.
        """
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        if mask is not None:
            rows = rows[mask.reshape(-1).bool()]
        if not len(rows):
            return True
        rows = rows.float()
        product = rows.mT @ rows
        finite = bool(product.diagonal().isfinite().all())
        if self._sum is None:
            wide = torch.float64 if rows.shape[1] <= WIDEST else torch.float32
            self._sum = torch.zeros_like(product, dtype=wide)
        self._sum += product
        self.tokens += len(rows)
        return finite

    def moments(self, activations: str = "none") -> Moments | None:
        """What was gathered, symmetric; None where no token was seen."""
        if self._sum is None:
            return None
        mean = self._sum / self.tokens
        return Moments(((mean + mean.mT) / 2).float(), self.tokens, activations)
