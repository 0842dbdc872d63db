"""Exact products: the weight is unpacked without its tensor scale, which the library applies before the one rounding.

    y = g_w·(x̂·Uᵀ) + b,   ∂x = g_w·(ĝ·U)        U = s·e2m1(code), exact in 16 bit

x̂ and U are exact in the compute dtype (`unpacking`), products of two of their values are exact in float32, and sums are
float32: what is rounded is what `reference` rounds, in another order of additions. Where `shapes` knows that it is
faster, one kernel unpacks and multiplies (`fused`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from toolkit_plugins.dataflows.pact.products import fused, shapes
from toolkit_plugins.dataflows.pact.products.factors import global_scale
from toolkit_plugins.dataflows.pact.products.unpacking import unpacked

if TYPE_CHECKING:
    from toolkit.interfaces import Packed
    from toolkit_plugins.dataflows.pact.weights import PactLinear


def product(values: torch.Tensor, layer: PactLinear, dtype: torch.dtype) -> torch.Tensor:
    """x̂·Ŵᵀ + b, (M, out) in `dtype`.

    Args:
        values: x̂ (M, in) in `dtype`.
    """
    packed = layer.packed
    if _fuses(values, packed):
        return fused.product(values, layer, dtype)
    return _multiply(values, unpacked(packed, dtype).mT, global_scale(layer, "forward", packed), layer.bias)


def input_gradient(values: torch.Tensor, layer: PactLinear, dtype: torch.dtype) -> torch.Tensor:
    """ĝ·W̃, (M, in) in `dtype`; W̃ᵀ is unpacked from the copy for backward, or W̃ = Ŵ where there is none.

    Args:
        values: ĝ (M, out) in `dtype`, or a gradient that was not rounded.
    """
    packed = layer.packed if layer.transposed is None else layer.transposed.packed
    if _fuses(values, packed):
        return fused.input_gradient(values, layer, dtype)
    if layer.transposed is None:
        return _multiply(values, unpacked(packed, dtype), global_scale(layer, "forward", packed), None)
    return _multiply(values, unpacked(packed, dtype).mT, global_scale(layer, "backward", packed), None)


def _fuses(values: torch.Tensor, packed: Packed) -> bool:
    if values.device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(values.device)
    return shapes.fused(capability, tuple(packed.shape), len(values))


def _multiply(x: torch.Tensor, u: torch.Tensor, g: float, bias: torch.Tensor | None) -> torch.Tensor:
    """g·(x·u) + b, summed in float32, rounded once."""
    if x.device.type != "cuda":
        wide = (x.float() @ u.float()) * g
        return (wide if bias is None else wide + bias.float()).to(u.dtype)
    x = x.to(u.dtype)
    with _summed_in_float32(u.dtype):
        if bias is None:
            y = x.new_empty(x.shape[0], u.shape[1])
            return torch.addmm(y, x, u, beta=0, alpha=g, out=y)  # beta 0: what y holds is not read
        return torch.addmm(bias.to(u.dtype), x, u, alpha=g)


@contextlib.contextmanager
def _summed_in_float32(dtype: torch.dtype) -> Iterator[None]:
    """No sums or partial sums in 16 bit, which U without its scale could also overflow in float16; no TF32."""
    matmul = torch.backends.cuda.matmul
    asked = {
        torch.float16: {"allow_fp16_reduced_precision_reduction": False, "allow_fp16_accumulation": False},
        torch.bfloat16: {"allow_bf16_reduced_precision_reduction": False},
        torch.float32: {"fp32_precision": "ieee"},
    }[dtype]
    before = {name: getattr(matmul, name) for name in asked}
    try:
        for name, value in asked.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
