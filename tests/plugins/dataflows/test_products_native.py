"""Blackwell's products without such a GPU: the scales' order, the padding, and what is done after the library."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.products import native
from toolkit_plugins.dataflows.pact.products.swizzled import swizzled
from toolkit_plugins.dataflows.pact.products.unpacking import unpacked_plainly
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.pact.weights import PactLinear
from toolkit_plugins.quantizers.nvfp4 import NVFP4
from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows


def linear(out, width, *, bias=None, dtype=torch.bfloat16, size=0.02) -> PactLinear:
    weight = size * torch.randn(out, width, generator=torch.Generator().manual_seed(out))
    return PactLinear(NVFP4().quantize(weight), bias, dtype, Settings(), weight)


def numbers(rows: int, columns: int) -> torch.Tensor:
    count = torch.arange(rows * columns) % 119 + 8
    return count.to(torch.uint8).view(rows, columns).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (300, 13), (256, 8), (129, 5)])
def test_scales_lie_as_torchao_lays_them(shape):
    utilities = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = numbers(*shape)
    expected = utilities.to_blocked(scales.view(torch.uint8))
    assert torch.equal(swizzled(scales).view(torch.uint8), expected)


@given(rows=st.integers(1, 200), blocks=st.integers(1, 9), at=st.integers(0, 10**6))
def test_every_scale_is_where_the_layout_puts_it(rows, blocks, at):
    scales = numbers(rows, blocks).view(torch.uint8)
    flat = swizzled(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
    row, block = at % rows, at // rows % blocks
    r, c, tiles = row % 128, block % 4, -(-blocks // 4)
    place = ((row // 128 * tiles + block // 4) * 32 + r % 32) * 16 + r // 32 * 4 + c
    assert flat[place] == scales[row, block]
    assert flat.numel() == -(-rows // 128) * 128 * tiles * 4
    assert flat.int().sum() == scales.int().sum()  # all else is zero


@pytest.mark.parametrize(("rows", "blocks"), [(32, 4), (33, 3), (5, 1)])
def test_padding_adds_zeros_and_nothing_is_copied_without(rows, blocks):
    codes = torch.randint(256, (rows, 8 * blocks), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = numbers(rows, blocks)
    laid = native.laid(codes, scales, rows=32)
    assert laid.codes.shape[0] % 32 == 0 and laid.codes.shape[1] % 16 == 0  # bytes: 32 values
    assert torch.equal(laid.codes[:rows, : 8 * blocks], codes)
    assert laid.codes.int().sum() == codes.int().sum()
    assert (laid.codes.data_ptr() == codes.data_ptr()) == (rows % 32 == 0 and blocks % 2 == 0)
    wide = torch.nn.functional.pad(scales.view(torch.uint8), (0, blocks % 2, 0, -rows % 32))
    assert torch.equal(laid.scales.view(torch.uint8), swizzled(wide.view(scales.dtype)).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(m=st.integers(1, 9), out=st.integers(1, 70), width=st.integers(1, 70), bias=st.booleans())
def test_the_plain_way_is_the_reference(dtype, m, out, width, bias):
    b = torch.randn(out, generator=torch.Generator().manual_seed(m)).to(dtype) if bias else None
    layer = linear(out, width, bias=b, dtype=dtype)
    x = quantize_rows(torch.randn(m, width, generator=torch.Generator().manual_seed(1)))
    gradient = torch.randn(m, out, generator=torch.Generator().manual_seed(2)).to(dtype)
    reference = Execution()
    pairs = (
        (native.product(x, layer, dtype), reference.product(x, layer, dtype)),
        (
            native.input_gradient(reference.quantize(gradient), layer, dtype),
            reference.input_gradient(gradient, layer, dtype),
        ),
    )
    for found, expected in pairs:
        assert found.dtype == dtype
        largest = expected.float().abs().max().item()
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5 * largest + 1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library_is_given_what_it_multiplies(monkeypatch, dtype, bias):
    """In the library's place, its arithmetic: tensors are read as it reads them, out of the order of their scales."""
    asked = {}

    def scaled_mm(a, b, *, scale_a, scale_b, output_dtype, **rest):
        asked.update(rest, dtype=output_dtype)
        left, right = a.view(torch.uint8), b.mT.view(torch.uint8)
        assert left.is_contiguous() and right.is_contiguous() and left.shape[1] % 16 == 0 and len(right) % 32 == 0
        wide = [
            unpacked_plainly(codes.reshape(-1), in_order(scales, len(codes), codes.shape[1] // 8), _wide(codes))
            for codes, scales in ((left, scale_a[0]), (right, scale_b[0]))
        ]
        return ((wide[0] @ wide[1].mT) * (scale_a[1] * scale_b[1])).to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    b = torch.randn(45, generator=torch.Generator().manual_seed(3)) if bias else None
    layer = linear(45, 48, bias=b, dtype=dtype, size=5.0)
    rows = quantize_rows(
        torch.logspace(-3, 3, 7)[:, None] * torch.randn(7, 48, generator=torch.Generator().manual_seed(4))
    )
    codes, scales = layer.packed.tensors["codes"].view(45, -1), layer.packed.tensors["scales"]
    g = layer.packed.tensors["global_scale"]
    y = native._library(native.laid(rows.codes, rows.scales), native.laid(codes, scales, rows=32), g, layer.bias, dtype)
    y = native.finished(y[:, :45], rows.g, layer.bias, dtype)
    expected = Execution().product(rows, layer, dtype)
    exact = {torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(y, expected, rtol=exact, atol=1e-5)
    assert asked["dtype"] == (torch.bfloat16 if dtype == torch.bfloat16 and not bias else torch.float32)
    recipe = [torch.nn.functional.ScalingType.BlockWise1x16, torch.nn.functional.ScalingType.TensorWise]
    assert asked["scale_recipe_a"] == asked["scale_recipe_b"] == recipe


def _wide(codes: torch.Tensor) -> tuple[int, int]:
    return codes.shape[0], 2 * codes.shape[1]


def in_order(flat: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Scales out of the library's order, by the formula, one at a time."""
    bits, tiles = flat.view(torch.uint8), -(-blocks // 4)
    found = torch.empty(rows, blocks, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            r = row % 128
            place = ((row // 128 * tiles + block // 4) * 32 + r % 32) * 16 + r // 32 * 4 + block % 4
            found[row, block] = bits[place]
    return found.view(torch.float8_e4m3fn)


def test_choosing_imports_no_triton():
    program = (
        "import sys, torch; from toolkit_plugins.dataflows.pact.choosing import choose;"
        "print(choose('auto', torch.device('cpu'))[0].name, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["reference", "False"], done.stdout
