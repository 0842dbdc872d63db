"""Products in E4M3: how far they are from the exact NVFP4 products, and that other scalings are further."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toolkit_plugins.dataflows.pact.products import fp8, recast
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.pact.weights import PactLinear
from toolkit_plugins.quantizers.nvfp4 import NVFP4
from toolkit_plugins.quantizers.nvfp4_rows import Rows, quantize_rows

M, OUT, IN = 64, 192, 512
DATA = {
    "gaussian": lambda *shape: torch.randn(*shape),
    "laplace": lambda *shape: torch.distributions.Laplace(0.0, 1.0).sample(shape),
    "student-3": lambda *shape: torch.distributions.StudentT(3.0).sample(shape),
    "student-2": lambda *shape: torch.distributions.StudentT(2.0).sample(shape),
    "channels": lambda *shape: torch.randn(*shape) * torch.where(torch.arange(shape[-1]) % 100 == 7, 30.0, 1.0),
}


def linear(weight, *, layouts="cached", bias=None, dtype=torch.bfloat16) -> PactLinear:
    return PactLinear(NVFP4().quantize(weight), bias, dtype, Settings(layouts=layouts), weight)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def backward_weight(layer: PactLinear) -> torch.Tensor:
    if layer.transposed is None:
        return layer.packed.dequantize(torch.float32).double()
    return layer.transposed.packed.dequantize(torch.float32).double().mT


def values_in_float64(rows: Rows) -> torch.Tensor:
    return rows.values().double()


@pytest.mark.parametrize("layouts", ["cached", "shared"])
@pytest.mark.parametrize("data", list(DATA))
def test_error_of_both_products_is_below_a_fortieth(data, layouts):
    torch.manual_seed(3)
    weight = DATA["gaussian" if data == "channels" else data]  # outliers are the activations'
    layer = linear(0.02 * weight(OUT, IN), layouts=layouts)
    x, gradient = quantize_rows(DATA[data](M, IN)), quantize_rows(1e-5 * DATA[data](M, OUT))
    y = fp8.product(x, layer, torch.bfloat16)
    dx = fp8.input_gradient(gradient, layer, torch.bfloat16)
    forward = relative(y, values_in_float64(x) @ layer.packed.dequantize(torch.float32).double().mT)
    backward = relative(dx, values_in_float64(gradient) @ backward_weight(layer))
    assert 0.002 < forward <= 0.025 and 0.002 < backward <= 0.025, (forward, backward)


def scaled(values: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return (values / sigma).clamp(-448, 448).to(torch.float8_e4m3fn).double() * sigma.double()


def sigma_of(values: torch.Tensor, mantissa: float | None) -> torch.Tensor:
    """mantissa·2ᵏ with the least k that holds a row's largest value, or amax/448."""
    top = values.abs().amax(-1, keepdim=True)
    return top / 448 if mantissa is None else mantissa * torch.exp2(torch.ceil(torch.log2(top / mantissa / 448)))


@pytest.mark.parametrize("data", ["gaussian", "laplace", "student-3", "student-2"])
def test_other_scalings_lose_more(data):
    torch.manual_seed(4)
    x = quantize_rows(DATA[data](M, IN))
    packed = NVFP4().quantize(0.02 * DATA[data](OUT, IN))
    w = packed.dequantize(torch.float32) / packed.tensors["global_scale"]
    exact = x.values().double() @ w.double().mT

    def lost(mantissa):
        u = x.values()
        product = scaled(u, sigma_of(u, mantissa)) @ scaled(w, sigma_of(w, mantissa)).mT
        return relative(product, exact)

    ours = lost(1.5)
    others = {mantissa: lost(mantissa) for mantissa in (None, 1.0, 1.125, 1.25, 1.375, 1.625, 1.75, 1.875)}
    assert ours <= 0.0215
    assert all(ours < 0.85 * other for other in others.values()), (ours, others)


def test_three_codes_are_exact_under_every_scale():
    scales = torch.arange(0x20, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    pairs = torch.tensor([3, 5, 7, 11, 13, 15, 0, 7], dtype=torch.uint8)  # 1.5, 3, 6, their negatives, 0, 6
    codes = (pairs[::2] | pairs[1::2] << 4).repeat(len(scales), 2)
    found = recast.recast(codes, scales, torch.tensor(1.0))
    levels = torch.tensor([1.5, 3, 6, -1.5, -3, -6, 0, 6] * 2)
    assert torch.equal(found.values.float() * found.scales[:, None], levels * scales.float())


@given(top=st.integers(8, 126))
def test_a_row_scale_is_the_least_that_holds_the_row(top):
    byte = torch.tensor([top], dtype=torch.uint8)
    k = recast.exponent(byte).item()
    largest = 6 * byte.view(torch.float8_e4m3fn).float().item()
    assert largest <= 448 * 1.5 * 2.0**k
    assert largest > 448 * 1.5 * 2.0 ** (k - 1)


@pytest.mark.parametrize("layouts", ["cached", "shared"])
@given(m=st.integers(1, 9), out=st.integers(1, 70), width=st.integers(1, 70), dtype=st.booleans())
def test_any_shape_and_bias(layouts, m, out, width, dtype):
    torch.manual_seed(m * out)
    kind, bias = (torch.float16 if dtype else torch.bfloat16), torch.randn(out)
    layer = linear(0.02 * torch.randn(out, width), layouts=layouts, bias=bias.to(kind), dtype=kind)
    x, gradient = quantize_rows(torch.randn(m, width)), quantize_rows(torch.randn(m, out))
    y, dx = fp8.product(x, layer, kind), fp8.input_gradient(gradient, layer, kind)
    assert y.dtype == dx.dtype == kind and y.shape == (m, out) and dx.shape == (m, width)
    w, b = layer.packed.dequantize(torch.float32).double(), layer.bias.double()
    # no sum is off by more than 1/16 of the sum of its terms' sizes: each factor is rounded to four bits
    size = values_in_float64(x).abs() @ w.abs().mT
    assert torch.all((y.double() - (values_in_float64(x) @ w.mT + b)).abs() <= size / 8 + 0.02 * (1 + b.abs()))
    size = values_in_float64(gradient).abs() @ backward_weight(layer).abs()
    assert torch.all((dx.double() - values_in_float64(gradient) @ backward_weight(layer)).abs() <= size / 8 + 1e-3)


def test_the_library_multiplies_as_the_plain_way_does():
    torch.manual_seed(5)
    left = recast.recast(*_parts(quantize_rows(torch.randn(33, 96))))
    right = recast.recast(*_parts(quantize_rows(torch.randn(48, 96))))
    y = torch._scaled_mm(
        left.values,
        right.values.mT,
        scale_a=left.scales[:, None],
        scale_b=right.scales[None, :],
        out_dtype=torch.bfloat16,
    )
    torch.testing.assert_close(y, recast.product(left, right, None, 48), rtol=2**-7, atol=1e-3)


def _parts(rows: Rows):
    return rows.codes, rows.scales, rows.g


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["cached", "shared"])
def test_the_gpu_gives_what_the_plain_way_gives(layouts):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("E4M3 products begin at compute capability 8.9")
    for out, width, m in ((256, 512, 96), (200, 136, 7), (72, 40, 33)):
        torch.manual_seed(out)
        layer = linear(0.02 * torch.randn(out, width), layouts=layouts, bias=torch.randn(out).bfloat16())
        x, gradient = quantize_rows(torch.randn(m, width)), quantize_rows(torch.randn(m, out))
        plain = fp8.product(x, layer, torch.bfloat16), fp8.input_gradient(gradient, layer, torch.bfloat16)
        layer = layer.cuda()
        on_gpu = [Rows(each.codes.cuda(), each.scales.cuda(), each.g.cuda(), each.width) for each in (x, gradient)]
        found = (
            fp8.product(on_gpu[0], layer, torch.bfloat16),
            fp8.input_gradient(on_gpu[1], layer, torch.bfloat16),
        )
        for ours, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(ours.cpu(), expected, rtol=2**-6, atol=2e-2 * expected.abs().max().item())
