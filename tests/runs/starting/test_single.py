"""`tk.initialize`: the start of one weight, from keys."""

from __future__ import annotations

import pytest
import torch

import toolkit as tk
from toolkit.runs.adapters import initial


@pytest.fixture
def weight():
    return torch.randn(48, 80, generator=torch.Generator().manual_seed(0))


def test_as_it_is_written(weight):
    start = tk.initialize(weight, initializer="loftq", quantizer="nf4", rank=8, alpha=16, scaler="lora")
    assert isinstance(start, tk.Start) and start.scaling == 2.0
    assert start.A.shape == (8, 80) and start.B.shape == (48, 8) and len(start.residuals) == 6
    built = start.base.dequantize() + 2.0 * start.B @ start.A
    assert float((weight - built).norm() / weight.norm()) == pytest.approx(start.residual, rel=1e-5)
    assert torch.allclose(start.effective(), built, atol=1e-6)


@pytest.mark.parametrize(("scaler", "s"), [("lora", 4.0), ("rslora", 8.0), ("fixed(value=0.3)", 0.3)])
def test_the_scaler_gives_the_scaling(weight, scaler, s):
    assert tk.initialize(weight, rank=4, alpha=16, scaler=scaler).scaling == s


def test_a_is_a_function_of_seed_name_rank_and_shape(weight):
    start = tk.initialize(weight, rank=4, seed=3, name="layers.0.q_proj")
    assert torch.equal(start.A, initial(3, "layers.0.q_proj", 4, (48, 80))) and (start.B == 0).all()
    others = [(4, "layers.0.q_proj", 4), (3, "layers.0.k_proj", 4)]
    assert not any(torch.equal(start.A, tk.initialize(weight, seed=s, name=n, rank=r).A) for s, n, r in others)


def test_without_an_adapter(weight):
    start = tk.initialize(weight, quantizer="nvfp4")
    assert start.A is None and start.B is None and start.scaling == 1.0
    assert torch.equal(start.effective(), tk.quantizer("nvfp4").quantize(weight).dequantize())


def test_a_component_is_taken_as_a_key_is(weight):
    key = tk.initialize(weight, "loftq(iterations=2)", "nf4(block=128)", rank=4)
    made = tk.initialize(weight, tk.initializer("loftq", iterations=2), tk.quantizer("nf4", block=128), rank=4)
    assert torch.equal(key.A, made.A) and key.residuals == made.residuals


def test_a_parameter_needs_no_gradient(weight):
    start = tk.initialize(torch.nn.Parameter(weight), "loftq(iterations=1)", rank=4)
    assert not start.A.requires_grad and not start.base.dequantize().requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initializer": "loft"}, "did you mean 'loftq'"),
        ({"quantizer": "nf5"}, "did you mean 'nf4'"),
        ({"scaler": "rslor"}, "did you mean 'rslora'"),
        ({"rank": 0}, "at least 1; found 0"),
        ({"rank": 2.5}, "a whole number; found 2.5"),
        ({"rank": True}, "a whole number; found True"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"weight": [[1.0]]}, "found list"),
        ({"rank": 49, "initializer": "loftq"}, "1 to 48"),
        ({"rank": None, "initializer": "loftq"}, "give it a rank"),
        ({"initializer": "nf4"}, "no initializer is called 'nf4'"),
    ],
)
def test_what_is_refused(weight, change, message):
    with pytest.raises(tk.InputError, match=message):
        tk.initialize(**{"weight": weight, "rank": 4} | change)


@pytest.mark.parametrize("shape", [(16,), (2, 3, 4), (0, 8)])
def test_weights_that_are_no_matrices(shape):
    with pytest.raises(tk.InputError, match=r"w: a weight \(out, in\) is needed"):
        tk.initialize(torch.zeros(shape), rank=1, name="w")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("initializer", ["zero", "loftq", "pissa"])
def test_weights_that_are_not_finite(weight, value, initializer):
    weight[3, 4] = value
    with pytest.raises(tk.InputError, match="NaN or infinity"):
        tk.initialize(weight, initializer, rank=4)


def test_a_plain_base_that_its_dtype_cannot_hold_is_refused_by_name(weight):
    with pytest.raises(tk.InputError, match=r"layer mlp\.up: its base is too large for torch\.float16"):
        tk.initialize(weight * 1e6, "zero", rank=4, name="mlp.up", dtype=torch.float16)


def test_moments_that_are_a_bare_tensor_are_answered_with_what_to_give():
    with pytest.raises(tk.InputError, match=r"weight: moments are Tensor, and tk\.Moments\(second, tokens\)"):
        tk.initialize(torch.randn(8, 16), "gptq", "nvfp4", moments=torch.eye(16))
