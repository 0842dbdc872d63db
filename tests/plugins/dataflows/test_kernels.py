"""Triton kernels of what is elementwise in the data flow, beside the reference: on a GPU, or in Triton's interpreter.

The interpreter must be switched on before triton is imported, so that without a GPU these tests run in a process of
their own, started by the first one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toolkit_plugins.dataflows.pact.exact import Exact
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.quantizers.e2m1 import MAGNITUDES
from toolkit_plugins.quantizers.nvfp4_rows import Rows, quantize_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TRITON = importlib.util.find_spec("triton") is not None
kernels = pytest.mark.skipif(
    not TRITON or not (INTERPRETED or CUDA), reason="run by the first test, in Triton's interpreter"
)
EXAMPLES = settings(max_examples=300 if CUDA else 25, deadline=None)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.skipif(INTERPRETED or CUDA, reason="this process runs the kernels itself")
def test_kernels_pass_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
    ]
    done = subprocess.run([*command, "--import-mode=importlib"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_exact_is_imported_without_triton():
    code = "import sys; sys.modules['triton'] = None; from toolkit_plugins.dataflows.pact.exact import Exact; Exact()"
    subprocess.run([sys.executable, "-c", code], check=True)


def matrix(count: int, width: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    """Rows of very different sizes, with outliers in them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator) * torch.exp(2 * torch.randn(count, 1, generator=generator))
    x = x * torch.where(torch.rand(count, width, generator=generator) < 0.02, 40.0, 1.0) * size
    return x.clamp(-60000, 60000).to(dtype).to(DEVICE)


def same(found: Rows, expected: Rows) -> None:
    """Bit for bit; the codes of a row that is not finite say nothing, as its scales are NaN."""
    assert found.width == expected.width
    assert found.codes.shape == expected.codes.shape and found.codes.dtype == torch.uint8
    assert found.scales.dtype == torch.float8_e4m3fn and found.g.dtype == FP32
    finite = expected.g.isfinite()
    assert torch.equal(found.g.isfinite(), finite) and torch.equal(found.g[finite], expected.g[finite])
    assert torch.equal(found.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert torch.equal(found.codes[finite], expected.codes[finite])


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, signs of zero too; NaN where there is NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = (each.masked_fill(each.isnan(), 7.0) for each in (found, expected))
    assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


@st.composite
def matrices(draw) -> torch.Tensor:
    count, width = draw(st.integers(0, 7)), draw(st.integers(1, 200))
    x = matrix(count, width, FP32, draw(st.integers(0, 999)), 10.0 ** draw(st.integers(-6, 2)))
    for row in range(count):
        match draw(st.sampled_from(["as it is", "as it is", "zeros", "nan", "inf", "one"])):
            case "zeros":
                x[row] = 0
            case "nan":
                x[row, draw(st.integers(0, width - 1))] = torch.nan
            case "inf":
                x[row, draw(st.integers(0, width - 1))] = -torch.inf
            case "one":
                x[row] = 0
                x[row, -1] = -1e4
    return x.to(draw(st.sampled_from(DTYPES)))


@kernels
@EXAMPLES
@given(matrices(), st.sampled_from(DTYPES), st.booleans())
def test_rounding(x, dtype, stochastic):
    from toolkit_plugins.dataflows.pact.kernels.quantize import quantize

    noise = None
    if stochastic:
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device)
    expected = quantize_rows(x, noise)
    rows, values = quantize(x, noise=noise, dtype=dtype)
    same(rows, expected)
    equal(values, expected.values(dtype))
    only, none = quantize(x, noise=noise, codes=False, dtype=dtype), quantize(x, noise=noise)
    assert only[0] is None and none[1] is None
    equal(only[1], values)
    same(none[0], expected)


@kernels
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 16), (5, 1), (4096, 5), (3, 4096), (2, 5000), (1, 8192), (2, 14336), (1, 16384)]
)
def test_shapes(shape):
    x = matrix(*shape, BF16)
    expected = quantize_rows(x)
    rows = Exact().quantize(x)
    same(rows, expected)
    equal(Exact().values(rows, BF16), expected.values(BF16))


@kernels
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 2048), (4096, 8192), (777, 11008), (333, 3000), (65537, 64), (9, 32768)])
def test_large_shapes(shape, dtype):
    x = matrix(*shape, dtype)
    same(Exact().quantize(x), quantize_rows(x))
    noise = torch.rand(shape, device=x.device)
    same(Exact().quantize(x, noise), quantize_rows(x, noise))


@kernels
def test_every_finite_bfloat16():
    bits = torch.arange(2**16).to(torch.int32)
    x = (bits << 16).view(FP32)
    x = x[x.isfinite()].view(-1, 256).to(DEVICE)  # rows of one exponent, and its neighbour's
    same(Exact().quantize(x), quantize_rows(x))
    x = x.to(BF16)
    if INTERPRETED:  # which reads bfloat16's subnormal numbers wrong
        x = torch.where(x.abs() < 2.0**-126, 0.0, x)
    same(Exact().quantize(x), quantize_rows(x))
    mixed = x.view(-1)[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0)).to(DEVICE)].view(-1, 48)
    same(Exact().quantize(mixed), quantize_rows(mixed))


@kernels
def test_around_every_midpoint():
    """Float32 numbers at, just below and just above each midpoint, under block scales of every mantissa."""
    rows = []
    for mantissa in range(8, 16):
        for exponent in (-9, 0, 7):
            step = mantissa * 2.0**exponent / 8
            middle = (MIDPOINTS * step).float()
            around = [middle]
            for _ in range(4):
                around.insert(0, torch.nextafter(around[0], torch.zeros(())))
                around.append(torch.nextafter(around[-1], torch.tensor(1e9)))
            values = torch.stack(around).flatten()
            blocks = torch.cat([values, -values]).view(-1, 14)
            largest = torch.full((len(blocks), 1), 6 * step)
            first = torch.zeros(16)
            first[3] = 448 * 6 * 2.0**exponent / 16  # makes g 2^exponent/16, and s of the other blocks 2·mantissa
            rows.append(torch.cat([first, torch.cat([largest, blocks, -largest], dim=1).flatten()]))
    x = torch.stack(rows).to(DEVICE)
    expected = quantize_rows(x)
    assert len(set(expected.scales.float()[:, 1:].flatten().tolist())) == 8  # as it is meant to be
    same(Exact().quantize(x), expected)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    same(Exact().quantize(x, noise), quantize_rows(x, noise))


@kernels
@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 7), (FP16, 10)])
def test_every_short_mantissa_under_every_scale(dtype, bits):
    """All 16-bit numbers that round to anything but zero, under block scales of every mantissa: ties and neighbours."""
    mantissas = 1 + torch.arange(2**bits) / 2**bits
    rows = []
    for mantissa in range(8, 16):
        step = mantissa / 8
        values = (mantissas[:, None] * 2.0 ** torch.arange(-4, 4)).flatten()
        values = values[values <= 6 * step]
        values = torch.nn.functional.pad(values, (0, 15 * 2**bits // 2 - len(values)))
        blocks = torch.cat([values.view(-1, 15), torch.full((2**bits // 2, 1), 6 * step)], dim=1)
        first = torch.zeros(16)
        first[3] = 448 * 6 / 16
        rows.append(torch.cat([first, blocks.flatten()]))
    x = torch.stack(rows)
    assert torch.equal(x.to(dtype).float(), x)
    x = torch.cat([x, -x]).to(dtype).to(DEVICE)
    expected = quantize_rows(x)
    assert len(set(expected.scales.float()[:, 1:].flatten().tolist())) == 8
    same(Exact().quantize(x), expected)
    same(Exact().quantize(x.float()), expected)
    never = torch.zeros(x.shape, device=DEVICE)  # rounds up all that is not a level
    same(Exact().quantize(x, never), quantize_rows(x, never))


if TRITON:
    import triton
    import triton.language as tl
    from toolkit_plugins.dataflows.pact.kernels.e2m1 import near_quotient, quotient

    @triton.jit
    def both_quotients(x_ptr, by_ptr, reciprocal_ptr, near_ptr, whole_ptr, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        x, reciprocal = tl.load(x_ptr + at), tl.load(reciprocal_ptr + at)
        tl.store(near_ptr + at, near_quotient(x, reciprocal))
        tl.store(whole_ptr + at, quotient(x, tl.load(by_ptr + at), reciprocal))


@kernels
@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_quotients_under_reciprocals_that_are_off(off):
    """A GPU's reciprocals are right to two units of the last place: sides of midpoints and quotients are right."""
    generator = torch.Generator().manual_seed(off)
    size = 4096
    by = torch.randint(8, 16, (16 * size,), generator=generator) * 2.0 ** torch.randint(-6, 6, (16 * size,))
    ties = MIDPOINTS[torch.randint(0, 7, by.shape, generator=generator)] * by
    short = ((1024 + torch.randint(0, 1024, by.shape, generator=generator)) / 2048 * 6 * by).to(FP16).float()
    long = torch.rand(by.shape, generator=generator) * 6 * by
    reciprocal = ((1 / by).view(torch.int32) + off).view(FP32)
    for x in (ties.float(), short, long):
        given = [each.to(DEVICE) for each in (x, by, reciprocal)]
        near, whole = torch.empty_like(given[0]), torch.empty_like(given[0])
        both_quotients[(16,)](*given, near, whole, SIZE=size)
        assert torch.equal(whole.cpu(), x / by)
        if x is not long:
            sides = [(each.double()[:, None] - MIDPOINTS).sign() for each in (near.cpu(), x.double() / by)]
            assert torch.equal(*sides)


@kernels
def test_around_every_midpoint_of_scales():
    """Blocks whose amax/6/g lies at, below and above the midpoint of two E4M3 numbers."""
    each = torch.arange(8, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middle = ((each[1:] + each[:-1]) / 2 * 6).float()
    around = torch.stack([middle, torch.nextafter(middle, torch.zeros(())), torch.nextafter(middle, middle * 2)])
    x = torch.zeros(3, 119, 16)
    x[:, :-1, 5] = around
    x[:, -1, 0] = 2688
    x = x.view(3, -1).to(DEVICE)
    for size in (1.0, 2.0**-40, 2.0**60):
        same(Exact().quantize(x * size), quantize_rows(x * size))
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        same(Exact().quantize(x * size, noise), quantize_rows(x * size, noise))


@kernels
@pytest.mark.parametrize("size", [2.0**-118, 1e-33, 1e-30, 1e30, 3e38])
def test_the_ends_of_float32(size):
    x = (torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) / 4).clamp(-1, 1).to(DEVICE) * size
    same(Exact().quantize(x), quantize_rows(x))


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_under_every_scale(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(126, 1)
    scales = torch.arange(1, 127, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    for power in (-20, 0, 9):
        g = torch.full((126,), 2.0**power)
        for width in (512, 507):
            rows = Rows(codes.to(DEVICE), scales.to(DEVICE), g.to(DEVICE), width)
            equal(Exact().values(rows, dtype), rows.values(dtype))


@kernels
def test_rows_that_lie_apart():
    x = matrix(9, 130, BF16)
    for view in (x[:, :65], x[:, 65:], x[::2], x.mT, x[2:5, 7:23]):
        same(Exact().quantize(view), quantize_rows(view))
    rows = quantize_rows(x)
    part = Rows(rows.codes[3:], rows.scales[3:], rows.g[3:], 130)
    equal(Exact().values(part, BF16), part.values(BF16))
    odd = Rows(
        *(torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in (rows.codes, rows.scales, rows.g)), 130
    )
    equal(Exact().values(odd, BF16), rows.values(BF16))


@kernels
def test_drawn_noise():
    """It is uniform: each share of values rounds up as often as it is large; and it is a function of the seed."""
    from toolkit_plugins.dataflows.pact.kernels.quantize import quantize

    shares = torch.linspace(0.03, 0.97, 15)
    row = torch.cat([torch.tensor([6.0 * 448 / 256]), 2 + shares])  # s·g = 448/256 … so levels are apart by a step
    step = 448 / 256
    x = torch.cat([row[:1], (2 + shares) * step]).repeat(1024, 4).to(DEVICE)
    seed = torch.tensor([5], device=DEVICE)
    rows, values = quantize(x, seed=seed, dtype=FP32)
    equal(rows.values(), values)
    up = (values.view(1024, 4, 16)[..., 1:] / step - 2).cpu()
    assert set(up.unique().tolist()) == {0.0, 1.0}
    deviation = (shares * (1 - shares) / 4096).sqrt()
    assert ((up.mean((0, 1)) - shares).abs() < 5 * deviation).all()
    flat = up.view(1024, 60) - shares.repeat(4)
    between = torch.corrcoef(flat.T) - torch.eye(60)
    assert between.abs().max() < 6 / 32  # columns are independent of each other, and rows:
    assert (flat[1:] * flat[:-1]).mean().abs() < 5 * 0.25 / (1023 * 60) ** 0.5
    again, other = quantize(x, seed=seed)[0], quantize(x, seed=seed + 1)[0]
    same(again, rows)
    assert (other.codes != rows.codes).float().mean() > 0.2
    bfloat = matrix(5, 100, BF16)
    expected = quantize_rows(
        bfloat, torch.zeros(bfloat.shape, device=DEVICE)
    )  # its scales are under any noise the same
    assert torch.equal(quantize(bfloat, seed=seed)[0].scales.view(torch.uint8), expected.scales.view(torch.uint8))


@kernels
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (0, 32), (130, 40), (1, 1), (3, 2050)])
def test_norm(shape, dtype, rounded):
    """Codes are those of w ∘ x·rstd with the kernel's own rstd, which has the reference's terms in another order."""
    x, weight = matrix(*shape, dtype), matrix(1, shape[1], dtype, 1)[0]
    weight[::7] = 0
    y, rows, rstd = Exact().norm(x, weight, 1e-5, dtype, rounded=rounded)
    exact = (x.double().square().mean(-1) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0)
    wide = x.float() * rstd[:, None] * weight.float()
    same(rows, quantize_rows(wide))
    if INTERPRETED and dtype == BF16 and not rounded:  # which cuts what it should round
        wide = (wide.view(torch.int32) & -65536).view(FP32)
    equal(y, rows.values(dtype) if rounded else wide.to(dtype))


@kernels
@pytest.mark.parametrize("kept", ["rows", "values"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (0, 32), (130, 40), (1, 1), (3, 2050)])
def test_norm_gradient(shape, dtype, kept):
    reference = Execution()
    x, weight, gradient = (matrix(*each, dtype, seed) for seed, each in enumerate((shape, (1, shape[1]), shape)))
    weight = weight[0]
    weight[::7] = 0
    values, rows, rstd = reference.norm(x, weight, 1e-5, dtype, rounded=False)
    y = rows if kept == "rows" else values
    found = Exact().norm_gradient(gradient, y, weight, rstd)
    assert found.dtype == dtype
    expected = reference.norm_gradient(gradient.float(), y, weight, rstd)
    near(found, expected)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To a few float32 roundings of a row's largest value, and the one to the dtype."""
    scale = expected.abs().amax(-1, keepdim=True) if expected.numel() else expected
    smallest = 2.0**-24 if found.dtype == FP16 else 0.0  # half its last place where it has no more exponents
    inside = expected.abs() < torch.finfo(found.dtype).max
    unit = torch.finfo(found.dtype).eps / (1 if INTERPRETED and found.dtype == BF16 else 2)  # the interpreter cuts
    off = (found.float() - expected).abs()
    assert (off <= 2e-6 * scale + unit * expected.abs() + smallest)[inside].all()


def rounds(rows: Rows, exact: torch.Tensor) -> None:
    """Rows are a rounding of float64 values that were computed in float32, judged without the reference."""
    slack = 2.0**-18 * exact.abs()
    pad = -exact.shape[1] % 16
    blocks = torch.nn.functional.pad(exact, (0, pad)).view(len(exact), -1, 16)
    largest = blocks.abs().amax(-1)
    g, s = rows.g.double(), rows.scales.double()
    least = (largest.amax(-1) / 2688).clamp(min=2.0**-120)
    assert (least <= g * (1 + 2e-6)).all() and (g < 2 * least * (1 + 2e-6)).all()
    wanted = (largest / 6 / g[:, None]).clamp(2.0**-6, 448)
    assert ((s - wanted).abs() <= 2 ** (wanted.log2().floor() - 4) * (1 + 1e-4)).all()
    levels = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64, device=exact.device)
    steps = (s * g[:, None]).repeat_interleave(16, 1)[:, : exact.shape[1]]
    best = (levels * steps[..., None] - exact[..., None]).abs().amin(-1)
    assert ((rows.values().double() - exact).abs() <= best + slack).all()


@kernels
@pytest.mark.parametrize(("keep", "round_first"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (0, 32), (130, 40), (1, 1), (2, 3000)])
def test_gated(shape, dtype, keep, round_first):
    """Gate and up are halves of one tensor, as in Phi-3."""
    count, width = shape
    both = matrix(count, 2 * width, dtype, size=0.5).clamp(-100, 100)
    gate, up = both.chunk(2, -1)
    h, rows, of_gate, of_up = Exact().gated_and_kept(gate, up, dtype, keep=keep, round_first=round_first)
    expected = Execution().gated_and_kept(gate, up, dtype, keep=keep, round_first=round_first)
    if keep:
        same(of_gate, expected[2])
        same(of_up, expected[3])
    else:
        assert of_gate is None and of_up is None
    equal(h, rows.values(dtype))
    assert rows.codes.shape == expected[1].codes.shape
    if not count:
        return
    pair = (gate, up) if not round_first else [quantize_rows(each).values(dtype) for each in (gate, up)]
    a, b = (each.double() for each in pair)
    rounds(rows, a * a.sigmoid() * b)
    assert (rows.codes != expected[1].codes).float().mean() < 0.005


@kernels
def test_gated_passes_on_what_is_not_finite():
    gate, up = matrix(4, 48, BF16), matrix(4, 48, BF16, 1)
    gate[1, 7], up[2, 9] = torch.nan, torch.inf
    h, rows = Exact().gated(gate, up, BF16)
    assert h.isnan().all(1).tolist() == [False, True, True, False] == rows.g.isnan().tolist()


@kernels
@pytest.mark.parametrize("kept", ["rows", "values", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (0, 32), (130, 40), (1, 1), (2, 3000)])
def test_gated_gradient(shape, dtype, kept):
    count, width = shape
    gate, up = matrix(count, 2 * width, dtype, size=0.5).clamp(-60, 60).chunk(2, -1)
    gradient = matrix(count, width, dtype, 2, 1e-2)
    if kept == "rows":
        gate, up = quantize_rows(gate), quantize_rows(up)
    elif kept == "float32":
        gate, up = gate.float(), up.float()
    found = Exact().gated_gradient(gradient, gate, up)
    expected = Execution().gated_gradient(gradient.float(), gate, up)
    for each, wanted in zip(found, expected, strict=True):
        assert each.dtype == dtype and each.is_contiguous()
        near(each, wanted)


@kernels
@pytest.mark.parametrize("layouts", ["cached", "shared"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_layer_behind_a_norm_and_a_gate(dtype, layouts):
    """Forward and backward through all that Exact computes, beside the reference on the same numbers."""
    from toolkit_plugins.dataflows.pact.gated import gated
    from toolkit_plugins.dataflows.pact.norm import PactNorm
    from toolkit_plugins.dataflows.pact.settings import Settings
    from toolkit_plugins.dataflows.pact.weights import PactLinear
    from toolkit_plugins.quantizers.nvfp4 import NVFP4

    chosen = Settings(layouts=layouts)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) / 8 for shape in ((96, 48), (48, 96))]
    start = torch.randn(2, 5, 48, generator=generator).to(dtype).to(DEVICE)
    target = torch.randn(2, 5, 48, generator=generator).to(dtype).to(DEVICE)
    results = []
    for execution in (Execution(), Exact()):
        bias = torch.linspace(-1, 1, 96)
        both = PactLinear(NVFP4().quantize(weights[0]), bias, dtype, chosen, weights[0]).to(DEVICE)
        down = PactLinear(NVFP4().quantize(weights[1][:, :48]), None, dtype, chosen, weights[1][:, :48]).to(DEVICE)
        both.execution = down.execution = execution
        norm = PactNorm(torch.nn.Parameter(torch.linspace(0.5, 2, 48)), 1e-6, dtype, execution, chosen).to(DEVICE)
        x = start.clone().requires_grad_()
        y = down(gated(*both(norm(x)).chunk(2, -1), dtype, execution, chosen))
        y.backward(target)
        results.append((y.detach().float(), x.grad.float()))
    for expected, found in zip(*results, strict=True):
        # a value that a product's last place moves over a midpoint moves a whole step
        assert (found - expected).norm() <= (0.05 if dtype == BF16 else 1e-3) * expected.norm()


@kernels
@pytest.mark.parametrize("how", ["nearest", "stochastic", "16bit"])
def test_input_gradients(how):
    from toolkit_plugins.dataflows.pact.settings import Settings
    from toolkit_plugins.dataflows.pact.weights import PactLinear
    from toolkit_plugins.quantizers.nvfp4 import NVFP4

    weight = torch.randn(80, 48, generator=torch.Generator().manual_seed(0))
    layer = PactLinear(NVFP4().quantize(weight), None, FP32, Settings(), weight).to(DEVICE)
    gradient = matrix(6, 80, FP32)
    if how != "stochastic":
        expected = Execution().input_gradient(gradient, layer, FP32, how)
        found = Exact().input_gradient(gradient, layer, FP32, how)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        return
    torch.manual_seed(0)
    draws = torch.stack([Exact().input_gradient(gradient, layer, FP32, how) for _ in range(200)])
    exact = Execution().input_gradient(gradient, layer, FP32, "16bit")
    error = (draws.mean(0) - exact).abs() / (draws.std(0) / 200**0.5)
    assert error.max() < 5 and error.mean() < 1.2  # unbiased: of a normal number, |z| is 0.8 on average


@kernels
@pytest.mark.gpu
def test_speeds_are_measured():
    from toolkit_plugins.dataflows.pact.kernels.speed import measure

    speeds = {each.name: each for each in measure(4096, 2048, repeats=5)}
    assert speeds["rows"].bytes == 4096 * 2048 * (2 + 0.5 + 1 / 16) + 4096 * 4
    assert all(0.05 < each.share < 1.5 for each in speeds.values()), speeds
