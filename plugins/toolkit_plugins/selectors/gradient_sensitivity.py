"""The layers whose quantization the loss feels most, by gradients on a few training rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.interfaces import CalibratedSelector
from toolkit.records.profile import Profile
from toolkit.registry import registry

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass
class GradientSensitivity(CalibratedSelector):
    """Keep the layers with the largest squared gradient times squared quantization error.

    With E = W − Ŵ under `quantizer` and G_b the gradient of batch b's loss (mean over its predicted tokens) at the
    dense weights,

        s = Σ_ij F_ij·E_ij²        F_ij = 1/B · Σ_b G_b,ij²

    F is the diagonal of the empirical Fisher matrix of batches (of rows, where a batch is one row), in the place of
    the Hessian: ½s estimates what quantizing the layer adds to the loss. With `elementwise=false` the two factors are
    multiplied as sums, s = (Σ_ij F_ij/n)·(Σ_ij E_ij²) with n = out·in, which is HAWQ-V2's mean trace times
    ‖W − Ŵ‖² (Dong et al., 2020) with F for the Hessian. Both are sums and no means a weight, so that large
    layers count for more, as their quantization does. The gradient of batches of n tokens is about 1/√n of a token's:
    values of two batch sizes are not to be compared, their ranking is.

    The phone-NPU system of PACT's last page "selects precision by gradient sensitivity" and its public text gives no
    formula: this one is our choice. The data-driven baseline to the data-free `top-error`.

    Raises:
        InputError: the profile was not calibrated for it; while measuring: a weight that is quantized already or
            that the quantizer refuses, and a loss or gradient that is no finite number (layer named).
    """

    name = "gradient-sensitivity"

    quantizer: str = "nf4"
    elementwise: bool = True

    def measure(
        self,
        model: nn.Module,
        batches: Sequence[dict[str, torch.Tensor]],
        profile: Profile,
        progress: Callable[[int, int], None] | None = None,
    ) -> Sequence[float | None]:
        """s of each layer; None where no gradient reached it. E is of the model's weights in the dtype they have."""
        from toolkit.runs.gradients import layers_in, mean_over_batches

        quantizer = registry.make("quantizer", self.quantizer)
        layers = layers_in(model, profile)
        packed = {}
        for layer in layers:  # once: a packed weight is an eighth of its float32 error
            try:
                packed[layer.name] = quantizer.quantize(layer.weight())
            except InputError as error:
                raise InputError(f"layer {layer.name}: {error}") from None

        def sensitivity(layer: Any, gradient: torch.Tensor) -> torch.Tensor:
            kept = packed[layer.name]
            error = layer.weight().float() - quantizer.decode(kept.tensors, kept.shape).reshape(kept.shape)
            if self.elementwise:
                return (gradient * error).double().square().sum()
            return gradient.double().square().mean() * error.double().square().sum()

        return mean_over_batches(model, batches, layers, sensitivity, progress)
