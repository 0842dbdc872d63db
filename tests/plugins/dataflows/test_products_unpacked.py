"""Exact products of the data flow pact, against float64 and against every code under every scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.products import factors, fused, scratch, unpacked
from toolkit_plugins.dataflows.pact.products.unpacked import input_gradient, product
from toolkit_plugins.dataflows.pact.products.unpacking import unpacked_plainly
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.pact.weights import PactLinear
from toolkit_plugins.quantizers.nvfp4 import NVFP4
from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows

LEVELS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def linear(out, width, *, dtype=torch.bfloat16, layouts="cached", bias=False, size=0.02, seed=0) -> PactLinear:
    generator = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(out, width, generator=generator)
    packed = NVFP4().quantize(weight)
    b = torch.randn(out, generator=generator).to(dtype) if bias else None
    return PactLinear(packed, b, dtype, Settings(layouts=layouts), weight)


def rows_of(count, width, seed=1):
    return quantize_rows(3 * torch.randn(count, width, generator=torch.Generator().manual_seed(seed)))


def every_code() -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a matrix (126, 16): each row one positive E4M3 scale, each column one code."""
    pairs = torch.arange(16, dtype=torch.uint8).view(8, 2)
    codes = (pairs[:, 0] | pairs[:, 1] << 4).repeat(126)
    return codes, torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]


def in_float64(layer: PactLinear, *, backward: bool) -> torch.Tensor:
    """Ŵ (out, in) or W̃ (out, in), decoded by the quantizer."""
    if backward and layer.transposed is not None:
        return layer.transposed.packed.dequantize(torch.float32).double().mT
    return layer.packed.dequantize(torch.float32).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_under_every_scale_is_exact(dtype):
    codes, scales = every_code()
    expected = torch.tensor(LEVELS, dtype=torch.float64) * scales.double()
    found = unpacked_plainly(codes, scales, (126, 16)).to(dtype)
    assert torch.equal(found.double(), expected)
    assert expected.abs().max() == 2688 and expected[expected > 0].min() == 2.0**-10


@pytest.mark.parametrize("layouts", ["cached", "shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(m=st.integers(1, 9), out=st.integers(1, 70), width=st.integers(1, 70), bias=st.booleans())
def test_products_are_those_of_float64_rounded_once(dtype, layouts, m, out, width, bias):
    layer = linear(out, width, dtype=dtype, layouts=layouts, bias=bias)
    x, gradient = rows_of(m, width).values(dtype), rows_of(m, out, 2).values(dtype)
    y = x.double() @ in_float64(layer, backward=False).mT
    if bias:
        y = y + layer.bias.double()
    dx = gradient.double() @ in_float64(layer, backward=True)
    one_rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0}[dtype]
    for found, expected in ((product(x, layer, dtype), y), (input_gradient(gradient, layer, dtype), dx)):
        assert found.dtype == dtype
        size = expected.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=one_rounding, atol=3e-6 * size + 1e-7)


@pytest.mark.parametrize("layouts", ["cached", "shared"])
def test_products_equal_the_reference_on_a_weight_of_any_size(layouts):
    for size in (1e-6, 0.02, 300.0):
        layer = linear(48, 37, layouts=layouts, bias=True, size=size)
        rows, gradient = rows_of(5, 37), rows_of(5, 48).values(torch.bfloat16)
        run, dtype = Execution(), torch.bfloat16
        y = product(rows.values(dtype), layer, dtype)
        torch.testing.assert_close(y, run.product(rows, layer, dtype), rtol=2**-7, atol=1e-5 * size)
        dx = input_gradient(gradient, layer, dtype)
        torch.testing.assert_close(dx, run.input_gradient(gradient, layer, dtype), rtol=2**-7, atol=1e-5 * size)


def test_a_tensor_scale_is_read_again_only_when_the_weight_changes():
    layer, reads = linear(32, 32), []

    def read() -> float:
        reads.append(1)
        return float(layer.packed.tensors["global_scale"])

    first = factors.kept(layer, "g", layer.packed, read)
    assert factors.kept(layer, "g", layer.packed, read) == first and len(reads) == 1
    layer.packed.tensors["global_scale"].mul_(2)  # as load_state_dict does, in place
    assert factors.kept(layer, "g", layer.packed, read) == 2 * first and len(reads) == 2
    x = rows_of(3, 32).values(torch.bfloat16)
    before = product(x, layer, torch.bfloat16)
    layer.packed.tensors["global_scale"].mul_(2)
    assert torch.equal(product(x, layer, torch.bfloat16), 2 * before)


def on_gpu(out, width, **options) -> PactLinear:
    return linear(out, width, **options).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("way", [unpacked, fused], ids=["unpacked", "fused"])
@pytest.mark.parametrize("layouts", ["cached", "shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gpu_gives_the_products_of_float64_rounded_once(dtype, layouts, way):
    one_rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0}[dtype]
    for m, out, width, bias in ((300, 512, 1024, True), (7, 136, 200, False), (33, 70, 37, True), (0, 64, 64, False)):
        layer = on_gpu(out, width, dtype=dtype, layouts=layouts, bias=bias)
        x, gradient = (rows_of(m, n, n).values(dtype).cuda() for n in (width, out))
        y = x.double() @ in_float64(layer, backward=False).mT
        y = y if layer.bias is None else y + layer.bias.double()
        dx = gradient.double() @ in_float64(layer, backward=True)
        found = way.product(x, layer, dtype), way.input_gradient(gradient, layer, dtype)
        for ours, expected in zip(found, (y, dx), strict=True):
            assert ours.dtype == dtype and ours.shape == expected.shape
            size = expected.abs().max().item() if m else 0.0
            torch.testing.assert_close(ours.double(), expected, rtol=one_rounding, atol=2e-5 * size + 1e-7)


@pytest.mark.gpu
def test_float16_sums_do_not_overflow_before_the_tensor_scale():
    layer = on_gpu(128, 16384, dtype=torch.float16, size=1e-3)
    x = torch.full((64, 16384), 6.0, dtype=torch.float16, device="cuda")
    expected = x.double() @ in_float64(layer, backward=False).mT
    torch.testing.assert_close(product(x, layer, torch.float16).double(), expected, rtol=2**-10, atol=1e-3)


@pytest.mark.gpu
def test_layers_of_one_size_share_memory_and_not_results():
    scratch.release()
    layers = [on_gpu(256, 128, seed=seed) for seed in (1, 2)]
    x = rows_of(9, 128).values(torch.bfloat16).cuda()
    before = torch.cuda.memory_allocated()
    first, second, again = (product(x, layer, torch.bfloat16) for layer in (*layers, layers[0]))
    assert torch.equal(first, again) and not torch.equal(first, second)
    kept = torch.cuda.memory_allocated() - before - sum(t.nbytes for t in (first, second, again))
    assert kept <= 256 * 128 * 2 + 4096


@pytest.mark.gpu
def test_products_replay_in_a_cuda_graph():
    layers = [on_gpu(256, 128, seed=seed) for seed in (1, 2)]
    x = rows_of(9, 128).values(torch.bfloat16).cuda()

    def step():
        return [
            input_gradient(product(x, layer, torch.bfloat16), layer, torch.bfloat16) for layer in (*layers, layers[0])
        ]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    x.copy_(rows_of(9, 128, seed=5).values(torch.bfloat16))
    expected = step()
    graph.replay()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_two_streams_take_turns_with_the_memory():
    layers = [on_gpu(2048, 2048, seed=seed) for seed in (1, 2)]
    x = rows_of(2048, 2048).values(torch.bfloat16).cuda()
    expected = [product(x, layer, torch.bfloat16) for layer in layers]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in layers], []
    for _ in range(20):
        for stream, layer in zip(streams, layers, strict=True):
            with torch.cuda.stream(stream):
                found.append(product(x, layer, torch.bfloat16))
    torch.cuda.synchronize()
    for i, each in enumerate(found):
        assert torch.equal(each, expected[i % 2])
