"""Standard LoRA's start: the base as it is quantized, and an adapter that adds nothing."""

from __future__ import annotations

from toolkit.interfaces import Given, Initializer, Start


class Zero(Initializer):
    """Ŵ = Q(W), A the seeded one, B = 0: the model starts as its quantized base (Hu et al., 2022, §4.1).

    Nothing is fitted, so that any rank will do, also one above min(out, in).
    """

    name = "zero"
    plain = True
    needs_rank = False

    def initialize(self, given: Given) -> Start:
        """The start; its one residual is the quantization error, ‖W − Q(W)‖_F/‖W‖_F."""
        import torch

        base = given.quantizer.quantize(given.weight)
        exact = given.weight.detach().float()
        error = (exact - base.dequantize(given.dtype).float()).double().norm()
        norm = exact.double().norm()
        b = None if given.rank is None else torch.zeros(exact.shape[0], given.rank, device=exact.device)
        return Start(base, given.A, b, given.scaling, (float(error / norm) if norm else 0.0,))
