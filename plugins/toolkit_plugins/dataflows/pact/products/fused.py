"""Exact products, the weight unpacked tile by tile in registers; the same signatures as `unpacked`, on CUDA alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit_plugins.dataflows.pact.products.aligned import aligned

if TYPE_CHECKING:
    from toolkit_plugins.dataflows.pact.weights import PactLinear


def product(values: torch.Tensor, layer: PactLinear, dtype: torch.dtype) -> torch.Tensor:
    """As `unpacked.product`, the bias added in float32 whatever its dtype is."""
    from toolkit_plugins.dataflows.pact.products.fused_kernel import multiply

    packed = layer.packed
    codes, scales = aligned(layer, "forward", packed)
    g = packed.tensors["global_scale"]
    return multiply(values.to(dtype), codes, scales, g, layer.bias, layer.out_features, down=False)


def input_gradient(values: torch.Tensor, layer: PactLinear, dtype: torch.dtype) -> torch.Tensor:
    """As `unpacked.input_gradient`."""
    from toolkit_plugins.dataflows.pact.products.fused_kernel import multiply

    down = layer.transposed is None
    packed = layer.packed if down else layer.transposed.packed
    codes, scales = aligned(layer, "forward" if down else "backward", packed)
    return multiply(values.to(dtype), codes, scales, packed.tensors["global_scale"], None, layer.in_features, down=down)
