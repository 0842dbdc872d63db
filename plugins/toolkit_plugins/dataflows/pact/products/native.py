"""Products by Blackwell's FP4 matrix instruction: the codes and their scales as they are, sums in float32.

    y = g_x·g_w·Σ (s·code)(s·code) + b

They are `reference`'s products in another order of additions. PyTorch's `scaled_mm` computes them where it is there,
and a Triton kernel elsewhere. The library takes one tensor scale an operand and not one a row: rows are multiplied by
their g afterwards, which is exact, g being a power of two; with a bias, or a dtype of less range than bfloat16, its
result is float32 until then, so that y is rounded once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from toolkit_plugins.dataflows.pact.products.aligned import aligned
from toolkit_plugins.dataflows.pact.products.factors import kept
from toolkit_plugins.dataflows.pact.products.swizzled import swizzled
from toolkit_plugins.dataflows.pact.products.unpacking import BLOCK, unpacked_plainly

if TYPE_CHECKING:
    from toolkit.interfaces import Packed
    from toolkit_plugins.dataflows.pact.weights import PactLinear
    from toolkit_plugins.quantizers.nvfp4_rows import Rows

ALIGNED = 32
"""Both dimensions of what the library multiplies, in values: 16 bytes of codes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Laid:
    """A matrix as the library takes it, padded with zeros to multiples of 32 along the columns.

    Attributes:
        codes: uint8 (rows, columns/2).
        scales: E4M3, `swizzled`.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def laid(codes: torch.Tensor, scales: torch.Tensor, *, rows: int = 1) -> Laid:
    """Codes (R, 8·blocks) and scales (R, blocks) for the library; `rows`: what R is padded to a multiple of.

    The codes are not copied where nothing is padded.
    """
    more, odd = -len(codes) % rows, scales.shape[1] % (ALIGNED // BLOCK)
    if more or odd:
        codes = torch.nn.functional.pad(codes, (0, odd * BLOCK // 2, 0, more))
        bits = torch.nn.functional.pad(scales.view(torch.uint8), (0, odd, 0, more))
        scales = bits.view(torch.float8_e4m3fn)
    return Laid(codes, swizzled(scales))


def product(rows: Rows, layer: PactLinear, dtype: torch.dtype) -> torch.Tensor:
    """x̂·Ŵᵀ + b, (M, out) in `dtype`.

    Args:
        rows: x̂ (M, in).
    """
    return _multiply(rows, layer, "forward", layer.packed, layer.bias, dtype)


def input_gradient(rows: Rows, layer: PactLinear, dtype: torch.dtype) -> torch.Tensor:
    """ĝ·W̃, (M, in) in `dtype`, from the copy for backward; the forward copy's blocks lie across the sum.

    Args:
        rows: ĝ (M, out).
    """
    return _multiply(rows, layer, "backward", layer.transposed.packed, None, dtype)


def library() -> bool:
    """Whether the installed PyTorch offers NVFP4 products."""
    functional = torch.nn.functional
    return all(hasattr(functional, name) for name in ("scaled_mm", "ScalingType", "SwizzleType"))


def _multiply(
    rows: Rows, layer: PactLinear, name: str, packed: Packed, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    codes, scales = aligned(layer, name, packed)
    g, width = packed.tensors["global_scale"], packed.shape[0]
    if rows.codes.device.type != "cuda":
        return _plainly(rows, codes, scales, g, bias, dtype)
    if not library():
        from toolkit_plugins.dataflows.pact.products.native_kernel import multiply

        return multiply((rows.codes, rows.scales, rows.g), (codes, scales, g), bias, width, dtype)
    weight = kept(layer, f"{name} for scaled_mm", packed, lambda: laid(codes, scales, rows=ALIGNED))
    return finished(_library(laid(rows.codes, rows.scales), weight, g, bias, dtype)[:, :width], rows.g, bias, dtype)


def _library(left: Laid, right: Laid, g: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """g·Σ (s·code)(s·code), in float32 where more is to come before the rounding."""
    functional = torch.nn.functional
    recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    swizzle = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
    return functional.scaled_mm(
        left.codes.view(torch.float4_e2m1fn_x2),
        right.codes.view(torch.float4_e2m1fn_x2).mT,
        scale_a=[left.scales, torch.ones_like(g)],
        scale_recipe_a=recipe,
        scale_b=[right.scales, g],
        scale_recipe_b=recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=torch.bfloat16 if bias is None and dtype == torch.bfloat16 else torch.float32,
    )


def finished(y: torch.Tensor, g: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows of y by their g, and the bias, rounded to `dtype`.

    Args:
        y: bfloat16 without a bias, else float32.
        g: float32 (M,), powers of two.
    """
    scaled = y * g.to(y.dtype)[:, None]
    return (scaled if bias is None else scaled + bias.float()).to(dtype)


def _plainly(
    rows: Rows,
    codes: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """In plain tensor operations, for devices without the instruction."""
    left = unpacked_plainly(rows.codes.reshape(-1), rows.scales, (len(rows.codes), rows.scales.shape[1] * BLOCK))
    right = unpacked_plainly(codes.reshape(-1), scales, (len(codes), scales.shape[1] * BLOCK))
    return finished((left @ right.mT) * g, rows.g, bias, dtype)
