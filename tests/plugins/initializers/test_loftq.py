"""LoftQ: the same at every scaling, never above the zero start, never worse for more iterations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toolkit_plugins.initializers.fitting import same

import toolkit as tk
from toolkit.runs.adapters import initial

SHAPES = [(64, 64), (48, 80), (80, 48), (96, 32), (7, 13), (1, 64), (64, 1)]
SCALINGS = [0.25, 0.5, 1.0, 2.0, 4.0, 5.66]
QUANTIZERS = ["nf4", "nf4(double=false)", "fp4-bnb", "fp4-e2m1", "nvfp4", "mxfp4", "residual", "residual(inner=nvfp4)"]


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(weight, start, dtype=None):
    """‖W − Ŵ − s·BA‖_F/‖W‖_F in float64 from what the start holds, the base saved and loaded."""
    built = start.base.dequantize(dtype).double() + start.scaling * start.B.double() @ start.A.double()
    return float((weight.double() - built).norm() / weight.double().norm())


def fit(weight, quantizer="nf4", rank=8, s=2.0, key="loftq", **more):
    return tk.initialize(weight, key, quantizer, rank=rank, scaler=f"fixed(value={s})", **more)


@pytest.mark.parametrize("rank", [1, 2, 5, 16, 47, 48])
@pytest.mark.parametrize("shape", [(48, 80), (80, 48)])
@pytest.mark.parametrize("s", [0.25, 1.0, 5.66])
def test_one_iteration_is_the_best_fit_of_the_plain_base(rank, shape, s):
    """The residual is the closed form: the tail of the singular values of W − Q(W), in float64."""
    weight = gaussian(*shape)
    start = fit(weight, rank=rank, s=s, key="loftq(iterations=1)")
    error = weight.double() - tk.quantizer("nf4").quantize(weight).dequantize().double()
    tail = float(torch.linalg.svdvals(error)[rank:].square().sum().sqrt() / weight.double().norm())
    assert start.residuals[1] == pytest.approx(tail, rel=1e-5, abs=1e-6)
    assert truth(weight, start) == pytest.approx(tail, rel=1e-5, abs=1e-6)
    assert start.residuals[0] == pytest.approx(float(error.norm() / weight.double().norm()), rel=1e-6)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_same_at_every_scaling_and_below_the_zero_start(quantizer):
    weight = gaussian(80, 96)
    starts = {s: fit(weight, quantizer, s=s) for s in SCALINGS}
    for s, start in starts.items():
        assert start.scaling == s
        assert start.residual == min(start.residuals) < start.residuals[0]
        assert truth(weight, start) == pytest.approx(start.residual, rel=1e-5)
        assert start.residuals[:2] == pytest.approx(starts[1.0].residuals[:2], rel=1e-5)
        # rounding of A and B may move single codes in later iterations
        assert start.residual == pytest.approx(starts[1.0].residual, rel=5e-3)
    tk_zero = tk.initialize(weight, "zero", quantizer, rank=8)
    assert starts[2.0].residuals[0] == pytest.approx(tk_zero.residual, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quantizer", ["nf4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shapes_and_dtypes(shape, quantizer, dtype):
    weight = gaussian(*shape, dtype=dtype)
    before = weight.clone()
    rank = min(8, *shape)
    start = fit(weight, quantizer, rank=rank, s=0.3)
    assert torch.equal(weight, before)
    assert start.A.shape == (rank, shape[1]) and start.B.shape == (shape[0], rank)
    assert start.A.dtype == start.B.dtype == torch.float32
    assert start.base.dtype == dtype and start.base.shape == shape
    assert truth(weight, start) == pytest.approx(start.residual, rel=1e-4, abs=1e-6)
    assert start.residual <= start.residuals[0]


def test_the_fit_is_to_the_base_as_it_is_read_back():
    """bfloat16 rounds a decoded base: fitted to float32 values, the residual would be another."""
    weight = gaussian(64, 96, dtype=torch.float16)
    start = fit(weight, rank=4, dtype=torch.bfloat16, key="loftq(iterations=1)")
    error = weight.double() - start.base.dequantize(torch.bfloat16).double()
    tail = float(torch.linalg.svdvals(error)[4:].square().sum().sqrt() / weight.double().norm())
    assert start.residual == pytest.approx(tail, rel=1e-5) == truth(weight, start, torch.bfloat16)
    assert abs(truth(weight, start, torch.float32) - tail) > 1e-6


def test_a_base_that_is_saved_and_loaded_has_the_residual_that_was_reported(tmp_path):
    weight = gaussian(96, 64, dtype=torch.bfloat16)
    start = fit(weight, "nf4", s=5.66)
    start.base.save(tmp_path / "base.safetensors")
    loaded = dataclasses.replace(start, base=type(start.base).load(tmp_path / "base.safetensors"))
    assert truth(weight, loaded) == pytest.approx(start.residual, rel=1e-6)


def test_the_first_iterations_of_more_are_the_same_and_the_best_is_kept():
    weight = gaussian(64, 64)
    curves = {n: fit(weight, "mxfp4", rank=16, key=f"loftq(iterations={n})") for n in (1, 2, 5, 12)}
    for n, start in curves.items():
        assert start.residuals == curves[12].residuals[: len(start.residuals)]
        assert start.kept == min(range(len(start.residuals)), key=start.residuals.__getitem__)
        assert len(start.residuals) <= n + 1
    kept = [curves[n].residual for n in (1, 2, 5, 12)]
    assert kept == sorted(kept, reverse=True)


@settings(max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    share=st.floats(0, 1),
    s=st.floats(0.05, 50),
    quantizer=st.sampled_from(["nf4", "fp4-bnb", "nvfp4", "mxfp4", "residual"]),
    size=st.sampled_from([1e-3, 1.0, 100.0]),
    zeros=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_never_above_the_zero_start(shape, share, s, quantizer, size, zeros, seed):
    weight = size * gaussian(*shape, seed=seed)
    weight[:zeros] = 0
    rank = 1 + round(share * (min(shape) - 1))
    start = fit(weight, quantizer, rank=rank, s=s, key="loftq(iterations=3)")
    assert start.A.isfinite().all() and start.B.isfinite().all()
    assert start.residual == min(start.residuals) <= start.residuals[0]
    if weight.norm() > 0:
        assert truth(weight, start) == pytest.approx(start.residual, rel=1e-3, abs=2e-6)


def test_zero_rows_stay_zero():
    weight = gaussian(48, 80)
    weight[3] = weight[17] = 0
    start = fit(weight, "nf4", rank=6)
    assert torch.allclose(start.effective()[[3, 17]], torch.zeros(2, 80), atol=1e-6)


@pytest.mark.parametrize("weight", [torch.zeros(8, 16), gaussian(8, 64, dtype=torch.bfloat16)])
def test_a_base_without_error_starts_as_zero_does(weight):
    start = tk.initialize(weight, "loftq", "none" if weight.any() else "nf4", rank=4, name="a.b", seed=5)
    assert start.residuals == (0.0,) and start.kept == 0
    assert (start.B == 0).all() and torch.equal(start.A, initial(5, "a.b", 4, tuple(weight.shape)))


def test_a_base_that_repeats_ends_the_alternation():
    """At full rank the fit takes all of the error: the next base is made from the same weight."""
    weight = torch.tensor([[1.0, 0.5], [0.25, 1.0]])
    start = fit(weight, "nf4", rank=2, key="loftq(iterations=30)")
    assert len(start.residuals) < 31
    assert start.residual < 1e-6


def test_global_random_state_is_left_alone_and_a_call_repeats():
    weight, state = gaussian(300, 600), torch.random.get_rng_state()
    one, two = (
        fit(weight, key="loftq(iterations=2,svd=randomised)"),
        fit(weight, key="loftq(iterations=2,svd=randomised)"),
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.A, two.A) and torch.equal(one.B, two.B) and same(one.base, two.base)


def test_the_randomised_fit_is_as_good_as_the_exact_one():
    weight = gaussian(576, 700, dtype=torch.bfloat16)
    found = {m: fit(weight, key=f"loftq(iterations=3,svd={m})") for m in ("exact", "randomised")}
    assert found["exact"].notes["svd_exact"] == 3 and found["exact"].notes["svd_error"] == 0
    assert found["randomised"].notes["svd_exact"] == 0 and 0 < found["randomised"].notes["svd_error"] <= 1e-3
    assert found["randomised"].residuals[1] == pytest.approx(found["exact"].residuals[1], rel=1e-6)
    assert found["randomised"].residual == pytest.approx(found["exact"].residual, rel=1e-3)


@pytest.mark.parametrize("rank", [0, None, 49, -1])
def test_ranks_that_are_none(rank):
    for key in ("loftq", "pissa", "olora", "qera-approx", "qera-exact", "loftq-peft"):
        initializer = tk.initializer(key)
        with pytest.raises(tk.InputError, match="rank"):
            initializer.check((48, 80), tk.quantizer("nf4"), rank)
        initializer.check((48, 80), tk.quantizer("nf4"), 48)


def test_what_is_refused():
    weight = gaussian(16, 32)
    with pytest.raises(tk.InputError, match="rank of 1 to 16 for a layer of shape 16×32; found 17"):
        fit(weight, rank=17)
    with pytest.raises(tk.InputError, match="scaling of 0"):
        fit(weight, s=0.0)
    with pytest.raises(tk.InputError, match="NaN"):
        fit(torch.full((16, 32), float("nan")))
    with pytest.raises(tk.InputError, match="shape"):
        fit(gaussian(16))
    with pytest.raises(tk.InputError, match="at least 1"):
        tk.initializer("loftq(iterations=0)")
    with pytest.raises(tk.InputError, match="svd"):
        tk.initializer("loftq(svd=fast)")
    with pytest.raises(tk.InputError, match="fits an adapter itself"):
        tk.initializer("loftq(base=pissa)")
    with pytest.raises(tk.InputError, match="did you mean 'zero'"):
        tk.initializer("loftq(base=zer)")
    with pytest.raises(tk.InputError, match="did you mean 'loftq'"):
        tk.initialize(weight, "loftqq", rank=4)


def test_a_scaling_below_zero_has_its_sign_in_b():
    weight = gaussian(48, 80)
    start, mirrored = fit(weight, s=2.0), fit(weight, s=-2.0)
    assert mirrored.residuals == pytest.approx(start.residuals, rel=1e-4)
    assert truth(weight, mirrored) == pytest.approx(mirrored.residual, rel=1e-5)


def test_another_initializer_makes_the_base():
    """A base that halves what it is given: the fit is over what that initializer answers, in every iteration."""
    seen = []

    class Halved(tk.Initializer):
        name = "halved-for-a-test"
        needs_rank = False
        needs_calibration = True
        activations = "nvfp4"

        def initialize(self, given):
            assert given.rank is None and given.A is None and given.moments is not None
            seen.append(given.weight)
            packed = given.quantizer.quantize(given.weight / 2)
            return tk.Start(packed, None, None, 1.0, (0.5,), notes={"halved": True})

    from toolkit.registry import registry

    tk.register(Halved)
    try:
        weight = gaussian(48, 64, dtype=torch.bfloat16)
        initializer = tk.initializer("loftq", base="halved-for-a-test", iterations=2)
        assert initializer.key == "loftq(iterations=2,base=halved-for-a-test)"
        assert initializer.needs_calibration and initializer.activations == "nvfp4"
        with pytest.raises(tk.InputError, match="calibrated"):
            tk.initialize(weight, initializer, "nf4", rank=4)
        moments = tk.Moments(torch.eye(64), 100)
        start = tk.initialize(weight, initializer, "nf4", rank=4, alpha=8, moments=moments)
        assert torch.equal(seen[0], weight) and len(seen) == 2
        first = fit(weight, rank=4, key="loftq(iterations=1)")
        assert start.residuals[0] == pytest.approx(0.5, abs=0.01) and first.residuals[0] < 0.1
        assert start.notes["base_halved"] is True and start.base.dtype == torch.bfloat16
        assert truth(weight, start) == pytest.approx(start.residual, rel=1e-5)
        # the second base was made from W − s·B₁A₁
        error = weight.double() - (tk.quantizer("nf4").quantize(weight / 2).dequantize().double())
        u, sigma, v = torch.linalg.svd(error)
        assert torch.allclose(seen[1].double(), weight.double() - (u[:, :4] * sigma[:4]) @ v[:4], atol=1e-4)
    finally:
        registry.manager.unregister(name=f"{Halved.__module__}.{Halved.__qualname__}:inline")


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu():
    weight = gaussian(576, 1536, dtype=torch.bfloat16)
    here, there = fit(weight, "nvfp4", s=5.66), fit(weight.cuda(), "nvfp4", s=5.66)
    assert there.A.device.type == there.B.device.type == "cuda"
    assert there.residuals == pytest.approx(here.residuals, rel=1e-3)


@pytest.mark.parametrize("key", ["loftq", "pissa", "qera-exact", "qera-approx", "olora", "loftq-peft", "gptq"])
@pytest.mark.parametrize("quantizer", ["nf4", "nvfp4"])
def test_a_base_that_its_compute_dtype_cannot_hold_is_refused(key, quantizer):
    if (key, quantizer) == ("loftq-peft", "nvfp4"):
        return
    about = {"rank": 4, "moments": tk.Moments(torch.eye(64), 10), "name": "mlp.up"}
    with pytest.raises(tk.InputError, match=r"layer mlp\.up: its base is too large for torch\.float16"):
        tk.initialize(gaussian(32, 64) * 1e6, key, quantizer, dtype=torch.float16, **about)


@pytest.mark.parametrize("key", ["loftq", "pissa", "qera-exact", "olora", "loftq-peft", "gptq"])
def test_float32_products_are_not_shortened_meanwhile(key, monkeypatch):
    """TF32, where a process allows it, would cost three digits of the fit; what was allowed is allowed again."""
    from toolkit_plugins.initializers import compensation, gptq

    seen, before = [], torch.get_float32_matmul_precision()
    addmm = torch.addmm

    def watched(*args, **kwargs):
        seen.append(torch.get_float32_matmul_precision())
        return addmm(*args, **kwargs)

    def compensated(*args, **kwargs):
        seen.append(torch.get_float32_matmul_precision())
        return compensation.compensate(*args, **kwargs)

    monkeypatch.setattr(torch, "addmm", watched)
    monkeypatch.setattr(gptq, "compensate", compensated)
    torch.set_float32_matmul_precision("high")
    try:
        tk.initialize(gaussian(32, 64), key, "nf4", rank=4, moments=tk.Moments(torch.eye(64), 10))
        with pytest.raises(tk.InputError):
            fit(torch.full((16, 32), float("nan")))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}
