"""Triton kernels of the products, bit for bit against plain tensor operations: on a GPU, or in Triton's interpreter.

The interpreter must be switched on before triton is imported, so that without a GPU these tests run in a process of
their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from toolkit_plugins.quantizers.nvfp4 import NVFP4
from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows
from torch import nn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = importlib.util.find_spec("triton") is not None
compiled = pytest.mark.skipif(
    not TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="run by the test below in Triton's interpreter"
)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this process runs the kernels itself")
def test_kernels_pass_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", __file__, "-q", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "--import-mode=importlib"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def weight(rows: int, columns: int, seed: int = 0, size: float = 0.02):
    generator = torch.Generator().manual_seed(seed)
    return NVFP4().quantize((size * torch.randn(rows, columns, generator=generator)).to(DEVICE))


def every_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a matrix (126·16, 32): every code under every positive scale beside every largest one."""
    pairs = torch.arange(16, dtype=torch.uint8).view(8, 2)
    codes = (pairs[:, 0] | pairs[:, 1] << 4).repeat(126 * 126, 2)
    each = torch.arange(1, 127, dtype=torch.uint8)
    scales = torch.cartesian_prod(each, each)
    return codes.to(DEVICE), scales.contiguous().view(torch.float8_e4m3fn).to(DEVICE)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 80), (1, 16), (7, 13), (33, 50), (300, 96), (5, 1)])
def test_unpacked_weights(shape, dtype):
    from toolkit_plugins.dataflows.pact.products.unpack_kernel import unpack_into
    from toolkit_plugins.dataflows.pact.products.unpacking import unpacked_plainly

    packed = weight(*shape)
    codes, scales = packed.tensors["codes"], packed.tensors["scales"]
    memory = torch.full((shape[0] * shape[1] + 64,), 7.0, dtype=dtype, device=DEVICE)
    out = unpack_into(memory[: shape[0] * shape[1]].view(shape), codes, scales)
    expected = unpacked_plainly(codes, scales, shape).to(dtype)
    assert torch.equal(out, expected) and torch.equal(out.signbit(), expected.signbit())
    assert torch.all(memory[shape[0] * shape[1] :] == 7)  # nothing is written beyond it


@compiled
def test_every_code_under_every_scale():
    from toolkit_plugins.dataflows.pact.products.unpack_kernel import unpack_into
    from toolkit_plugins.dataflows.pact.products.unpacking import unpacked_plainly

    pairs = torch.arange(16, dtype=torch.uint8).view(8, 2)
    codes = (pairs[:, 0] | pairs[:, 1] << 4).repeat(126).to(DEVICE)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None].to(DEVICE)
    out = unpack_into(torch.empty(126, 16, dtype=torch.bfloat16, device=DEVICE), codes, scales)
    assert torch.equal(out.float(), unpacked_plainly(codes, scales, (126, 16)))


@compiled
def test_e4m3_of_every_code_under_every_scale_beside_every_largest_scale():
    from toolkit_plugins.dataflows.pact.products import recast

    codes, scales = every_pair()
    step = 1 if DEVICE == "cuda" else 121
    codes, scales = codes[::step].contiguous(), scales.view(torch.uint8)[::step].contiguous().view(scales.dtype)
    same_bytes(codes, scales, torch.linspace(0.5, 2, len(codes), device=DEVICE), recast)


def same_bytes(codes, scales, g, recast):
    from toolkit_plugins.dataflows.pact.products.recast_kernel import recast_rows_into

    plain = recast._plainly(codes, scales, g, len(codes) + -len(codes) % 16)
    out = torch.full(plain.values.shape, 3.0, device=DEVICE).to(torch.float8_e4m3fn)
    row_scales = recast_rows_into(out, codes, scales, g)
    assert torch.equal(out.view(torch.uint8), plain.values.view(torch.uint8))
    assert torch.equal(row_scales, plain.scales)


@compiled
@pytest.mark.parametrize("shape", [(3, 16), (16, 37), (5, 4112)])
def test_e4m3_rows_of_activations_and_weights(shape):
    from toolkit_plugins.dataflows.pact.products import recast
    from toolkit_plugins.dataflows.pact.products.aligned import aligned

    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 3, shape[0])[:, None]
    rows = quantize_rows(x.to(DEVICE))
    same_bytes(rows.codes, rows.scales, rows.g, recast)
    packed = weight(*shape)
    same_bytes(*aligned(nn.Module(), "forward", packed), packed.tensors["global_scale"], recast)


@compiled
@pytest.mark.parametrize("shape", [(3, 16), (70, 37), (16, 160), (130, 144)])
def test_e4m3_columns_of_weights(shape):
    from toolkit_plugins.dataflows.pact.products import recast
    from toolkit_plugins.dataflows.pact.products.aligned import aligned
    from toolkit_plugins.dataflows.pact.products.recast_kernel import recast_columns_into

    packed = weight(*shape)
    codes, scales = aligned(nn.Module(), "forward", packed)
    tops = scales.view(torch.uint8).amax(0)
    plain = recast._plainly_transposed(codes, scales, packed.tensors["global_scale"], tops)
    out = torch.full(plain.values.shape, 3.0, device=DEVICE).to(torch.float8_e4m3fn)
    row_scales = recast_columns_into(out, codes, scales, packed.tensors["global_scale"], tops)
    assert torch.equal(out.view(torch.uint8), plain.values.view(torch.uint8))
    assert torch.equal(row_scales, plain.scales)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("shape", [(5, 40, 37), (70, 130, 160)])
def test_the_product_that_unpacks_in_registers(shape, down, dtype):
    from toolkit_plugins.dataflows.pact.products.aligned import aligned
    from toolkit_plugins.dataflows.pact.products.fused_kernel import multiply

    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16 numbers")
    count, rows, columns = shape
    packed = weight(rows, columns, size=3.0)
    codes, scales = aligned(nn.Module(), "forward", packed)
    depth, width = (rows, columns) if down else (columns, rows)
    x = quantize_rows(torch.randn(count, depth, generator=torch.Generator().manual_seed(2)).to(DEVICE)).values(dtype)
    bias = None if down else torch.linspace(-9, 9, width, device=DEVICE)
    w = packed.dequantize(torch.float32).double()
    expected = x.double() @ (w if down else w.mT) + (0 if bias is None else bias.double())
    y = multiply(x, codes, scales, packed.tensors["global_scale"], bias, width, down=down)
    assert y.dtype == dtype
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=rounding, atol=3e-6 * expected.abs().max().item())
