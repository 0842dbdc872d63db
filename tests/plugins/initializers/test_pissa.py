"""PiSSA over a quantized base, and OLoRA, which PEFT makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def principal(weight, rank):
    u, sigma, v = torch.linalg.svd(weight.double(), full_matrices=False)
    return (u[:, :rank] * sigma[:rank]) @ v[:rank]


def truth(weight, start):
    built = start.base.dequantize().double() + start.scaling * start.B.double() @ start.A.double()
    return float((weight.double() - built).norm() / weight.double().norm())


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (1, 64), (64, 1)])
@pytest.mark.parametrize("quantizer", ["nf4", "nvfp4"])
@pytest.mark.parametrize("s", [0.25, 1.0, 5.66])
def test_the_principal_part_and_the_quantized_rest(shape, quantizer, s):
    weight, rank = gaussian(*shape), min(6, *shape)
    start = tk.initialize(weight, "pissa", quantizer, rank=rank, scaler=f"fixed(value={s})")
    part = principal(weight, rank)
    assert torch.allclose(s * start.B.double() @ start.A.double(), part, atol=1e-5)
    rest = tk.quantizer(quantizer).quantize((weight.double() - part).float()).dequantize().double()
    assert torch.allclose(start.base.dequantize().double(), rest, atol=1e-3)
    assert start.kept == 1 and truth(weight, start) == pytest.approx(start.residual, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_base_keeps_the_weights_dtype(dtype):
    weight = gaussian(48, 80, dtype=dtype)
    start = tk.initialize(weight, "pissa", "none", rank=8, alpha=16)
    assert start.base.tensors["weight"].dtype == dtype == start.base.dtype
    expected = (weight.double() - principal(weight, 8)).to(dtype)
    assert torch.allclose(start.base.dequantize().double(), expected.double(), atol=1e-2)
    assert start.residual == pytest.approx(truth(weight, start), rel=1e-4) and start.residuals[0] == 0


def test_equal_to_peft_without_quantization():
    """PEFT's own PiSSA on a dense layer: the same product and the same rest at its scaling."""
    peft = pytest.importorskip("peft")
    weight = gaussian(80, 48)
    model = torch.nn.Sequential(torch.nn.Linear(48, 80, bias=True))
    model[0].weight.data = weight.clone()
    config = peft.LoraConfig(r=8, lora_alpha=24, init_lora_weights="pissa", target_modules=["0"])
    layer = peft.get_peft_model(model, config).base_model.model[0]
    start = tk.initialize(weight, "pissa", "none", rank=8, alpha=24)
    theirs = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert start.scaling == 3 and torch.allclose(3.0 * start.B @ start.A, theirs, atol=1e-4)
    # split in half as theirs is, up to signs
    assert torch.allclose(start.A.norm(dim=1), layer.lora_A["default"].weight.norm(dim=1), rtol=1e-4)
    assert torch.allclose(start.base.dequantize(), layer.base_layer.weight, atol=2e-2)  # 16 bit beside float32


def test_more_iterations_are_never_worse():
    weight = gaussian(64, 96)
    found = [tk.initialize(weight, f"pissa(iterations={n})", "nf4", rank=8, alpha=16).residual for n in (1, 2, 5, 9)]
    assert found == sorted(found, reverse=True) and found[2] < found[0]


@settings(max_examples=25)
@given(
    shape=st.tuples(st.integers(1, 30), st.integers(1, 70)),
    s=st.floats(0.1, 20),
    key=st.sampled_from(["pissa", "pissa(iterations=3)", "olora"]),
    zeros=st.integers(0, 3),
)
def test_what_is_reported_is_so(shape, s, key, zeros):
    weight = gaussian(*shape)
    weight[:zeros] = 0
    rank = min(4, *shape)
    start = tk.initialize(weight, key, "nf4", rank=rank, scaler=f"fixed(value={s})")
    assert start.A.isfinite().all() and start.B.isfinite().all() and start.kept >= 1
    if weight.norm() > 0:
        assert truth(weight, start) == pytest.approx(start.residual, rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("alpha", [2, 8, 32])
def test_olora_is_pefts(alpha):
    peft = pytest.importorskip("peft")
    weight = gaussian(80, 48)
    model = torch.nn.Sequential(torch.nn.Linear(48, 80))
    model[0].weight.data = weight.clone()
    config = peft.LoraConfig(r=8, lora_alpha=alpha, init_lora_weights="olora", target_modules=["0"])
    layer = peft.get_peft_model(model, config).base_model.model[0]
    state, before = torch.random.get_rng_state(), weight.clone()
    start = tk.initialize(weight, "olora", "nf4", rank=8, alpha=alpha)
    assert torch.equal(torch.random.get_rng_state(), state) and torch.equal(weight, before)
    assert torch.equal(start.A, layer.lora_A["default"].weight) and torch.equal(start.B, layer.lora_B["default"].weight)
    q, r = torch.linalg.qr(weight)
    assert torch.allclose(start.B, q[:, :8], atol=1e-5) and torch.allclose(start.A, r[:8], atol=1e-5)
    rest = weight - alpha / 8 * start.B @ start.A
    assert torch.allclose(start.base.dequantize(), tk.quantizer("nf4").quantize(rest).dequantize(), atol=1e-3)
    assert torch.allclose(layer.base_layer.weight.data, rest, atol=1e-5)


def test_what_is_refused():
    weight = gaussian(16, 32)
    with pytest.raises(tk.InputError, match="at least 1"):
        tk.initializer("pissa(iterations=0)")
    with pytest.raises(tk.InputError, match="rank of 1 to 16"):
        tk.initialize(weight, "pissa", rank=17)
    with pytest.raises(tk.InputError, match="this layer has none: give it a rank"):
        tk.initialize(weight, "pissa")
    with pytest.raises(tk.InputError, match="fits an adapter itself"):
        tk.initializer("pissa(base=loftq)")
    with pytest.raises(tk.InputError, match="NaN"):
        tk.initialize(weight / 0 * 0, "pissa", rank=4)
