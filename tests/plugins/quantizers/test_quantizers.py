"""What holds for every quantizer: shapes, dtypes, views, bounds, errors measured, files."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from toolkit_plugins.quantizers import COMPONENTS
from toolkit_plugins.quantizers.codebook import CodebookQuantizer

import toolkit as tk
from toolkit.errors import InputError
from toolkit.interfaces import Packed, Quantizer

KEYS = [
    "nf4",
    "nf4(double=false)",
    "nf4(block=4096)",
    "fp4-bnb",
    "fp4-bnb(block=32,double=false)",
    "fp4-e2m1",
    "nvfp4",
    "mxfp4",
    "residual",
    "residual(inner=nvfp4)",
    "none",
]
CODEBOOKS = [k for k in KEYS if not k.startswith(("residual", "none"))]
SINGLE = [k for k in CODEBOOKS if k not in ("nf4", "nf4(block=4096)", "fp4-bnb")]
SHAPES = [(7, 13), (1, 64), (64,), (5,), (33, 65), (257, 64), (3, 5, 7), (1, 1), (40, 24)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def test_every_component_is_tested_here() -> None:
    assert {c.name for c in COMPONENTS} == {k.partition("(")[0] for k in KEYS}
    assert all(tk.quantizer(k).key == k for k in KEYS)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_dtypes_come_back(key: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        w = weight(shape, dtype)
        packed = tk.quantizer(key).quantize(w)
        found = packed.dequantize()
        assert found.shape == w.shape and found.dtype == dtype and found.isfinite().all()
        assert packed.dequantize(torch.float32).dtype == torch.float32
        assert packed.bits_per_weight == 8 * packed.nbytes / w.numel()
        if w.numel() > 64:
            assert tk.quantizer(key).measure(w).relative < 0.25


@pytest.mark.parametrize("key", KEYS)
def test_views_equal_their_copies(key: str) -> None:
    base = weight((48, 70), torch.bfloat16)
    for view in (base.t(), base[::3, 1:-1], base.view(6, 8, 70).permute(2, 0, 1), base[:, :1].expand(48, 9)):
        quantizer = tk.quantizer(key)
        ours, copy = quantizer.quantize(view), quantizer.quantize(view.clone(memory_format=torch.contiguous_format))
        for name in ours.tensors:
            assert torch.equal(ours.tensors[name].float(), copy.tensors[name].float())
        errors, of_copy = quantizer.measure(view), quantizer.measure(view.contiguous())
        assert errors.max == of_copy.max and errors.mse == pytest.approx(of_copy.mse, rel=1e-12)


@pytest.mark.parametrize("key", KEYS)
def test_only_the_weights_are_read(key: str) -> None:
    """A slice of a buffer full of NaN is quantized as a copy of it: what lies beside it is not read."""
    w = weight((7, 13))
    buffer = torch.full((9, 40), math.nan)
    buffer[1:8, 2:15] = w
    quantizer = tk.quantizer(key)
    assert torch.equal(quantizer.quantize(buffer[1:8, 2:15]).dequantize(), quantizer.quantize(w).dequantize())
    flat = torch.full((200,), math.nan)
    flat[60:151] = w.reshape(-1)
    assert quantizer.measure(flat[60:151].view(7, 13)) == quantizer.measure(w)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros(key: str, dtype: torch.dtype) -> None:
    for shape in ((7, 13), (64,), (2, 4096)):
        zeros = torch.zeros(shape, dtype=dtype)
        assert (tk.quantizer(key).quantize(zeros).dequantize() == 0).all()
        errors = tk.quantizer(key).measure(zeros)
        assert (errors.mse, errors.mae, errors.relative, errors.max) == (0, 0, 0, 0)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_refused(key: str, bad: float) -> None:
    w = weight((9, 33), torch.bfloat16)
    w[8, 32] = bad
    for act in (tk.quantizer(key).quantize, tk.quantizer(key).measure):
        with pytest.raises(InputError, match="NaN or infinity"):
            act(w)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("w", [torch.zeros(0, 4), torch.ones(3, 3, dtype=torch.int32)], ids=["empty", "int"])
def test_empty_and_integer_weights_are_refused(key: str, w: torch.Tensor) -> None:
    for act in (tk.quantizer(key).quantize, tk.quantizer(key).measure):
        with pytest.raises(InputError, match="non-empty floating-point"):
            act(w)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("key", CODEBOOKS)
def test_measure_equals_the_plain_way(key: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-12 relative."""
    monkeypatch.setenv("TOOLKIT_NATIVE", native)
    quantizer = tk.quantizer(key)
    for dtype in DTYPES:
        for shape in ((7, 13), (1, 64), (300, 577), (2, 3, 4100)):
            w = weight(shape, dtype)
            fast, plain = quantizer.measure(w), Quantizer.measure(quantizer, w)
            for field in ("mse", "mae", "relative", "max"):
                assert getattr(fast, field) == pytest.approx(getattr(plain, field), rel=1e-12), (shape, field)


@pytest.mark.parametrize("key", CODEBOOKS)
def test_native_and_plain_give_the_same_codes_errors(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """max|E| is no sum: it must be equal, also on a lattice full of ties."""
    w = (torch.randint(-96, 97, (64, 640), generator=torch.Generator().manual_seed(3)) / 16).to(torch.bfloat16)
    on = tk.quantizer(key).measure(w)
    monkeypatch.setenv("TOOLKIT_NATIVE", "0")
    off = tk.quantizer(key).measure(w)
    assert on.max == off.max and on.mse == pytest.approx(off.mse, rel=1e-13)


@pytest.mark.parametrize("key", KEYS)
def test_a_file_gives_the_same_bits(key: str, tmp_path) -> None:
    packed = tk.quantizer(key).quantize(weight((7, 13), torch.bfloat16))
    packed.save(tmp_path / "w.safetensors")
    loaded = Packed.load(tmp_path / "w.safetensors")
    assert loaded.quantizer == packed.quantizer and loaded.shape == (7, 13) and loaded.dtype == torch.bfloat16
    assert loaded.tensors.keys() == packed.tensors.keys() and loaded.nbytes == packed.nbytes
    for name, tensor in packed.tensors.items():
        again = loaded.tensors[name]
        assert again.dtype == tensor.dtype and again.shape == tensor.shape
        assert again.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    assert torch.equal(loaded.dequantize(), packed.dequantize())


def test_a_file_that_is_no_packed_weight_is_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "broken").write_bytes(b"\x10" + bytes(40))
    save_file({"a": torch.ones(2)}, tmp_path / "plain")
    for name, text in (("broken", "cannot read"), ("missing", "cannot read"), ("plain", "lack dtype")):
        with pytest.raises(InputError, match=text):
            Packed.load(tmp_path / name)


@pytest.mark.parametrize("key", SINGLE)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_error_is_at_most_half_the_local_step(key: str, data: st.DataObject) -> None:
    """|w − ŵ| ≤ half the gap of the two levels around w; beyond the largest level, the distance to it."""
    w = _drawn(data)
    quantizer = tk.quantizer(key)
    packed = quantizer.quantize(w)
    found, rows = packed.dequantize(), _rows(quantizer, w)
    scale = quantizer.unpack_scales(packed.tensors).view(rows.shape[0], -1)
    scale = scale.repeat_interleave(quantizer.block_size, 1)[:, : rows.shape[1]].double()
    levels = torch.tensor(sorted(quantizer.levels), dtype=torch.float64)
    nearest = (rows.double()[..., None] - scale[..., None] * levels).abs().amin(-1)
    error = (rows.double() - found.reshape(rows.shape).double()).abs()
    assert (error <= nearest * (1 + 1e-5) + scale * 1e-6).all()


@pytest.mark.parametrize("key", [k for k in SINGLE if k != "nvfp4"] + ["nvfp4", "none"])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), power=st.integers(-20, 20))
def test_powers_of_two_pass_through(key: str, data: st.DataObject, power: int) -> None:
    """Q(2^k·w) = 2^k·Q(w), bit for bit."""
    w = _drawn(data, smallest=2.0**-20).bfloat16().float()
    quantizer = tk.quantizer(key)
    scaled = quantizer.quantize(w * 2.0**power).dequantize()
    assert torch.equal(scaled, quantizer.quantize(w).dequantize() * 2.0**power)


@pytest.mark.parametrize("key", ["nf4(double=false)", "fp4-bnb(block=32,double=false)", "mxfp4", "none"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_quantizing_again_changes_nothing(key: str, data: st.DataObject) -> None:
    """Where a block's largest weight is kept exactly. (Double quantization is not idempotent: below.)"""
    w = _drawn(data).bfloat16().float()
    quantizer = tk.quantizer(key)
    once = quantizer.quantize(w).dequantize()
    again = quantizer.quantize(once).dequantize()
    assert torch.allclose(again, once, rtol=2e-7, atol=0) if key != "none" else torch.equal(again, once)


def test_double_quantization_is_not_idempotent() -> None:
    """So adapters are fitted against the base as it will be reloaded, and nothing is quantized twice."""
    w = weight((128, 128))
    once = tk.quantizer("nf4").quantize(w).dequantize()
    again = tk.quantizer("nf4").quantize(once).dequantize()
    assert 0 < (again - once).abs().max() < 4e-3


def test_residual_never_increases_the_error_and_keeps_its_key_canonical() -> None:
    for inner in ("nf4", "nvfp4", "mxfp4", "fp4-bnb"):
        w = weight((65, 96), torch.bfloat16)
        two = tk.quantizer("residual", inner=inner)
        assert two.measure(w).relative < 0.12 * tk.quantizer(inner).measure(w).relative
        first = tk.quantizer(inner).quantize(w).dequantize(torch.float32)
        second = tk.quantizer("nf4").quantize(w.float() - first).dequantize()
        assert torch.equal(two.quantize(w).dequantize(torch.float32), first + second)
    assert tk.quantizer("residual(inner=nf4(block=64,double=true))").key == "residual"
    assert tk.quantizer("residual(inner=nf4(double=false))").key == "residual(inner=nf4(double=false))"
    assert tk.quantizer("residual").quantize(weight((1024, 1024))).bits_per_weight == pytest.approx(8.254, abs=1e-3)
    with pytest.raises(InputError, match="did you mean 'nvfp4'"):
        tk.quantizer("residual(inner=nvpf4)")


def test_none_keeps_half_precision_bit_for_bit() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        w = weight((7, 13), dtype)
        packed = tk.quantizer("none").quantize(w)
        assert packed.tensors["weight"].dtype == dtype and torch.equal(packed.dequantize(), w)
        assert packed.bits_per_weight == 16
        w.zero_()
        assert packed.dequantize().abs().max() > 0, "it is a copy"
    wide = weight((7, 13))
    assert torch.equal(tk.quantizer("none").quantize(wide).dequantize(), wide.bfloat16().float())
    assert torch.equal(tk.quantizer("none(dtype=float16)").quantize(wide).dequantize(), wide.half().float())
    with pytest.raises(InputError, match=r"beyond torch\.float16"):
        tk.quantizer("none(dtype=float16)").quantize(torch.full((2, 2), 1e5))
    with pytest.raises(InputError, match="float16"):
        tk.quantizer("none(dtype=float8)")


def _rows(quantizer: CodebookQuantizer, w: torch.Tensor) -> torch.Tensor:
    return w.reshape(-1, w.shape[-1]) if quantizer.by_row else w.reshape(1, -1)


def _drawn(data: st.DataObject, smallest: float = 2.0**-40) -> torch.Tensor:
    """A float32 weight of any small shape; no magnitudes between zero and `smallest`."""
    shape = data.draw(npst.array_shapes(min_dims=1, max_dims=3, max_side=40))
    seed, spread = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([0.0, 1.0, 3.0]))
    made = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=made) * 2.0 ** (torch.randn(shape, generator=made) * spread).round()
    w[torch.rand(shape, generator=made) < data.draw(st.sampled_from([0.0, 0.3]))] = 0
    return torch.where(w.abs() < smallest, 0.0, w)
