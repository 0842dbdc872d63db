"""NVFP4 of rows: against torchao row by row; levels, scales and floors; what stochastic rounding promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows

MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def matrix(count: int, width: int, seed: int, dtype: torch.dtype = torch.float32, spread: int = 6) -> torch.Tensor:
    """Rows and columns whose sizes differ by orders of magnitude."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=made)
    x *= 10.0 ** torch.randint(-spread, spread + 1, (count, 1), generator=made)
    x *= 10.0 ** torch.randint(-2, 3, (1, width), generator=made)
    return x.to(dtype)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)


def steps(rows) -> torch.Tensor:
    """s·g of every value, float64 (M, K)."""
    scales = rows.scales.double() * rows.g.double()[:, None]
    return scales.repeat_interleave(16, dim=1)[:, : rows.width]


@pytest.fixture(scope="module")
def nvfp4_quantize():
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    return nvfp4_quantize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 64, 160])
def test_every_row_equals_torchao_under_its_g(nvfp4_quantize, dtype, width):
    """Scales bit for bit; codes too, but where torchao's product with a rounded reciprocal crosses a midpoint."""
    x = matrix(40, width, 3, dtype, spread=2 if dtype == torch.float16 else 6)
    rows = quantize_rows(x)
    near = ((x.double() / steps(rows)).abs()[..., None] - MIDDLES).abs().amin(-1) < 1e-6
    for at in range(len(x)):
        scales, codes = nvfp4_quantize(x[at : at + 1].float(), 16, rows.g[at])
        assert torch.equal(scales.view(-1), rows.scales[at])
        differing = unpacked(codes.view(1, -1)) != unpacked(rows.codes[at : at + 1])
        assert not (differing & ~near[at]).any()
    assert near.float().mean() < 0.01


@given(count=st.integers(1, 5), width=st.integers(1, 50), seed=st.integers(0, 10**6), size=st.integers(-36, 36))
def test_scales_and_codes_are_the_nearest(count, width, seed, size):
    """g is the least power of two that holds the row; every value is its nearest level, ties to the even code."""
    x = matrix(count, width, seed, spread=0) * 10.0**size
    rows = quantize_rows(x)
    mantissa = torch.frexp(rows.g).mantissa
    assert (mantissa == 0.5).all()
    least = 2.0**-120
    for row, g in zip(x, rows.g.tolist(), strict=True):
        largest = float(row.abs().max())
        assert largest <= 2688 * g * (1 + 2**-23) and (g == least or largest > 2688 * g / 2)
    ratio = x.double() / steps(rows)
    exact = LEVELS.double()
    found = rows.values().double() / steps(rows)
    best = (ratio.abs().clamp(max=6)[..., None] - exact).abs().amin(-1)
    assert ((ratio.clamp(-6, 6) - found).abs() <= best + 1e-6).all()
    assert torch.isin(found.abs(), exact).all()
    assert rows.width == width and rows.codes.shape == (count, 8 * math.ceil(width / 16))
    assert (unpacked(rows.codes)[:, width:] == 0).all()
    assert rows.nbytes == count * (8 * math.ceil(width / 16) + math.ceil(width / 16) + 4)


def test_ties_go_to_the_even_code():
    """A block whose scale is one: 6 stands first, then every midpoint, of both signs."""
    x = torch.cat([torch.tensor([448 * 6.0] + [0.0] * 15), torch.tensor([6.0]), MIDDLES, -MIDDLES, torch.zeros(1)])
    rows = quantize_rows(x[None])
    assert rows.g.item() == 1 and rows.scales.float().tolist() == [[448, 1]]
    even = [0, 1, 1, 2, 2, 4, 4]
    assert rows.values()[0, 16:].tolist() == [6, *even, *(-v for v in even), 0]


@given(
    width=st.integers(1, 50),
    seed=st.integers(0, 10**6),
    size=st.integers(-30, 36),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_values_are_exact_in_bfloat16(width, seed, size, dtype):
    """So that a 16-bit library multiplies the very numbers that an NVFP4 product multiplies."""
    x = (matrix(4, width, seed, spread=0) * 10.0**size).to(dtype)
    rows = quantize_rows(x)
    assert torch.equal(rows.values(torch.bfloat16).float(), rows.values())
    assert torch.equal(rows.unscaled().bfloat16().float(), rows.unscaled())


@given(width=st.integers(1, 50), seed=st.integers(0, 10**6))
def test_rounding_again_changes_nothing(width, seed):
    """What lost its rows on the way (a hook, a view) is rounded to the same values."""
    once = quantize_rows(matrix(4, width, seed, spread=2)).values()
    assert torch.equal(quantize_rows(once).values(), once)


@given(seed=st.integers(0, 10**6), power=st.integers(-60, 60))
def test_a_power_of_two_passes_through(seed, power):
    """x·2ᵏ has the codes and the block scales of x, and g·2ᵏ."""
    x = matrix(3, 40, seed, spread=0)
    one, other = quantize_rows(x), quantize_rows(x * 2.0**power)
    assert torch.equal(one.codes, other.codes) and torch.equal(one.g * 2.0**power, other.g)
    assert torch.equal(one.scales.view(torch.uint8), other.scales.view(torch.uint8))


def test_the_error_on_gaussian_rows_is_that_of_a_free_g():
    """The power of two costs nothing: .095, as with a tensor scale of amax/2688."""
    from toolkit_plugins.quantizers.nvfp4 import NVFP4

    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    found = float((quantize_rows(x).values() - x).norm() / x.norm())
    free = float((torch.cat([NVFP4().quantize(row[None]).dequantize() for row in x]) - x).norm() / x.norm())
    assert found == pytest.approx(0.095, abs=0.001) and found == pytest.approx(free, rel=0.01)


# zeros, floors, and what is not finite


def test_zeros_and_underflow_have_no_scale_that_is_zero_or_nan():
    x = torch.zeros(3, 32)
    x[1, 3], x[2, 0], x[2, 20] = 1e-38, 1.0, 1e-9  # the last block lies below its row's floor
    rows = quantize_rows(x)
    assert (rows.g > 0).all() and (rows.scales.float() >= 2.0**-6).all()
    assert torch.equal(rows.values()[0], x[0]) and rows.values()[2, 20] == 0
    assert rows.values().isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_value_that_is_not_finite_shows_in_its_row_alone(bad, noisy):
    x = matrix(4, 40, 0, spread=1)
    clean = quantize_rows(x, torch.full(x.shape, 0.5) if noisy else None).values()
    x[2, 35] = bad
    found = quantize_rows(x, torch.full(x.shape, 0.5) if noisy else None).values()
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


def test_no_rows():
    rows = quantize_rows(torch.zeros(0, 24))
    assert rows.values().shape == (0, 24) and rows.nbytes == 0


# stochastic rounding


@given(count=st.integers(1, 4), width=st.integers(1, 50), seed=st.integers(0, 10**6))
def test_stochastic_values_are_the_neighbours(count, width, seed):
    """Whatever the noise, a value goes to the level below or above it, and one that is a level stays."""
    x = matrix(count, width, seed, spread=2)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
    rows = quantize_rows(x, noise)
    ratio, found = (x.double() / steps(rows)).abs(), (rows.values().double() / steps(rows)).abs()
    assert (ratio <= 6 * (1 + 2**-23)).all()  # nothing saturates
    exact = LEVELS.double()
    below = exact[(torch.bucketize(ratio.clamp(max=6), exact, right=True) - 1).clamp(max=6)]
    above = exact[torch.bucketize(below, exact, right=True)]
    assert ((found == below) | (found == above)).all()
    assert (rows.values() * x >= 0).all()
    level = below == ratio
    assert torch.equal(found[level], ratio[level])


def test_the_noise_decides_at_the_share():
    """1.75 of [1.5, 2]: up below one half, and not at it; a block of zeros stays."""
    x = torch.tensor([[448 * 6.0] + [0.0] * 15 + [6.0, 1.75, -1.75, 2.25] + [0.0] * 12])
    for noise, expected in ((0.0, [2, -2, 3]), (0.2499, [2, -2, 3]), (0.4999, [2, -2, 2]), (0.5, [1.5, -1.5, 2])):
        rows = quantize_rows(x, torch.full(x.shape, noise))
        assert rows.scales.float().tolist() == [[448, 1]]
        assert rows.values()[0, 17:20].tolist() == expected and not rows.values()[0, 20:].any()


def test_the_mean_of_stochastic_rounding_is_the_value():
    """Within five standard errors, of every value, those that nearest scales would saturate too."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(4, 48, generator=made) * torch.tensor([1.0, 1e-3, 30.0, 1e5])[:, None]
    count = 4000
    tiled = x.repeat(count, 1)
    found = quantize_rows(tiled, torch.rand(tiled.shape, generator=made)).values().double().view(count, *x.shape)
    error = found.mean(0) - x
    standard = found.std(0) / math.sqrt(count)
    assert (error.abs() <= 5 * standard + 1e-6 * x.abs()).all()
    nearest = quantize_rows(x)
    assert ((x.abs() / steps(nearest)) > 6.01).any()  # these would have been short every time
    assert float(((error / standard.clamp(min=1e-12)) ** 2)[standard > 0].mean()) == pytest.approx(1, abs=0.4)


def test_stochastic_scales_cover_and_are_the_least():
    x = matrix(50, 64, 9, spread=3)
    rows, nearest = quantize_rows(x, torch.rand(x.shape)), quantize_rows(x)
    largest = x.view(50, 4, 16).abs().amax(-1) / rows.g[:, None]
    found, codes = rows.scales.float(), rows.scales.view(torch.uint8)
    assert torch.equal(rows.g, nearest.g)
    assert (6 * found >= largest * (1 - 2**-23)).all()
    below = (codes - 1).view(torch.float8_e4m3fn).float()
    assert ((6 * below < largest) | (found == 2.0**-6)).all()
    raised = (codes.int() - nearest.scales.view(torch.uint8).int()).unique().tolist()
    assert raised == [0, 1]
