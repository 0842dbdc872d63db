"""Scalers: the factor on an adapter's product."""

from __future__ import annotations

from abc import abstractmethod

from toolkit.interfaces.component import Component


class Scaler(Component):
    """(alpha, rank) ↦ s, the factor on BA: x ↦ W₀x + s·BAx. The only place that computes it."""

    kind = "scaler"

    @abstractmethod
    def __call__(self, alpha: float, rank: int) -> float:
        """The scaling s of an adapter of this alpha and rank."""
