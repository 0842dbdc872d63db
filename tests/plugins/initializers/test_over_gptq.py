"""A fit over a base that compensates its errors: GPTQ + LoftQ, and kin."""

from __future__ import annotations

import pytest
import torch

import toolkit as tk


@pytest.fixture(scope="module")
def case():
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=made)
    x = torch.randn(1000, 128, generator=made) @ (torch.eye(128) + torch.randn(128, 128, generator=made) / 8)
    x = x * torch.randn(128, generator=made).exp()
    return weight, x, tk.Moments(x.T @ x / 1000, 1000)


def output_error(weight, start, x):
    off = weight.double() - start.effective().double()
    return float((x.double() @ off.T).norm() / (x.double() @ weight.double().T).norm())


KEYS = ["loftq(iterations=1,base=gptq)", "loftq(base=gptq)", "qera-exact(base=gptq)", "pissa(base=gptq)"]


@pytest.mark.parametrize("quantizer", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("key", KEYS)
def test_outputs_are_nearer_than_with_either_alone(case, quantizer, key):
    weight, x, moments = case
    found = {
        name: output_error(weight, tk.initialize(weight, name, quantizer, rank=8, alpha=16, moments=moments), x)
        for name in ("gptq", "loftq", key)
    }
    start = tk.initialize(weight, key, quantizer, rank=8, alpha=16, moments=moments)
    assert found[key] < min(found["gptq"], found["loftq"])
    assert start.notes["output_error"] == pytest.approx(found[key], rel=1e-3)
    assert start.notes["base_dead"] == 0 and "fallback" not in start.notes


def test_the_fit_is_over_gptqs_own_base(case):
    weight, _, moments = case
    alone = tk.initialize(weight, "gptq", "nvfp4", moments=moments)
    start = tk.initialize(weight, "loftq(iterations=1,base=gptq)", "nvfp4", rank=8, alpha=16, moments=moments)
    assert torch.equal(start.base.dequantize(), alone.base.dequantize())
    error = weight.double() - alone.base.dequantize().double()
    tail = float(torch.linalg.svdvals(error)[8:].square().sum().sqrt() / weight.double().norm())
    assert start.residual == pytest.approx(tail, rel=1e-5)
    assert start.residuals[0] == pytest.approx(float(error.norm() / weight.double().norm()), rel=1e-5)


def test_a_fall_back_of_the_base_is_named(case):
    weight = case[0]
    unseen = tk.Moments(torch.zeros(128, 128), 10)
    start = tk.initialize(weight, "loftq(iterations=2,base=gptq)", "nvfp4", rank=8, moments=unseen)
    assert "no input was seen" in start.notes["fallback"]


def test_what_is_needed_and_refused_passes_through(case):
    weight = case[0]
    inner = tk.initializer("loftq", base="gptq(activations=nvfp4)")
    assert inner.key == "loftq(base=gptq(activations=nvfp4))"
    assert inner.needs_calibration and inner.activations == "nvfp4" and inner.needs_rank
    assert tk.initializer(inner.key) == inner
    assert tk.initializer("pissa", base="gptq").needs_calibration and not tk.initializer("pissa").needs_calibration
    assert not tk.initializer("loftq").needs_calibration and tk.initializer("loftq").activations == "none"
    with pytest.raises(tk.InputError, match="calibrated"):
        tk.initialize(weight, "loftq(base=gptq)", "nvfp4", rank=8)
    with pytest.raises(tk.InputError, match="no grid"):
        tk.initializer("loftq(base=gptq)").check((96, 128), tk.quantizer("none"), 8)


def test_what_the_base_could_not_follow_is_named_as_its_own(case):
    weight, _, _ = case
    narrow, moments = weight[:, :80], tk.Moments(torch.eye(80), 10)
    start = tk.initialize(narrow, "loftq(iterations=1,base=gptq)", "nf4", rank=8, moments=moments)
    alone = tk.initialize(narrow, "gptq", "nf4", moments=moments)
    assert start.notes["limited"] == alone.notes["limited"] and "base_limited" not in start.notes
