"""`fp8` and `native` in layers with adapters, forward and backward, beside `reference`."""

from __future__ import annotations

import pytest
import torch
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.fp8 import FP8
from toolkit_plugins.dataflows.pact.linear import multiply
from toolkit_plugins.dataflows.pact.native import Native
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.pact.weights import PactLinear
from toolkit_plugins.quantizers.nvfp4 import NVFP4

OUT, IN, RANK, SCALING = 144, 208, 4, 2.5


class FP8OnCPU(FP8):
    """The products of `fp8` in plain tensor operations, and rounding too."""

    quantize, values, rounded = Execution.quantize, Execution.values, Execution.rounded


class NativeOnCPU(Native):
    """The products of `native` likewise."""

    quantize, values, rounded = Execution.quantize, Execution.values, Execution.rounded


def step(run: Execution, settings: Settings, device: str = "cpu") -> dict[str, torch.Tensor]:
    """y, ∂x, ∂A and ∂B of one layer on two sequences."""
    torch.manual_seed(0)
    weight, bias = 0.05 * torch.randn(OUT, IN), torch.randn(OUT)
    a, b = torch.randn(RANK, IN) / 8, torch.randn(OUT, RANK) / 8
    x, gradient = torch.randn(2, 24, IN), torch.randn(2, 24, OUT)
    weight, bias, a, b, x, gradient = (t.to(device).bfloat16() for t in (weight, bias, a, b, x, gradient))
    layer = PactLinear(NVFP4().quantize(weight), bias, torch.bfloat16, settings, weight).to(device)
    layer.execution = run
    for t in (a, b, x):
        t.requires_grad_()
    y = multiply(x, layer, a, b, SCALING)
    y.backward(gradient)
    return {"y": y.detach(), "x": x.grad, "a": a.grad, "b": b.grad}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("layouts", ["cached", "shared"])
def test_fp8_is_two_percent_off_and_its_adapters_gradients_are_not(layouts):
    settings = Settings(layouts=layouts)
    found, expected = step(FP8OnCPU(), settings), step(Execution(), settings)
    assert all(0.002 < relative(found[name], expected[name]) < 0.025 for name in ("y", "x"))
    assert torch.equal(found["a"], expected["a"]) and torch.equal(found["b"], expected["b"])


@pytest.mark.parametrize("layouts", ["cached", "shared"])
@pytest.mark.parametrize("run", [FP8OnCPU(), NativeOnCPU()], ids=["fp8", "native"])
def test_a_gradient_in_16_bit_is_not_rounded(run, layouts):
    settings = Settings(layouts=layouts, gradients="16bit")
    found, expected = step(run, settings)["x"], step(Execution(), settings)["x"]
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())
    assert relative(found, expected) < 0.002


def test_native_is_the_reference():
    found, expected = step(NativeOnCPU(), Settings()), step(Execution(), Settings())
    for name in expected:
        assert found[name].abs().max() > 0
        assert relative(found[name], expected[name]) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", ["nearest", "stochastic", "16bit"])
@pytest.mark.parametrize("layouts", ["cached", "shared"])
def test_fp8_on_the_gpu(layouts, gradients):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("E4M3 products begin at compute capability 8.9")
    settings = Settings(layouts=layouts, gradients=gradients)
    found, expected = step(FP8(), settings, "cuda"), step(Execution(), settings, "cuda")
    limit = {"nearest": 0.03, "stochastic": 0.25, "16bit": 0.005}[gradients]  # two draws differ by √2 of the rounding
    assert 0.002 < relative(found["y"], expected["y"]) < 0.03
    assert relative(found["x"], expected["x"]) < limit
    assert relative(found["a"], expected["a"]) < 0.005 and relative(found["b"], expected["b"]) < 0.005
