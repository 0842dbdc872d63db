"""The E2M1 formats against torchao and compressed-tensors, and where those libraries are wrong."""

from __future__ import annotations

import pytest
import torch
from toolkit_plugins.quantizers.e2m1 import MAGNITUDES

import toolkit as tk

MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
TO_EVEN = (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)


def weight(shape: tuple[int, ...], scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def nibbles(packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Codes of a byte tensor, the first in the low half."""
    flat = packed.reshape(-1).view(torch.uint8)
    return torch.stack([flat & 15, flat >> 4], 1).view(-1)[: torch.Size(shape).numel()].view(shape)


def ulps_from_a_middle(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """How many float32 steps |w/scale| lies from the nearest midpoint of two magnitudes."""
    ratio = (w.double() / scale.double()).abs().float()[..., None]
    middles = torch.tensor(MIDDLES)
    return (ratio.view(torch.int32) - middles.view(torch.int32)).abs().amin(-1)


@pytest.fixture(scope="module")
def torchao():
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

    class Oracle:
        nvfp4 = staticmethod(nvfp4_tensor.nvfp4_quantize)
        global_scale = staticmethod(nvfp4_tensor.per_tensor_amax_to_scale)
        mx = staticmethod(mx_tensor.to_mx)

    return Oracle


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-6, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [False, True])
def test_nvfp4_equals_torchao(torchao, dtype: torch.dtype, scale: float, spread: bool) -> None:
    """Block scales bit for bit; codes but within 2 float32 ulp of a midpoint, which are counted.

    torchao multiplies by (1/g)/s where the reference divides by s·g. With `spread`, rows run over eight orders
    of magnitude, so that the floor of the block scales acts; one row is zero.
    """
    w = weight((96, 320), scale)
    if spread:
        w *= torch.logspace(-8, 0, 96)[:, None]
        w[5] = 0
    w = w.to(dtype)
    ours = tk.quantizer("nvfp4").quantize(w)
    g = torchao.global_scale(w.abs().max())
    scales, codes = torchao.nvfp4(w, 16, g)
    assert torch.equal(ours.tensors["global_scale"], g)
    assert torch.equal(ours.tensors["scales"].view(torch.uint8), scales.view(torch.uint8).view(96, 20))
    differ = nibbles(ours.tensors["codes"], (96, 320)) != nibbles(codes, (96, 320))
    step = (scales.float().view(96, 20) * g).repeat_interleave(16, 1)
    close = ulps_from_a_middle(w.float(), step) <= 2
    assert not (differ & ~close).any()
    assert differ.sum() <= close.sum() and differ.float().mean() < 0.01


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_equals_torchao(torchao, dtype: torch.dtype, scale: float) -> None:
    """Every byte: scales are powers of two, so that dividing and multiplying by the reciprocal are one."""
    w = weight((96, 320), scale).to(dtype)
    w[3] = 0
    ours = tk.quantizer("mxfp4").quantize(w)
    scales, codes = torchao.mx(w, torch.float4_e2m1fn_x2, 32)
    assert torch.equal(ours.tensors["scales"], scales.view(torch.uint8).view(96, 10))
    assert torch.equal(ours.tensors["codes"], codes.view(torch.uint8).view(-1))


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-6])
def test_nvfp4_equals_compressed_tensors_on_float32(scale: float) -> None:
    """It keeps 1/g and multiplies: block scales and codes differ only next to a midpoint."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    w = weight((96, 320), scale)
    inverse = generate_gparam(w.min(), w.max())
    e4m3 = torch.float8_e4m3fn
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=e4m3, zp_dtype=e4m3
    )
    blocks = w.view(96, 20, 16)
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=inverse)
    codes = quantize_and_pack_fp4(w, scales, global_scale=inverse, group_size=16)
    ours = tk.quantizer("nvfp4").quantize(w)
    other = ours.tensors["scales"].float() != scales.float()
    assert other.float().mean() < 0.001
    step = (ours.tensors["scales"].float() * ours.tensors["global_scale"]).repeat_interleave(16, 1)
    differ = (nibbles(ours.tensors["codes"], (96, 320)) != nibbles(codes, (96, 320))) & ~other.repeat_interleave(16, 1)
    assert not (differ & (ulps_from_a_middle(w, step) > 2)).any()


@pytest.mark.parametrize("key", ["nvfp4", "mxfp4", "fp4-e2m1"])
@pytest.mark.parametrize("sign", [1, -1])
def test_every_tie_goes_to_the_even_code(key: str, sign: int) -> None:
    """A block whose scale is one (NVFP4: s = 448, g = 1/448), holding the midpoints and their neighbours."""
    w = torch.tensor([*MIDDLES, 6.0])
    w = torch.cat([w, torch.nextafter(w[:7], w.new_zeros(7)), torch.nextafter(w[:7], w[:7] + 9)]) * sign
    w = torch.cat([w, torch.full((42,), 6.0)]).view(1, 64)
    blocks = {"nvfp4": 16, "mxfp4": 32, "fp4-e2m1": 64}[key]
    w[0, ::blocks] = 6.0  # every block has the same maximum
    found = tk.quantizer(key).quantize(w).dequantize()[0]
    right = torch.tensor([*TO_EVEN, 6.0, *MAGNITUDES[:7], *MAGNITUDES[1:]]) * sign
    keep = torch.ones(22, dtype=torch.bool)
    keep[::blocks] = False
    assert torch.equal(found[:22][keep], right[keep])
    assert (found[:22][~keep] == 6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key", ["nvfp4", "mxfp4", "fp4-e2m1"])
def test_zeros_stay_zeros_where_torchao_gives_nan(key: str, dtype: torch.dtype) -> None:
    packed = tk.quantizer(key).quantize(torch.zeros(7, 48, dtype=dtype))
    assert (packed.dequantize() == 0).all()
    assert all(t.float().isfinite().all() for t in packed.tensors.values())


def test_torchao_gives_nan_on_zeros(torchao) -> None:
    """The reason for the test above: remove both when torchao is mended."""
    w = torch.zeros(4, 64)
    assert torchao.nvfp4(w, 16, torchao.global_scale(w.abs().max()))[0].float().isnan().all()


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-6, 1e-30, 1e30])
def test_nvfp4_relative_error_does_not_depend_on_scale(scale: float) -> None:
    """About .095 on Gaussian data; block scales at their largest are 448, never NaN."""
    w = weight((128, 256), scale)
    packed = tk.quantizer("nvfp4").quantize(w)
    assert tk.quantizer("nvfp4").measure(w).relative == pytest.approx(0.095, abs=0.002)
    assert packed.tensors["scales"].float().max() == 448


def test_nvfp4_scale_above_448_is_clamped_before_the_cast() -> None:
    """amax₁₆/6/g of the largest block may round to just above 448."""
    for seed in range(50):
        w = weight((3, 32), 1.0, seed)
        scales = tk.quantizer("nvfp4").quantize(w).tensors["scales"].float()
        assert scales.isfinite().all() and scales.max() == 448


def test_nvfp4_small_blocks_have_the_documented_floor() -> None:
    w = torch.ones(1, 32) * 6 * 448
    w[0, 16:] = torch.tensor([1e-3, -0.02, 0.0] + [0.01] * 13)  # 0.02/6 lies below 2⁻⁶
    packed = tk.quantizer("nvfp4").quantize(w)
    assert packed.tensors["global_scale"] == 1 and packed.tensors["scales"].float()[0].tolist() == [448, 2**-6]
    right = [0.0, -1.5 * 2**-6, 0.0] + [2**-7] * 13  # multiples of s·g/2 = 2⁻⁷
    assert packed.dequantize()[0, 16:].tolist() == right
    tiny = tk.quantizer("nvfp4").quantize(torch.full((1, 16), 1e-44))
    assert (tiny.dequantize() == 0).all()


def test_mxfp4_scales_by_hand() -> None:
    """2^(⌊log₂ amax⌋ − 2): 6 → 1, 4 → 1, 3.99 → ½, 7.9 → 1 (saturated to 6)."""
    for top, scale in ((6.0, 1.0), (4.0, 1.0), (3.99, 0.5), (7.9, 1.0), (1e-38, 2.0**-127)):
        packed = tk.quantizer("mxfp4").quantize(torch.tensor([[top, 0.0]]))
        assert 2.0 ** (packed.tensors["scales"].item() - 127) == scale if top > 1e-30 else True
        assert packed.dequantize()[0, 0].item() == pytest.approx(min(top, 6 * scale), rel=0.3)
    assert tk.quantizer("mxfp4").quantize(torch.full((1, 32), 7.9)).dequantize().unique().tolist() == [6.0]


def test_bits_per_weight_are_honest() -> None:
    w = weight((64, 128))
    assert tk.quantizer("nvfp4").quantize(w).nbytes == 64 * 64 + 64 * 8 + 4
    assert tk.quantizer("mxfp4").quantize(w).bits_per_weight == 4.25
    assert tk.quantizer("fp4-e2m1").quantize(w).bits_per_weight == 4.5


def test_3d_weights_and_ragged_rows_have_blocks_by_row() -> None:
    """Each row of a 3-D weight is quantized as that row alone, with the tensor's own g."""
    w = weight((3, 5, 21))
    whole = tk.quantizer("nvfp4").quantize(w)
    g = whole.tensors["global_scale"]
    for row, scales, decoded in zip(
        w.view(15, 21), whole.tensors["scales"], whole.dequantize().view(15, 21), strict=True
    ):
        right = (torch.tensor([row[:16].abs().max(), row[16:].abs().max()]) / 6 / g).to(torch.float8_e4m3fn)
        assert torch.equal(scales.float(), right.float())
        step = (right.float() * g).repeat_interleave(16)[:21]
        levels = torch.tensor(MAGNITUDES)
        nearest = (step[:, None] * levels - row.abs()[:, None]).abs().amin(1)
        assert torch.allclose((decoded - row).abs(), nearest, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("key", ["nvfp4", "mxfp4", "fp4-e2m1", "nf4(double=false)", "fp4-bnb(double=false)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cuda_equals_cpu(key: str, dtype: torch.dtype) -> None:
    w = weight((65, 77), 0.02).to(dtype)
    here, there = tk.quantizer(key).quantize(w), tk.quantizer(key).quantize(w.cuda())
    for name, tensor in here.tensors.items():
        assert torch.equal(tensor.float(), there.tensors[name].cpu().float()), name
    assert torch.equal(here.dequantize(), there.dequantize().cpu())
    for field in ("mse", "mae", "relative", "max"):
        found = getattr(tk.quantizer(key).measure(w.cuda()), field)
        assert found == pytest.approx(getattr(tk.quantizer(key).measure(w), field), rel=1e-9)
