"""QERA-approx: the error weighted by how large each input channel is."""

from __future__ import annotations

import dataclasses

import torch

from toolkit_plugins.initializers.qera import Product, Qera


@dataclasses.dataclass(frozen=True)
class QeraApprox(Qera):
    """The activation-aware low-rank fit with a diagonal root, s·BA = SVD_r(E·S)·S⁻¹, S = diag(√E[x_i²]).

    The optimum of the expected output error where the input channels are uncorrelated (Zhang et al., 2025, QERA,
    ICLR, arXiv:2410.06040, the approximate solution; s = 1). Damping, base, notes and options as at `qera.Qera`.
    """

    name = "qera-approx"

    def root(self, name: str, second: torch.Tensor, mean: float) -> tuple[Product, Product, int]:
        """S from the diagonal of R alone."""
        scale = (second.diagonal().double().clamp(min=0) + self.damping * mean).sqrt()
        return (lambda m: m * scale.float()), (lambda m: (m.double() / scale).float()), 0
