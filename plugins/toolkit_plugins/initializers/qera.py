"""What the two activation-aware closed forms share."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable

import torch

from toolkit.errors import InputError
from toolkit.interfaces import FALLBACK, Given, Start
from toolkit.weights.precision import full_float32
from toolkit_plugins.initializers import low_rank
from toolkit_plugins.initializers.fitting import (
    OverBase,
    adapter_of,
    error_of,
    left_over,
    moments_of,
    norm,
    output_notes,
)

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Qera(OverBase):
    """Common base: s·BA = SVD_r(E·S)·S⁻¹ with E = W − Ŵ, for a root S of the inputs' second moments, SSᵀ ≈ R.

    It minimises ‖(E − s·BA)·S‖_F, the expected output error √E‖(W − Ŵ − s·BA)x‖² where SSᵀ = R = E[xxᵀ]. R is damped,
    R + δ·mean(diag R)·I, so that channels never seen keep a finite weight; δ is raised tenfold where that is not
    enough, and what it came to is noted (our choice). A layer whose inputs were all zero is fitted without weights, and
    says so as a fall-back.

    Attributes:
        damping: δ, above 0.
        base, svd: as at `fitting.OverBase`.

    Raises:
        InputError: a damping that is not above 0; a base that fits an adapter itself.
    """

    needs_calibration = True

    damping: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 < self.damping < float("inf"):
            raise InputError(
                f"option 'damping' of initializer {self.name!r} is {self.damping}; a finite number above 0 is needed"
            )
        super().__post_init__()

    @abstractmethod
    def root(self, name: str, second: torch.Tensor, mean: float) -> tuple[Product, Product, int]:
        """(M ↦ M·S for M in float32, M ↦ M·S⁻¹, how often δ was raised) from R, float32, and mean(diag R) > 0."""

    @full_float32()
    def initialize(self, given: Given) -> Start:
        """The closed form, kept whatever ‖W − Ŵ − s·BA‖_F it comes to: that is not the norm it minimises.

        Notes: `captured`, the share of ‖E·S‖² that s·BA takes away; `damping`, δ as it was used, 0 where all inputs
        were zero, which `fallback` says; `damping_raised`, how often it was raised; `svd_error` and `svd_exact` of the
        fit; `output_error`, relative, over the inputs' moments; `base_…`, what the base's initializer says.

        Raises:
            InputError: moments that are missing, of another width or not finite; a rank outside 1 to min(shape), a
                scaling of 0, or a weight that the quantizer refuses.
        """
        rank, seeded = adapter_of(self, given)
        second = moments_of(self, given).second.to(given.weight.device)
        made = self._base.make(given, given.weight)
        whole = norm(given.weight.detach().float()) or 1.0
        error = error_of(given, made.base)
        zero = norm(error) / whole
        mean = float(second.diagonal().double().mean())
        if mean > 0:
            weigh, undo, raised = self.root(given.name, second, mean)
            damping = self.damping * 10**raised
            weighted = weigh(error)
            fit = low_rank.best(weighted, rank, method=self.svd, seed=given.seed)
            a, b = fit.split(given.scaling, seeded, undo(fit.right))
        else:
            weighted, damping, raised = error, 0.0, 0
            fit = low_rank.best(error, rank, method=self.svd, seed=given.seed)
            a, b = fit.split(given.scaling, seeded)
        energy = norm(weighted) ** 2
        notes = dict(made.notes) | {
            "captured": min(fit.captured / energy, 1.0) if energy else 0.0,
            "damping": damping,
            "damping_raised": raised,
            "svd_error": fit.error,
            "svd_exact": int(fit.exact),
            **output_notes(given, made.base, a, b),
        }
        if not mean > 0:
            notes[FALLBACK] = "fitted without weights: no input was seen"
        residuals = (zero, left_over(error, a, b, given.scaling) / whole)
        return Start(made.base, a, b, given.scaling, residuals, 1, notes)
