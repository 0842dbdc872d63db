"""The best factors of rank r, against full singular value decompositions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toolkit_plugins.initializers import low_rank

SHAPES = [(64, 64), (48, 80), (80, 48), (1, 9), (9, 1), (7, 13)]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def left(matrix, found):
    return float((matrix.double() - found.left.double() @ found.right.double()).norm())


def least(matrix, rank):
    return float(torch.linalg.svdvals(matrix.double())[rank:].square().sum().sqrt())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["auto", "exact", "randomised"])
def test_optimal_at_every_rank(shape, method):
    matrix = gaussian(*shape)
    whole = float(matrix.double().norm())
    for rank in range(1, min(shape) + 1):
        found = low_rank.best(matrix, rank, method=method, tolerance=1e-5)
        assert found.left.shape == (shape[0], rank) and found.right.shape == (rank, shape[1])
        assert left(matrix, found) == pytest.approx(least(matrix, rank), rel=1e-6, abs=1e-6 * whole)
        sigma = torch.linalg.svdvals(matrix.double())[:rank]
        assert torch.allclose(found.sigma, sigma, rtol=1e-5, atol=1e-6 * whole)


@pytest.mark.parametrize("shape", [(256, 700), (700, 256), (400, 400)])
@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3, 1e-4])
def test_the_stated_error_bounds_the_true_one(shape, rank, tolerance):
    """On a flat spectrum, the hardest: what quantization leaves."""
    matrix = gaussian(*shape, seed=rank)
    found = low_rank.best(matrix, rank, method="randomised", tolerance=tolerance)
    best = float(torch.linalg.svdvals(matrix.double())[:rank].square().sum())
    assert found.error <= tolerance and found.exact == (found.error == 0)
    assert not found.exact or (rank, tolerance) == (16, 1e-4)  # there its space would fill the matrix
    taken = float(matrix.double().square().sum()) - left(matrix, found) ** 2
    assert best * (1 - 1e-6) / (1 + found.error) <= taken <= best * (1 + 1e-6)
    assert found.captured == pytest.approx(taken, rel=1e-5)


def test_the_true_error_at_the_default_is_a_few_millionths():
    matrix = gaussian(600, 900)
    found = low_rank.best(matrix, 8, method="randomised")
    best = float(torch.linalg.svdvals(matrix.double())[:8].square().sum())
    assert not found.exact and found.error <= 1e-3
    assert 1 - found.captured / best < 1e-5


@pytest.mark.parametrize("decay", [0.5, 2.0, 8.0])
def test_falling_spectra_take_few_products(decay):
    u, v = torch.linalg.qr(gaussian(300, 300))[0], torch.linalg.qr(gaussian(400, 300, seed=1))[0]
    sigma = torch.arange(1, 301).float() ** -decay
    matrix = (u * sigma) @ v.T
    found = low_rank.best(matrix, 8, method="randomised", tolerance=1e-4)
    assert not found.exact and found.products <= (12 if decay < 1 else 4)
    assert found.captured == pytest.approx(float(sigma[:8].double().square().sum()), rel=1e-5)


@pytest.mark.parametrize("method", ["exact", "randomised"])
@pytest.mark.parametrize("true", [0, 1, 3])
def test_ranks_below_the_one_that_is_asked_for(method, true):
    matrix = gaussian(120, true) @ gaussian(true, 90, seed=1)
    found = low_rank.best(matrix, 8, method=method)
    assert left(matrix, found) <= 1e-5 * (float(matrix.norm()) or 1)
    assert found.left.isfinite().all() and found.right.isfinite().all()
    a, b = found.split(2.0, torch.full((8, 90), 0.5))
    assert (a[true:] == 0.5).all() and (b[:, true:] == 0).all()  # as the zero start has them, and none dead for good
    assert (b[:, :true].norm(dim=0) > 0).all()
    assert torch.allclose(2.0 * b @ a, matrix, atol=1e-4 * (float(matrix.abs().max()) or 1))


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (64, 64)])
@pytest.mark.parametrize("method", ["exact", "randomised"])
def test_rows_and_columns_of_zeros_stay_so(shape, method):
    matrix = gaussian(*shape)
    matrix[[3, 17]] = 0
    matrix[:, 5] = 0
    found = low_rank.best(matrix, 8, method=method, tolerance=1e-5)
    assert (found.left[[3, 17]] == 0).all() and (found.right[:, 5] == 0).all()
    assert left(matrix, found) == pytest.approx(least(matrix, 8), rel=1e-6)


def test_a_search_that_does_not_reach_its_tolerance_is_decomposed_in_full():
    matrix = torch.linalg.qr(gaussian(100, 100))[0]  # one singular value a hundredfold: nothing stands out
    found = low_rank.best(matrix + 1e-3 * gaussian(100, 100, seed=2), 40, method="randomised", tolerance=1e-5)
    assert found.exact and found.error == 0 and found.products > 0


def test_the_random_columns_are_a_function_of_the_seed():
    matrix, before = gaussian(300, 300), torch.random.get_rng_state()
    one, two, other = (low_rank.best(matrix, 4, method="randomised", seed=s) for s in (3, 3, 4))
    assert torch.equal(one.left, two.left) and torch.equal(one.right, two.right)
    assert not torch.equal(one.right, other.right)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_good_guess_saves_products():
    matrix = gaussian(600, 600)
    cold = low_rank.best(matrix, 8, method="randomised")
    warm = low_rank.best(matrix + 1e-3 * gaussian(600, 600, seed=1), 8, method="randomised", guess=cold.right.T)
    assert warm.products < cold.products


@pytest.mark.parametrize("rank", [0, -1, 49])
def test_ranks_that_are_none(rank):
    with pytest.raises(ValueError, match=f"found {rank}"):
        low_rank.best(gaussian(48, 80), rank)


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    share=st.floats(0, 1),
    scaling=st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 100),
)
def test_the_product_does_not_depend_on_the_scaling(shape, share, scaling, size, seed):
    matrix = size * gaussian(*shape, seed=seed)
    rank = 1 + round(share * (min(shape) - 1))
    found = low_rank.best(matrix, rank)
    a, b = found.split(scaling, torch.zeros(rank, shape[1]))
    product = scaling * b.double() @ a.double()
    assert torch.allclose(product, found.left.double() @ found.right.double(), atol=2e-6 * float(matrix.norm()))
    # of one size: A's rows and B's columns
    assert torch.allclose(a.norm(dim=1), b.norm(dim=0), rtol=1e-4)


@pytest.mark.parametrize("scaling", [0.25, 1.0, 2.0, 5.66])
def test_the_gradients_of_both_halves(scaling):
    """With all of 1/s in B the gradients' ratio is s-fold, and what a step of gradient descent does s²-fold."""
    weight = gaussian(30, 50)
    found = low_rank.best(weight, 4)
    x, y = gaussian(50, 20, seed=1), gaussian(30, 20, seed=2)

    def gradients(a, b):
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        ((scaling * b @ (a @ x) - y) ** 2).sum().backward()
        through_b, through_a = scaling * b.grad @ a.detach(), scaling * b.detach() @ a.grad
        return float(b.grad.norm() / a.grad.norm()), float(through_b.norm() / through_a.norm())

    a, b = found.split(scaling, torch.zeros(4, 50))
    size, step = gradients(a, b)
    lopsided_size, lopsided_step = gradients(a * scaling**0.5, b / scaling**0.5)
    assert lopsided_size / size == pytest.approx(scaling, rel=1e-4)
    assert lopsided_step / step == pytest.approx(scaling**2, rel=1e-4)
    if scaling == 5.66:
        assert lopsided_step / step > 30
    # ∂B = s·∂W·Aᵀ: proportional to √(sσ), as A is √(σ/s) long
    assert torch.allclose(a.norm(dim=1), (found.sigma / scaling).sqrt().float(), rtol=1e-5)
    assert math.isfinite(size)
