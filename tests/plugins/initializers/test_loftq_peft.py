"""PEFT's own LoftQ: ours at s = 1, and no better than no fit at all, or far worse, at others."""

from __future__ import annotations

import pytest
import torch

import toolkit as tk

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def weight():
    return torch.randn(128, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("s", "expected"), [(0.25, 0.952), (0.5, 0.916), (1.0, 0.887), (2.0, 1.000), (4.0, 1.646), (5.66, 2.33)]
)
def test_what_leaving_the_scaling_out_does(weight, s, expected):
    """Against the zero start: nothing gained at s = 2, more than twice as bad under rsLoRA."""
    scaler = f"fixed(value={s})"
    theirs = tk.initialize(weight, "loftq-peft", "nf4", rank=8, scaler=scaler)
    ours = tk.initialize(weight, "loftq(iterations=1)", "nf4", rank=8, scaler=scaler)
    assert theirs.residual / theirs.residuals[0] == pytest.approx(expected, abs=5e-3)
    assert ours.residual / ours.residuals[0] == pytest.approx(0.887, abs=5e-3)
    assert theirs.kept == 1 and len(theirs.residuals) == 2


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_ours_where_the_scaling_is_one(weight, iterations, dtype):
    weight = weight[:96].to(dtype)
    key = "nf4(double=false)"  # what PEFT quantizes by
    theirs = tk.initialize(weight, f"loftq-peft(iterations={iterations})", key, rank=8, alpha=8, dtype=torch.float32)
    ours = tk.initialize(weight, f"loftq(iterations={iterations})", key, rank=8, alpha=8, dtype=torch.float32)
    assert ours.residuals[iterations] == pytest.approx(theirs.residual, rel=1e-5 if iterations == 1 else 2e-3)
    if iterations == 1:
        assert torch.allclose(ours.B @ ours.A, theirs.B @ theirs.A, atol=1e-5)


def test_the_function_that_peft_runs_on_cuda(weight, monkeypatch):
    """`loftq_init` itself, its own transfers to CUDA answered on the CPU."""
    from peft.utils import loftq_utils
    from toolkit_plugins.initializers.loftq_peft import peft_loftq
    from torch.overrides import TorchFunctionMode

    class Here(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.to:
                args = tuple("cpu" if a == "cuda" else a for a in args)
                kwargs |= {"device": "cpu"} if kwargs.get("device") == "cuda" else {}
            return func(*args, **kwargs)

    import bitsandbytes as bnb

    to = bnb.nn.Params4bit.to
    monkeypatch.setattr(bnb.nn.Params4bit, "to", lambda self, device: to(self, "cpu"))
    with Here():
        dense, a, b = loftq_utils.loftq_init(weight, num_bits=4, reduced_rank=8, num_iter=3)
    ours = peft_loftq(weight, 8, 3)
    for found, expected in zip(ours, (dense, a, b), strict=True):
        assert torch.equal(found, expected)


def test_the_base_is_what_peft_holds(weight):
    from toolkit_plugins.initializers.loftq_peft import peft_loftq

    dense, a, b = peft_loftq(weight, 8, 3)
    start = tk.initialize(weight, "loftq-peft(iterations=3)", "nf4(double=false)", rank=8, alpha=16)
    assert torch.equal(start.base.dequantize(), dense)
    assert torch.equal(start.A, a) and torch.equal(start.B, b)
    found = float((weight.double() - dense.double() - 2.0 * b.double() @ a.double()).norm() / weight.double().norm())
    assert start.residual == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("quantizer", ["nvfp4", "nf4(block=128)", "none"])
def test_what_peft_does_not_fit(weight, quantizer):
    with pytest.raises(tk.InputError, match="NF4 in blocks of 64 only; found"):
        tk.initialize(weight, "loftq-peft", quantizer, rank=8)


@pytest.mark.gpu
def test_on_a_gpu(weight):
    here = tk.initialize(weight, "loftq-peft", "nf4", rank=8, alpha=16)
    there = tk.initialize(weight.cuda(), "loftq-peft", "nf4", rank=8, alpha=16)
    assert there.residual == pytest.approx(here.residual, rel=1e-3)


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (7, 13), (96, 64)])
def test_shapes_whose_rows_are_no_whole_number_of_blocks(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    key, rank = "nf4(double=false)", min(4, *shape)
    theirs = tk.initialize(weight, "loftq-peft", key, rank=rank, scaler="fixed(value=1)")
    ours = tk.initialize(weight, "loftq(iterations=1)", key, rank=rank, scaler="fixed(value=1)")
    assert theirs.residual == pytest.approx(ours.residual, rel=1e-5)
