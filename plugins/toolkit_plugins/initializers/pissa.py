"""PiSSA over a quantized base."""

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
class PiSSA(Alternating):
    """The principal part of the weight in the adapter, the rest quantized: QPiSSA.

    s·B₁A₁ = the best rank-r part of W, Ŵ_t = Q(W − s·B_tA_t), s·B_{t+1}A_{t+1} = the best rank-r part of W − Ŵ_t
    (Meng et al., 2024, PiSSA, §3 and §4, Algorithm of QPiSSA-T-iters; s = 1 there). The product s·BA is the same at
    every s; how s lies in A and B is said at `low_rank.Factors.split`. The iterate of least residual is kept (our
    choice) among those with t ≥ 1: it is the principal part that is asked for, even where the zero start, whose
    residual comes first, is closer to W. Options, and what is refused, as at `fitting.Alternating`; PiSSA's own default
    is T = 1, its QPiSSA experiments take 5.
    """

    name = "pissa"

    @full_float32()
    def initialize(self, given: Given) -> Start:
        """The best iterate; `residuals` has the zero start's first, and then one a iteration.

        Raises:
            InputError: a rank outside 1 to min(shape), a scaling of 0, or a weight that the quantizer refuses.
        """
        rank, seeded = adapter_of(self, given)
        base = self._base
        made = base.make(given, given.weight)
        weight = given.weight.detach().float()
        whole = norm(weight) or 1.0
        residuals = [norm(error_of(given, made.base)) / whole]
        target, guess, exact, stated = weight, None, 0, 0.0
        kept, best = 0, None
        for t in range(1, self.iterations + 1):
            fit = low_rank.best(target, rank, method=self.svd, seed=given.seed, guess=guess)
            guess, exact, stated = fit.right.T, exact + fit.exact, max(stated, fit.error)
            a, b = fit.split(given.scaling, seeded)
            last, made = made, base.make(given, torch.addmm(weight, b, a, alpha=-given.scaling))
            if t > 1 and same(made.base, last.base):
                break
            target = error_of(given, made.base)
            residuals.append(left_over(target, a, b, given.scaling) / whole)
            if best is None or residuals[-1] < residuals[kept]:
                kept, best = t, (made, a, b)
        assert best is not None
        made, a, b = best
        notes = dict(made.notes) | {"svd_error": stated, "svd_exact": exact} | output_notes(given, made.base, a, b)
        return Start(made.base, a, b, given.scaling, tuple(residuals), kept, notes)
