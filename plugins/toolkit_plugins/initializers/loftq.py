"""LoftQ with the scaling in its objective."""

from __future__ import annotations

import dataclasses

import torch

from toolkit.interfaces import Given, Start
from toolkit.weights.precision import full_float32
from toolkit_plugins.initializers import low_rank
from toolkit_plugins.initializers.fitting import (
    Alternating,
    adapter_of,
    error_of,
    left_over,
    norm,
    output_notes,
    same,
)


@dataclasses.dataclass(frozen=True)
class LoftQ(Alternating):
    """Alternating quantization and low-rank fit, W ≈ Ŵ + s·BA, for any quantizer, rank and scaling.

    min over Ŵ, A, B of ‖W − Ŵ − s·BA‖_F; with B₀A₀ = 0 and t = 1 … T (Li et al., 2024, LoftQ, Algorithm 1, which has
    s = 1):

        Ŵ_t = Q(W − s·B_{t−1}A_{t−1}),    s·B_tA_t = the best rank-r part of W − Ŵ_t.

    Ŵ_t is the base as it will be reloaded: packed, decoded, rounded to the dtype that the layer computes with. Only the
    product s·BA enters, so that the iterates, and the residuals, are the same at every s; how s lies in A and B is said
    at `low_rank.Factors.split`. The alternation need not descend: the iterate of least residual is kept, the zero
    start being iterate 0, so that more iterations are never worse, and nothing is worse than the zero start. It ends
    early where a base repeats, since all that follows would. A base without error starts as the zero start does.

    Notes of a start: `svd_error`, the largest stated error of its fits (`low_rank.best`; 0 where all were exact);
    `svd_exact`, how many were exact; `repeated`, the iteration whose base was the one before; of a layer that was
    calibrated, `output_error`, relative, and `base_…`, what the base's initializer says of the weight it was given.

    A `base` that compensates errors is given the changed weight in each iteration (our choice: it is still this norm
    that the fit and the choice of the iterate go by). Iterate 0 is then that base with B = 0, whose residual is above
    Q(W)'s. Options, and what is refused, as at `fitting.Alternating`; LoftQ's experiments take T = 5.
    """

    name = "loftq"

    iterations: int = 5

    @full_float32()
    def initialize(self, given: Given) -> Start:
        """The best iterate; `residuals` has one a iteration, after the zero start's.

        Raises:
            InputError: a rank outside 1 to min(shape), a scaling of 0, or a weight that the quantizer refuses.
        """
        rank, seeded = adapter_of(self, given)
        base = self._base
        made = base.make(given, given.weight)
        weight = given.weight.detach()  # float32 where it is computed with, and not kept: one matrix less is held
        whole = norm(weight.float()) or 1.0
        error = error_of(given, made.base)
        best = made
        a, b = now_a, now_b = seeded, seeded.new_zeros(weight.shape[0], rank)
        residuals = [norm(error) / whole]
        kept, repeated, exact, stated = 0, None, 0, 0.0
        guess = None
        for t in range(1, self.iterations + 1):
            if residuals[-1] == 0:
                break
            if t > 1:
                last = made
                del error
                made = base.make(given, torch.addmm(weight.float(), now_b, now_a, alpha=-given.scaling))
                if same(made.base, last.base):
                    repeated = t
                    break
                error = error_of(given, made.base)
            fit = low_rank.best(error, rank, method=self.svd, seed=given.seed, guess=guess)
            guess, exact, stated = fit.right.T, exact + fit.exact, max(stated, fit.error)
            now_a, now_b = fit.split(given.scaling, seeded)
            residuals.append(left_over(error, now_a, now_b, given.scaling) / whole)
            if residuals[-1] < residuals[kept]:
                kept, best, a, b = t, made, now_a, now_b
        notes = dict(best.notes) | {"svd_error": stated, "svd_exact": exact} | output_notes(given, best.base, a, b)
        if repeated is not None:
            notes["repeated"] = repeated
        return Start(best.base, a, b, given.scaling, tuple(residuals), kept, notes)
