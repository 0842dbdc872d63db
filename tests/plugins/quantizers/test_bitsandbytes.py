"""NF4 and bitsandbytes' FP4, against bitsandbytes' own CPU functions, bit for bit."""

from __future__ import annotations

import pytest
import torch
from toolkit_plugins.quantizers.bitsandbytes_4bit import BLOCKS, dynamic_map, quantize_8bit
from torch import nn

import toolkit as tk
from toolkit.errors import InputError

bnb = pytest.importorskip("bitsandbytes")
F = bnb.functional

SHAPES = [(7, 13), (1, 64), (64,), (33, 65), (257, 64), (3, 5, 7), (1, 1), (128, 192), (2, 3)]
NAMES = {"nf4": "nf4", "fp4-bnb": "fp4"}


def weight(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def assert_same(packed: tk.interfaces.Packed, codes: torch.Tensor, state: F.QuantState) -> None:
    tensors = packed.tensors
    assert torch.equal(tensors["codes"], codes.view(-1))
    assert tensors["absmax"].dtype == state.absmax.dtype and torch.equal(tensors["absmax"], state.absmax)
    if state.nested:
        assert torch.equal(tensors["nested_absmax"], state.state2.absmax)
        assert torch.equal(tensors["nested_offset"], state.offset)


def decoded(codes: torch.Tensor, state: F.QuantState) -> torch.Tensor:
    """The dequantized weight from bitsandbytes' state, by hand: its CPU kernel is wrong on some shapes."""
    absmax = state.absmax
    if state.nested:
        absmax = F.dequantize_blockwise(state.absmax, state.state2) + state.offset
    nibbles = torch.stack([codes.view(-1) >> 4, codes.view(-1) & 15], 1).view(-1)[: state.shape.numel()]
    scale = absmax.repeat_interleave(state.blocksize)[: nibbles.numel()]
    return (state.code[nibbles.long()] * scale).view(state.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_bitsandbytes(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = weight(shape, dtype)
    for block in BLOCKS if w.numel() < 10_000 else (64, 128, 4096):
        for double in (True, False):
            packed = tk.quantizer(name, block=block, double=double).quantize(w)
            codes, state = F.quantize_4bit(w, blocksize=block, quant_type=NAMES[name], compress_statistics=double)
            assert_same(packed, codes, state)
            exact = packed.dequantize(torch.float32)
            assert exact.shape == w.shape and torch.equal(exact, decoded(codes, state))
            assert packed.dequantize().dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_double_quantization_over_many_groups(name: str) -> None:
    """257 and 1,537 blocks: a last group of one maximum; and maxima that differ by orders of magnitude."""
    for blocks in (257, 1537):
        w = weight((blocks, 64), torch.float32, blocks) * torch.logspace(-4, 1, blocks)[:, None]
        codes, state = F.quantize_4bit(w, blocksize=64, quant_type=NAMES[name], compress_statistics=True)
        assert_same(tk.quantizer(name).quantize(w), codes, state)


@pytest.mark.parametrize("scale", [1e-39, 1e-37, 1e-20, 1e-6, 1e4, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_scales_equal_bitsandbytes(name: str, scale: float) -> None:
    w = torch.randn(9, 70, generator=torch.Generator().manual_seed(1)) * scale
    codes, state = F.quantize_4bit(w, blocksize=64, quant_type=NAMES[name], compress_statistics=False)
    packed = tk.quantizer(name, double=False).quantize(w)
    assert_same(packed, codes, state)
    assert torch.equal(packed.dequantize(), decoded(codes, state))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_zeros_equal_bitsandbytes(name: str) -> None:
    w = weight((6, 100), torch.float32)
    w[0] = 0
    w[-1, -30:] = 0
    for double in (True, False):
        codes, state = F.quantize_4bit(w, blocksize=32, quant_type=NAMES[name], compress_statistics=double)
        assert_same(tk.quantizer(name, block=32, double=double).quantize(w), codes, state)


@pytest.mark.parametrize("name", NAMES)
def test_ties_equal_bitsandbytes(name: str) -> None:
    """Every midpoint of two levels and its two neighbours, with a maximum of one."""
    levels = F.get_4bit_type(NAMES[name], device="cpu").sort().values
    middle = (levels[1:] + levels[:-1]) / 2
    w = torch.cat([torch.nextafter(middle, x) for x in (middle - 1, middle, middle + 1)] + [torch.ones(1)])
    codes, state = F.quantize_4bit(w, blocksize=64, quant_type=NAMES[name], compress_statistics=False)
    assert_same(tk.quantizer(name, double=False).quantize(w), codes, state)


def test_views_are_quantized_as_their_copies() -> None:
    base = weight((96, 160), torch.bfloat16)
    for view in (base.t(), base[::2, 5:101], base.view(4, 24, 160).transpose(0, 2)):
        assert not view.is_contiguous()
        codes, state = F.quantize_4bit(view.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=True)
        assert_same(tk.quantizer("nf4").quantize(view), codes, state)


def test_8bit_map_and_codes_equal_bitsandbytes() -> None:
    assert torch.equal(dynamic_map(torch.device("cpu")), F.create_dynamic_map())
    levels = F.create_dynamic_map()
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(2))
    values[::5] = ((levels[1:] + levels[:-1]) / 2)[torch.arange(4000) % 255] * 2  # near ties
    values[512:768] = 0
    codes, absmax = quantize_8bit(values)
    theirs, state = F.quantize_blockwise(values, blocksize=256)
    assert torch.equal(codes, theirs) and torch.equal(absmax, state.absmax)


def test_wrong_block_size_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match=r"no block size 48.*32.*4096"):
        tk.quantizer("nf4(block=48)")


def test_bits_per_weight_are_honest() -> None:
    w = torch.randn(1024, 1024)
    blocks = 2**20 // 64
    double = tk.quantizer("nf4").quantize(w)
    assert double.nbytes == 2**19 + blocks + 4 * blocks // 256 + 4
    assert double.bits_per_weight == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-4)
    assert tk.quantizer("nf4(double=false)").quantize(w).bits_per_weight == 4.5
    assert tk.quantizer("fp4-bnb(block=128,double=false)").quantize(w).bits_per_weight == 4.25


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_holds_the_same_storage_as_bitsandbytes_own(name: str, double: bool, dtype: torch.dtype) -> None:
    dense = nn.Linear(192, 80, bias=True).to(dtype)
    theirs = bnb.nn.Linear4bit(192, 80, compute_dtype=dtype)
    theirs.weight = bnb.nn.Params4bit(
        dense.weight.detach().clone(), quant_type=NAMES[name], compress_statistics=double, module=theirs
    )
    theirs.bias = dense.bias
    theirs = theirs.to("cpu")  # bitsandbytes quantizes here
    ours = tk.quantizer(name, double=double).linear(dense, dtype)
    assert isinstance(ours, bnb.nn.Linear4bit)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for key in mine:
        assert mine[key].dtype == other[key].dtype and torch.equal(mine[key], other[key]), key
    assert torch.equal(ours.bias, dense.bias) and ours.compute_dtype == dtype
    assert ours.weight.quant_state == theirs.weight.quant_state


@pytest.mark.parametrize("key", ["nf4", "nf4(double=false)", "fp4-bnb(block=32)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_multiplies_as_dequantize_then_multiply(key: str, dtype: torch.dtype) -> None:
    """1 to 33 rows; tolerance 1e-5 of the largest output in float32, 2⁻⁷ in bfloat16. Storage stays as it was."""
    dense = nn.Linear(192, 80).to(dtype)
    quantizer = tk.quantizer(key)
    exact = quantizer.quantize(dense.weight).dequantize()
    layer = quantizer.linear(dense, dtype).eval()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for rows in (1, 2, 7, 16, 33):
        x = torch.randn(rows, 192).to(dtype)
        with torch.no_grad():
            found, right = layer(x).float(), nn.functional.linear(x, exact, dense.bias).float()
        tolerance = (1e-5 if dtype == torch.float32 else 2**-7) * right.abs().max()
        assert (found - right).abs().max() <= tolerance, rows
    after = layer.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    x = torch.randn(5, 192, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()
    right = exact.float().sum(0).expand(5, -1)
    assert (x.grad.float() - right).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-6) * right.abs().max()


def test_linear_leaves_rows_of_broken_blocks_to_the_data_flow() -> None:
    """bitsandbytes' AVX512 kernel misreads them on the CPU."""
    assert tk.quantizer("nf4").linear(nn.Linear(96, 32), torch.float32) is None
    assert tk.quantizer("nf4(block=32)").linear(nn.Linear(96, 32), torch.float32) is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_cuda_kernel_gives_the_same_codes(name: str) -> None:
    w = weight((257, 192), torch.bfloat16).cuda()
    packed = tk.quantizer(name, double=False).quantize(w)
    codes, state = F.quantize_4bit(w, blocksize=64, quant_type=NAMES[name], compress_statistics=False)

    def two(packed_codes: torch.Tensor) -> torch.Tensor:
        """Codes one by one; bitsandbytes' two kernels disagree on the sign of FP4's zero, which is 0 either way."""
        each = torch.stack([packed_codes.view(-1) >> 4, packed_codes.view(-1) & 15])
        return torch.where(each == 8, 0, each) if NAMES[name] == "fp4" else each

    differ = (two(packed.tensors["codes"]) != two(codes)).float().mean().item()
    assert differ < 1e-3, "only ties may differ"
    assert torch.equal(packed.tensors["absmax"], state.absmax)
