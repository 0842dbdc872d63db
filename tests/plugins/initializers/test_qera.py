"""The two activation-aware closed forms, against float64 formulas and against plain optimisation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(tokens, width, seed=0, mixed=1.0):
    """(tokens, width), some channels far larger than others, and correlated where they are mixed."""
    made = torch.Generator().manual_seed(seed)
    mix = mixed * torch.randn(width, width, generator=made) / width**0.5 + torch.eye(width)
    return (torch.randn(tokens, width, generator=made) @ mix) * torch.exp(torch.randn(width, generator=made))


def moments(x):
    return tk.Moments((x.T @ x / x.shape[0]).float(), x.shape[0])


def output_error(weight, start, x):
    """√E‖(W − Ŵ − s·BA)x‖² over these inputs, in float64."""
    change = 0 if start.A is None else start.scaling * start.B.double() @ start.A.double()
    off = weight.double() - start.base.dequantize().double() - change
    return float((x.double() @ off.T).norm() / x.shape[0] ** 0.5)


def fit(weight, key, x, rank=4, s=2.0, quantizer="nf4"):
    return tk.initialize(weight, key, quantizer, rank=rank, scaler=f"fixed(value={s})", moments=moments(x))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 16), (16, 1)])
@pytest.mark.parametrize("s", [0.25, 1.0, 5.66])
def test_the_least_output_error_in_closed_form(shape, s):
    """√(Σ of the squared singular values of E·R^½ beyond r), R^½ the symmetric root, as the paper has it."""
    weight, x, rank = gaussian(*shape), inputs(500, shape[1]), min(3, *shape)
    start = fit(weight, "qera-exact", x, rank, s)
    values, vectors = torch.linalg.eigh(x.double().T @ x.double() / 500)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    error = weight.double() - start.base.dequantize().double()
    u, sigma, v = torch.linalg.svd(error @ root, full_matrices=False)
    least = float(sigma[rank:].square().sum().sqrt())
    assert output_error(weight, start, x) == pytest.approx(least, rel=1e-4, abs=1e-5 * float(sigma[0]))
    paper = (u[:, :rank] * sigma[:rank]) @ v[:rank] @ torch.linalg.inv(root)
    product = s * start.B.double() @ start.A.double()
    assert float((product - paper).norm()) <= 1e-3 * float(paper.norm())
    assert start.notes["captured"] == pytest.approx(1 - (least / float(sigma.norm())) ** 2, abs=1e-4)


def test_no_optimiser_finds_better():
    weight, x = gaussian(12, 20), inputs(300, 20)
    start = fit(weight, "qera-exact", x, 3, 1.0)
    error = (weight - start.base.dequantize()).double()
    second = x.double().T @ x.double() / 300
    least = output_error(weight, start, x) ** 2
    for seed in range(3):
        b = (0.1 * gaussian(12, 3, seed=seed).double()).requires_grad_()
        a = (0.1 * gaussian(3, 20, seed=seed + 9).double()).requires_grad_()
        search = torch.optim.LBFGS([a, b], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

        def loss(a=a, b=b, search=search):
            search.zero_grad()
            off = error - b @ a
            value = (off @ second * off).sum()
            value.backward()
            return value

        search.step(loss)
        assert float(loss().detach()) >= least * (1 - 1e-4)
    assert float(loss().detach()) == pytest.approx(least, rel=1e-2)  # and the last search did get there


@settings(max_examples=30)
@given(
    shape=st.tuples(st.integers(2, 30), st.integers(2, 40)),
    rank=st.integers(1, 6),
    tokens=st.integers(1, 200),
    mixed=st.floats(0, 2),
    quantizer=st.sampled_from(["nf4", "nvfp4", "mxfp4"]),
    seed=st.integers(0, 99),
)
def test_exact_is_below_the_others_whatever_the_inputs(shape, rank, tokens, mixed, quantizer, seed):
    weight, x, rank = gaussian(*shape, seed=seed), inputs(tokens, shape[1], seed, mixed), min(rank, *shape)
    found = {
        key: output_error(weight, fit(weight, key, x, rank, 5.66, quantizer), x)
        for key in ("qera-exact", "qera-approx", "loftq(iterations=1)")
    }
    zero = output_error(weight, tk.initialize(weight, "zero", quantizer), x)
    slack = 1e-3 * zero  # the damping's, and float32's
    assert found["qera-exact"] <= min(found["qera-approx"], found["loftq(iterations=1)"], zero) + slack


@pytest.mark.parametrize("seed", range(4))
def test_the_order_on_inputs_with_large_channels(seed):
    """exact ≤ approx ≤ plain, where channels differ more than they correlate, as in language models."""
    weight, x = gaussian(48, 64, seed=seed), inputs(400, 64, seed, mixed=0.5)
    exact, approx, plain = (
        output_error(weight, fit(weight, key, x, 6), x) for key in ("qera-exact", "qera-approx", "loftq(iterations=1)")
    )
    assert exact < approx < plain < output_error(weight, tk.initialize(weight, "zero"), x)


def test_both_are_one_where_channels_are_uncorrelated():
    weight = gaussian(30, 20)
    x = torch.diag(torch.exp(gaussian(20))) * 20**0.5  # R is diagonal
    exact, approx = fit(weight, "qera-exact", x), fit(weight, "qera-approx", x)
    assert torch.allclose(exact.B @ exact.A, approx.B @ approx.A, atol=1e-5)


@pytest.mark.parametrize("key", ["qera-exact", "qera-approx"])
def test_equal_moments_give_the_plain_fit(key):
    weight = gaussian(30, 20)
    start, plain = fit(weight, key, 3 * 20**0.5 * torch.eye(20)), fit(weight, "loftq(iterations=1)", torch.eye(20))
    assert torch.allclose(start.B @ start.A, plain.B @ plain.A, atol=1e-4)
    assert torch.allclose(start.A.norm(dim=1), plain.A.norm(dim=1), rtol=1e-3)  # and split as it is


@pytest.mark.parametrize("key", ["qera-exact", "qera-approx"])
@pytest.mark.parametrize("case", ["one token", "dead channels", "nothing", "tiny"])
def test_moments_without_full_rank(key, case):
    weight, x = gaussian(30, 40), inputs(200, 40)
    if case == "one token":
        x = x[:1]
    elif case == "dead channels":
        x[:, ::3] = 0
    elif case == "nothing":
        x = x * 0
    else:
        x = x * 1e-12
    start = fit(weight, key, x)
    assert start.A.isfinite().all() and start.B.isfinite().all()
    zero = tk.initialize(weight, "zero")
    assert output_error(weight, start, x) <= output_error(weight, zero, x) * (1 + 1e-3)
    assert start.notes["damping"] == (0.0 if case == "nothing" else 1e-6)
    assert start.notes.get("fallback") == ("fitted without weights: no input was seen" if case == "nothing" else None)
    if case == "nothing":
        plain = fit(weight, "loftq(iterations=1)", x)
        assert start.residual == pytest.approx(plain.residual, rel=1e-6)
    assert start.effective().abs().max() < 1e3


def test_moments_that_are_not_quite_positive_are_damped_more_and_it_is_noted():
    weight, x = gaussian(16, 24), inputs(100, 24)
    second = moments(x).second
    values, vectors = torch.linalg.eigh(second.double())
    values[0] = -1e-4 * float(second.diagonal().mean())
    bent = tk.Moments(((vectors * values) @ vectors.T).float(), 100)
    start = tk.initialize(weight, "qera-exact", "nf4", rank=4, moments=bent)
    assert start.notes["damping_raised"] == 3 and start.notes["damping"] == pytest.approx(1e-3)
    impossible = torch.eye(24) + 1e6 * (1 - torch.eye(24))
    for wrong, message in ((impossible, "not positive definite"), (-second, "never negative")):
        with pytest.raises(tk.InputError, match=rf"layer a\.b: .*{message}"):
            tk.initialize(weight, "qera-exact", "nf4", rank=4, name="a.b", moments=tk.Moments(wrong, 100))


@pytest.mark.parametrize("key", ["qera-exact", "qera-approx"])
def test_what_is_refused(key):
    weight = gaussian(16, 24)
    assert tk.initializer(key).needs_calibration
    with pytest.raises(tk.InputError, match="calibrated: give the second moments of weight's inputs"):
        tk.initialize(weight, key, rank=4)
    with pytest.raises(tk.InputError, match="24×24 are needed; found shape"):
        tk.initialize(weight, key, rank=4, moments=tk.Moments(torch.eye(16), 1))
    with pytest.raises(tk.InputError, match="with NaN or infinity"):
        tk.initialize(weight, key, rank=4, moments=tk.Moments(torch.full((24, 24), float("nan")), 1))
    with pytest.raises(tk.InputError, match=r"layer weight: .* rounded by none; these are by nvfp4"):
        tk.initialize(weight, key, rank=4, moments=tk.Moments(torch.eye(24), 1, "nvfp4"))
    with pytest.raises(tk.InputError, match="above 0"):
        tk.initializer(key, damping=0)
    with pytest.raises(tk.InputError, match="rank of 1 to 16"):
        tk.initialize(weight, key, rank=17, moments=tk.Moments(torch.eye(24), 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights(dtype):
    weight, x = gaussian(48, 64, dtype=dtype), inputs(300, 64)
    before = weight.clone()
    start = fit(weight, "qera-exact", x)
    assert torch.equal(weight, before) and start.base.dtype == dtype and start.A.dtype == torch.float32
    assert output_error(weight, start, x) < output_error(weight, tk.initialize(weight, "zero"), x)
    assert start.residuals[0] == pytest.approx(tk.initialize(weight, "zero").residual, rel=1e-6)
