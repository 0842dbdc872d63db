"""NVFP4 values as E4M3 numbers under one scale a row, for tensor cores that have E4M3 and no E2M1.

    x̂ = g·s·e2m1(code)  →  g·σ·E4M3(s·e2m1(code)/σ),   σ = 1.5·2ᵏ, the least k for which no value lies beyond 448

Under 1.5·2ᵏ the codes 1.5, 3 and 6 are exact, whatever s is, since s is an E4M3 number itself; ½, 1, 2 and 4 are
rounded once. Blocks' largest values have the code 6, so that what is exact is what is large. A larger k only moves
small values into E4M3's subnormal numbers; another mantissa makes 6 inexact. Relative error of a product of two such
operands, against the exact NVFP4 product, K = 2048 (`tests/plugins/dataflows/test_products_fp8.py` holds the bounds):

    data             1.5·2ᵏ   2ᵏ      1.25·2ᵏ   1.75·2ᵏ   amax/448
    Gaussian         .020     .030    .038      .043      .043
    Laplace          .018     .032    .037      .043      .038
    Student, 3 d.f.  .016     .033    .037      .043      .036
    Student, 2 d.f.  .010     .033    .038      .048      .027

The paper computes NVFP4 products; this is our choice for GPUs before them.
"""

from __future__ import annotations

import dataclasses

import torch

from toolkit_plugins.dataflows.pact.products.scratch import scratch
from toolkit_plugins.dataflows.pact.products.unpacking import unpacked_plainly

BLOCK = 16
MANTISSA = 1.5


@dataclasses.dataclass(frozen=True, eq=False)
class Recast:
    """A matrix as E4M3 numbers under row scales.

    Attributes:
        values: float8_e4m3fn (rows, columns), both padded to multiples of 16 with zeros where asked for.
        scales: float32 (rows,).
    """

    values: torch.Tensor
    scales: torch.Tensor


def exponent(top: torch.Tensor) -> torch.Tensor:
    """k, int32, of the largest block scale of a row, an E4M3 byte: the least k with 6·s ≤ 448·1.5·2ᵏ.

    That is s ≤ 1.75·2ᵏ⁺⁶: one more than the exponent's where the mantissa is 1.875.
    """
    return (((top.int() & 127) + 1) >> 3) - 13


def recast(
    codes: torch.Tensor, scales: torch.Tensor, g: torch.Tensor, *, held: bool = False, padded: bool = False
) -> Recast:
    """The rows of a matrix.

    Args:
        codes: uint8 (rows, 8·blocks), two a byte, the first in the low half.
        scales: float8_e4m3fn (rows, blocks), positive.
        g: float32, one a row, or one.
        held: into `scratch`, else into new memory.
        padded: with rows of zeros to a multiple of 16.
    """
    rows, blocks = scales.shape
    many = rows + (-rows % BLOCK if padded else 0)
    if codes.device.type != "cuda":
        return _plainly(codes, scales, g, many)
    from toolkit_plugins.dataflows.pact.products.recast_kernel import recast_rows_into

    shape, device = (many, blocks * BLOCK), codes.device
    dtype = torch.float8_e4m3fn
    out = scratch(shape, dtype, device) if held else torch.empty(shape, dtype=dtype, device=device)
    return Recast(out, recast_rows_into(out, codes, scales, g))


def recast_transposed(codes: torch.Tensor, scales: torch.Tensor, g: torch.Tensor) -> Recast:
    """The columns of a weight (rows, 16·blocks) as rows, 16 of which share a scale; padded, in `scratch`.

    Args:
        g: float32, one.
    """
    rows, blocks = scales.shape
    tops = scales.view(torch.uint8).amax(0)
    if codes.device.type != "cuda":
        return _plainly_transposed(codes, scales, g, tops)
    from toolkit_plugins.dataflows.pact.products.recast_kernel import recast_columns_into

    out = scratch((blocks * BLOCK, rows + -rows % BLOCK), torch.float8_e4m3fn, codes.device)
    return Recast(out, recast_columns_into(out, codes, scales, g, tops))


def product(left: Recast, right: Recast, bias: torch.Tensor | None, width: int) -> torch.Tensor:
    """left·rightᵀ + b in bfloat16 (rows of left, width), summed in float32.

    Args:
        bias: (width,) in any dtype; rounded to bfloat16.
        width: rows of `right` that are not padding.
    """
    if bias is not None:
        more, bias = len(right.values) - width, bias.bfloat16()
        bias = torch.nn.functional.pad(bias, (0, more)) if more else bias
    if left.values.device.type != "cuda":
        y = (left.values.float() @ right.values.float().mT) * left.scales[:, None] * right.scales
        return (y if bias is None else y + bias.float()).bfloat16()[:, :width]
    y = torch._scaled_mm(
        left.values,
        right.values.mT,
        scale_a=left.scales[:, None],
        scale_b=right.scales[None, :],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,  # Hopper's fast sums have fewer bits than float32
    )
    return y[:, :width]


def _plainly(codes: torch.Tensor, scales: torch.Tensor, g: torch.Tensor, many: int) -> Recast:
    rows, blocks = scales.shape
    sigma = _sigma(scales.view(torch.uint8).amax(1))
    values = unpacked_plainly(codes.reshape(-1), scales, (rows, blocks * BLOCK)) / sigma[:, None]
    more = (0, 0, 0, many - rows)
    row_scales = torch.nn.functional.pad(sigma * g, more[2:], value=1.0)
    return Recast(torch.nn.functional.pad(values, more).to(torch.float8_e4m3fn), row_scales)


def _plainly_transposed(codes: torch.Tensor, scales: torch.Tensor, g: torch.Tensor, tops: torch.Tensor) -> Recast:
    rows, blocks = scales.shape
    sigma = _sigma(tops).repeat_interleave(BLOCK)
    values = unpacked_plainly(codes.reshape(-1), scales, (rows, blocks * BLOCK)).mT / sigma[:, None]
    return Recast(torch.nn.functional.pad(values, (0, -rows % BLOCK)).to(torch.float8_e4m3fn), sigma * g)


def _sigma(top: torch.Tensor) -> torch.Tensor:
    k = exponent(top)
    return torch.ldexp(torch.full_like(k, MANTISSA, dtype=torch.float32), k)
