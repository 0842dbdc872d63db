"""PEFT's own LoftQ, to compare with: it leaves the scaling out."""

from __future__ import annotations

import dataclasses

import torch

from toolkit.errors import InputError
from toolkit.interfaces import Given, Quantizer, Start
from toolkit.weights.precision import full_float32
from toolkit_plugins.initializers.fitting import Base, Iterated, adapter_of, check_rank, error_of, left_over, norm


@dataclasses.dataclass(frozen=True)
class LoftQPEFT(Iterated):
    """LoftQ through `peft.utils.loftq_utils`, a peer for controls: it fits W ≈ Ŵ + BA, and the layer computes Ŵ + s·BA.

    On CUDA this is PEFT's `loftq_init`. That function sends every weight to CUDA; elsewhere the same steps are taken
    with what it calls: bitsandbytes' `quantize_4bit` (NF4, blocks of 64, float32 maxima) and `dequantize_4bit`, and
    PEFT's `_low_rank_decomposition`, a full SVD in float32. The dense base that PEFT leaves holds values of NF4, which
    the plan's quantizer packs (their codes and maxima come out the same; with double quantization the maxima are
    rounded once more, as they are when bitsandbytes loads such a base). The last iterate is kept, as PEFT does; its
    residual, after the zero start's, is that of the layer as it computes, s included. `iterations` is PEFT's
    `loftq_iter`.
    """

    name = "loftq-peft"

    def check(self, shape: tuple[int, int], quantizer: Quantizer, rank: int | None) -> None:
        """Refuses a rank outside 1 to min(shape), and any quantizer but NF4 in blocks of 64, the only one PEFT fits."""
        check_rank(self, shape, rank)
        if quantizer.name != "nf4" or quantizer.options["block"] != 64:
            raise InputError(f"PEFT's LoftQ fits NF4 in blocks of 64 only; found {quantizer.key}: use loftq")

    @full_float32()
    def initialize(self, given: Given) -> Start:
        """The start.

        Raises:
            InputError: a rank outside 1 to min(shape), another quantizer, a scaling of 0, or a weight that is not
                finite.
        """
        rank, _ = adapter_of(self, given)
        self.check((given.weight.shape[0], given.weight.shape[1]), given.quantizer, rank)
        base = Base.of("zero")
        zero = error_of(given, base.make(given, given.weight).base)
        weight = given.weight.detach().float()
        whole = norm(weight) or 1.0
        dense, a, b = peft_loftq(weight, rank, self.iterations)
        made = base.make(given, dense)
        a, b = a.contiguous(), b.contiguous()
        residual = left_over(error_of(given, made.base), a, b, given.scaling) / whole
        return Start(made.base, a, b, given.scaling, (norm(zero) / whole, residual), 1)


def peft_loftq(weight: torch.Tensor, rank: int, iterations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(Ŵ dense in the weight's dtype, A, B), as `loftq_init(weight, num_bits=4, …)` answers.

    Raises:
        InputError: PEFT or bitsandbytes is not installed.
    """
    try:
        from bitsandbytes import functional
        from peft.utils import loftq_utils
    except ImportError as error:
        raise InputError(f"PEFT's LoftQ needs peft and bitsandbytes: {error}") from None
    if weight.device.type == "cuda":
        return loftq_utils.loftq_init(weight, num_bits=4, reduced_rank=rank, num_iter=iterations)
    exact = weight.float()
    rest = exact
    for _ in range(iterations):
        # flat, as the blocks lie: given rows that are no whole number of blocks, bitsandbytes' CPU kernel reads the
        # wrong maxima (0.50.2)
        codes, state = functional.quantize_4bit(
            rest.reshape(-1), blocksize=64, quant_type="nf4", compress_statistics=False
        )
        dense = functional.dequantize_4bit(codes, state).view_as(exact)
        found = loftq_utils._low_rank_decomposition(exact - dense, reduced_rank=rank)
        a, b = found["R"], found["L"]
        rest = exact - b @ a
    return dense.to(weight.dtype), a, b
