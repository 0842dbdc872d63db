"""Standard LoRA's start: the base as it is quantized, and an adapter that adds nothing."""

from __future__ import annotations

from toolkit.interfaces import Given, Initializer, Start
from toolkit_plugins.initializers.fitting import no_change, residual_of


class Zero(Initializer):
    """Ŵ = Q(W), A the seeded one, B = 0: the model starts as its quantized base (Hu et al., 2022, §4.1).

    Nothing is fitted, so that any rank will do, also one above min(out, in).
    """

    name = "zero"
    plain = True
    needs_rank = False

    def initialize(self, given: Given) -> Start:
        """The start; its one residual is the quantization error, ‖W − Q(W)‖_F/‖W‖_F.

        Raises:
            InputError: a weight that the quantizer refuses, or a base too large for the dtype that it is decoded to.
        """
        base = given.quantizer.quantize(given.weight)
        return Start(base, given.A, no_change(given), given.scaling, (residual_of(given, base),))
