"""Products of E4M3 numbers, about 2% off the NVFP4 products; see `recast` for what is lost, and why so little.

    y = x̂₈·Ŵ₈ᵀ + b,   ∂x = ĝ₈·W̃₈        ·₈: `recast`, a scale a row of x̂ and ĝ, and a row of Ŵ and of W̃ᵀ

The weight is recast in each product, from 4.5 to 8 bits a value, into memory that is used again. Results are bfloat16,
which the library gives, and are then cast to the compute dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit_plugins.dataflows.pact.products import recast
from toolkit_plugins.dataflows.pact.products.aligned import aligned

if TYPE_CHECKING:
    from toolkit_plugins.dataflows.pact.weights import PactLinear
    from toolkit_plugins.quantizers.nvfp4_rows import Rows


def product(rows: Rows, layer: PactLinear, dtype: torch.dtype) -> torch.Tensor:
    """x̂₈·Ŵ₈ᵀ + b, (M, out) in `dtype`.

    Args:
        rows: x̂ (M, in).
    """
    packed = layer.packed
    codes, scales = aligned(layer, "forward", packed)
    weight = recast.recast(codes, scales, packed.tensors["global_scale"], held=True, padded=True)
    return recast.product(_recast(rows), weight, layer.bias, layer.out_features).to(dtype)


def input_gradient(rows: Rows, layer: PactLinear, dtype: torch.dtype) -> torch.Tensor:
    """ĝ₈·W̃₈, (M, in) in `dtype`; without a copy for backward, 16 columns of Ŵ share a scale.

    Args:
        rows: ĝ (M, out).
    """
    if layer.transposed is None:
        packed = layer.packed
        weight = recast.recast_transposed(*aligned(layer, "forward", packed), packed.tensors["global_scale"])
    else:
        packed = layer.transposed.packed
        codes, scales = aligned(layer, "backward", packed)
        weight = recast.recast(codes, scales, packed.tensors["global_scale"], held=True, padded=True)
    return recast.product(_recast(rows), weight, None, layer.in_features).to(dtype)


def _recast(rows: Rows) -> recast.Recast:
    return recast.recast(rows.codes, rows.scales, rows.g)
