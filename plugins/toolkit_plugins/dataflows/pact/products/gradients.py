"""Output gradients as codes and scales, for products that take those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from toolkit_plugins.dataflows.pact.execution import Execution
    from toolkit_plugins.quantizers.nvfp4_rows import Rows


def rounded(run: Execution, gradient: torch.Tensor, how: str) -> Rows:
    """NVFP4 of each row, to `nearest`, or `stochastic` with noise drawn in the kernel from the device's generator."""
    if how == "nearest":
        return run.quantize(gradient)
    from toolkit_plugins.dataflows.pact.kernels.quantize import quantize

    return quantize(gradient, seed=torch.randint(2**31 - 1, (1,), device=gradient.device))[0]
