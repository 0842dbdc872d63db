"""QERA-exact: the least expected output error that a low-rank part can leave."""

from __future__ import annotations

import dataclasses

import torch

from toolkit.errors import InputError
from toolkit_plugins.initializers.qera import Product, Qera

RAISED = 8
"""Tenfold rises of the damping before the moments are given up."""


@dataclasses.dataclass(frozen=True)
class QeraExact(Qera):
    """The activation-aware low-rank fit with a full root, s·BA = SVD_r(E·S)·S⁻¹, SSᵀ = R = E[xxᵀ].

    The optimum of E‖(W − Ŵ − s·BA)x‖² (Zhang et al., 2025, QERA, ICLR, arXiv:2410.06040, the exact solution; s = 1).
    The paper takes S = R^½; we take R's Cholesky factor in float64, which costs less: two roots differ by an orthogonal
    factor on the right, under which SVD_r(E·S)·S⁻¹ stays the same. Damping, base, notes and options as at `qera.Qera`.
    """

    name = "qera-exact"

    def root(self, name: str, second: torch.Tensor, mean: float) -> tuple[Product, Product, int]:
        """S = chol(R + δ·mean(diag R)·I).

        Raises:
            InputError: R is not positive definite at 10⁸ times the damping either: it is no matrix of moments.
        """
        exact = second.double()
        exact = (exact + exact.T) / 2
        for raised in range(RAISED + 1):
            damped = exact.clone()
            damped.diagonal().add_(self.damping * 10**raised * mean)
            factor, failed = torch.linalg.cholesky_ex(damped)
            if not bool(failed):
                break
        else:
            raise InputError(
                f"layer {name}: the second moments of its inputs are not positive definite, damped by "
                f"{self.damping * 10**RAISED:.3g} of their mean diagonal either: they are no moments"
            )

        def undo(matrix: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve_triangular(factor, matrix.double(), upper=False, left=False).float()

        return (lambda matrix: matrix @ factor.float()), undo, raised
