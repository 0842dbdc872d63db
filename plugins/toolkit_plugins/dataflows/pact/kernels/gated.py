"""SiLU-multiply with its rounding and that of its inputs, and its gradients from what was kept of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolkit_plugins.dataflows.pact.kernels.launching import Shape, empty_rows, lying, parts, rows_of
from toolkit_plugins.dataflows.pact.kernels.tiles import (
    load,
    load_rows,
    place,
    place_words,
    round_tile,
    store_rows,
    values_of,
)
from toolkit_plugins.quantizers.nvfp4_rows import Rows


@triton.jit
def _sigmoid(x):
    """1/(1 + e⁻ˣ), right to a few units of float32's last place."""
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def gated_kernel(
    gate_ptr, up_ptr,
    gate_codes, gate_scales, gate_g, up_codes, up_scales, up_g, codes_ptr, scales_ptr, g_ptr, values_ptr,
    count, width, gate_stride, up_stride,
    KEEP: tl.constexpr, ROUND_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """h = silu(gate) ∘ up: ĥ and its NVFP4 rows, and those of gate and up."""
    row, column, there = place(count, width, ROWS, BLOCKS)
    gate = load(gate_ptr, gate_stride, 0.0, count, width, ROWS, BLOCKS)
    up = load(up_ptr, up_stride, 0.0, count, width, ROWS, BLOCKS)
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    if KEEP or ROUND_FIRST:
        codes, levels, step, scale, g = round_tile(
            gate, gate, False, gate_ptr.dtype.element_ty.primitive_bitwidth == 16
        )
        if KEEP:
            store_rows(gate_codes, gate_scales, gate_g, codes, gate, scale, g, count, width, ROWS, BLOCKS)
        if ROUND_FIRST:
            gate = values_of(levels, gate, step).to(dtype).to(tl.float32)
        codes, levels, step, scale, g = round_tile(up, up, False, up_ptr.dtype.element_ty.primitive_bitwidth == 16)
        if KEEP:
            store_rows(up_codes, up_scales, up_g, codes, up, scale, g, count, width, ROWS, BLOCKS)
        if ROUND_FIRST:
            up = values_of(levels, up, step).to(dtype).to(tl.float32)
    h = gate * _sigmoid(gate) * up
    codes, levels, step, scale, g = round_tile(h, h, False, False)
    store_rows(codes_ptr, scales_ptr, g_ptr, codes, h, scale, g, count, width, ROWS, BLOCKS)
    tl.store(values_ptr + row * width + column, values_of(levels, h, step).to(dtype), mask=there)


@triton.jit
def gated_gradient_kernel(
    gradient_ptr, gate_ptr, gate_scales, gate_g, up_ptr, up_scales, up_g, dgate_ptr, dup_ptr,
    count, width, stride, gate_stride, up_stride,
    PACKED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """∂gate = ∂h ∘ up ∘ σ(1 + gate·(1 − σ)), ∂up = ∂h ∘ gate ∘ σ."""
    row, column, there = place_words(count, width, ROWS, WORDS)
    gradient = tl.load(gradient_ptr + row * stride + column, mask=there, other=0.0).to(tl.float32)
    if PACKED:
        gate = load_rows(gate_ptr, gate_scales, gate_g, count, width, ROWS, WORDS)
        up = load_rows(up_ptr, up_scales, up_g, count, width, ROWS, WORDS)
    else:
        gate = tl.load(gate_ptr + row * gate_stride + column, mask=there, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * up_stride + column, mask=there, other=0.0).to(tl.float32)
    share = _sigmoid(gate)
    dgate = gradient * up * share * (1.0 + gate * (1.0 - share))
    dtype: tl.constexpr = dgate_ptr.dtype.element_ty
    tl.store(dgate_ptr + row * width + column, dgate.to(dtype), mask=there)
    tl.store(dup_ptr + row * width + column, (gradient * gate * share).to(dtype), mask=there)


def gated(
    gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype, *, keep: bool, round_first: bool
) -> tuple[torch.Tensor, Rows, Rows | None, Rows | None]:
    """(ĥ, its rows, those of gate and up) of matrices (M, K) whose rows may lie apart; `Execution.gated`."""
    gate, up = lying(gate), lying(up)
    shape = Shape(*gate.shape)
    made = [empty_rows(shape, gate.device) if kept else (None, None, None) for kept in (keep, keep, True)]
    values = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if values.numel():
        with torch.cuda.device_of(values):
            gated_kernel[shape.grid](
                gate, up, *made[0], *made[1], *made[2], values,
                shape.count, shape.width, gate.stride(0), up.stride(0),
                KEEP=keep, ROUND_FIRST=round_first, ROWS=shape.rows, BLOCKS=shape.blocks, num_warps=shape.warps(),
            )  # fmt: skip
    of_gate, of_up = (rows_of(each, shape.width) if keep else None for each in made[:2])
    return values, rows_of(made[2], shape.width), of_gate, of_up


def gated_gradient(
    gradient: torch.Tensor, gate: Rows | torch.Tensor, up: Rows | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(∂gate, ∂up) (M, K) from what was kept of both in one form; `Execution.gated_gradient`."""
    gradient = lying(gradient)
    shape = Shape(*gradient.shape)
    packed = isinstance(gate, Rows)
    if packed:
        kept, strides = (*parts(gate), *parts(up)), (0, 0)
    else:
        gate, up = lying(gate), lying(up)
        kept, strides = (gate, None, None, up, None, None), (gate.stride(0), up.stride(0))
    found = [torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device) for _ in range(2)]
    if gradient.numel():
        with torch.cuda.device_of(gradient):
            gated_gradient_kernel[shape.grid](
                gradient, *kept, *found, shape.count, shape.width, gradient.stride(0), *strides,
                PACKED=packed, ROWS=shape.rows, WORDS=2 * shape.blocks, num_warps=shape.warps(),
            )  # fmt: skip
    return found[0], found[1]
