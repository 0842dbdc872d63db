"""Grids of columns: what they round to is what they pack, static ones are the quantizer, fitted scales are the best."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk
from toolkit.errors import InputError
from toolkit.interfaces import Quantizer

KEYS = [
    "nf4",
    "nf4(double=false)",
    "nf4(block=32)",
    "nf4(block=4096)",
    "fp4-bnb",
    "fp4-bnb(block=32,double=false)",
    "fp4-e2m1",
    "nvfp4",
    "mxfp4",
    "residual",
    "residual(inner=nvfp4)",
]
SHAPES = [(48, 80), (80, 48), (7, 13), (1, 64), (5, 128), (300, 64), (3, 1), (1, 13)]
FITTED = {  # keys whose blocks lie within rows of 128, and how many columns a group has
    "nf4": 64,
    "nf4(double=false)": 64,
    "nf4(block=32)": 32,
    "fp4-bnb": 64,
    "fp4-bnb(block=32,double=false)": 32,
    "fp4-e2m1": 64,
    "nvfp4": 16,
    "mxfp4": 32,
    "residual": 64,
    "residual(inner=nvfp4)": 64,
}


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit; signed zeros and 8-bit floats differ where their bytes do."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def span(part: slice) -> torch.Tensor:
    return torch.arange(part.start, part.stop)


def groups(grid, columns: int):
    return [slice(at, min(at + grid.group, columns)) for at in range(0, columns, grid.group)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_static_grid_is_the_quantizer(key: str, dtype: torch.dtype) -> None:
    """Every stored byte, whatever the order in which columns are rounded, a zero row and a large outlier included."""
    quantizer = tk.quantizer(key)
    for shape in SHAPES:
        w = weight(shape, dtype)
        if shape[0] > 2:
            w[1] = 0
            w[2, -1] = 3.0
        grid = quantizer.grid(w)
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))
        rounded = torch.empty(shape)
        for columns in order.split(5):
            rounded[:, columns] = grid.round(columns, w[:, columns].float())
        packed, expected = grid.pack(), quantizer.quantize(w)
        assert torch.equal(rounded, packed.dequantize(torch.float32))
        assert packed.shape == expected.shape and packed.dtype == expected.dtype and packed.nbytes == expected.nbytes
        assert packed.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert same(packed.tensors[name], tensor), name


@pytest.mark.parametrize("key", FITTED)
@pytest.mark.parametrize("how", ["own", "searched", "spread"])
def test_what_is_rounded_under_fitted_scales_is_what_is_packed(key: str, how: str) -> None:
    w = weight((9, 128))
    grid = tk.quantizer(key).grid(w)
    assert grid.group == FITTED[key]
    moved = w + weight(w.shape, seed=1) * (0.1 if key.startswith("residual") else 1.0)
    importance = None if how == "own" else torch.rand(grid.group, generator=torch.Generator().manual_seed(2)) + 0.1
    spread = torch.randn(grid.group, grid.group, generator=torch.Generator().manual_seed(3)) * 0.1
    rounded = torch.empty_like(w)
    for part in groups(grid, 128):
        grid.fit(span(part), moved[:, part], importance, spread if how == "spread" else None)
        rounded[:, part] = grid.round(span(part), moved[:, part])
    assert torch.equal(rounded, grid.pack().dequantize(torch.float32))
    assert (rounded - moved).norm() < 0.25 * moved.norm()


@pytest.mark.parametrize("key", FITTED)
def test_own_rule_on_the_weight_itself_keeps_the_scales(key: str) -> None:
    w = weight((9, 128))
    quantizer = tk.quantizer(key)
    grid = quantizer.grid(w)
    for part in groups(grid, 128):
        grid.fit(span(part), w[:, part])
    grid.round(torch.arange(128), w)
    expected = quantizer.quantize(w).tensors
    for name, tensor in grid.pack().tensors.items():
        if not name.endswith("codes"):  # under double quantization the nearest code is now that under the read scale
            assert same(tensor, expected[name]), name


def best_by_hand(key: str, values: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """The least Σ importance·(w − s·level)² of a row over the scales, each weight's nearest level by trying all 16."""
    levels = torch.tensor(tk.quantizer(key).levels, dtype=torch.float64)
    grid = scales.double()[:, None, None] * levels
    return ((values.double()[None, :, None] - grid).square().amin(-1) * importance.double()).sum(-1).min()


@pytest.mark.parametrize(
    "key,allowed",
    [
        ("nvfp4", lambda s: [s * f for f in (1.0,)]),
        ("mxfp4", lambda s: [s / 2, s, s * 2]),
        ("fp4-e2m1", lambda s: [s * f for f in (1, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5)]),
        ("nf4(double=false)", lambda s: [s * f for f in (1, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5)]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_search_finds_the_least_weighted_error(key: str, allowed) -> None:
    """Against an enumeration in float64 over the scales and all 16 levels of every weight."""
    w = weight((6, 128), seed=3)
    quantizer = tk.quantizer(key)
    grid = quantizer.grid(w)
    size = grid.group
    importance = torch.rand(size, generator=torch.Generator().manual_seed(4)) ** 4
    own = quantizer.scale_values(
        quantizer.quantize(w).tensors, torch.arange(6), quantizer.quantize(w).tensors[quantizer.scale_name]
    ).view(6, -1)[:, 1]
    grid.fit(torch.arange(size, 2 * size), w[:, size : 2 * size], importance)
    found = grid.round(torch.arange(size, 2 * size), w[:, size : 2 * size])
    for row in range(6):
        values = w[row, size : 2 * size]
        error = ((values - found[row]).double().square() * importance).sum()
        if key == "nvfp4":  # the E4M3 numbers about the block's own scale, the tensor's scale being as it is
            every = torch.arange(8, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            every = every * quantizer.quantize(w).tensors["global_scale"]
            at = int((every - own[row]).abs().argmin())
            scales = every[max(0, at - 5) : at + 7]
        else:
            scales = torch.stack([torch.as_tensor(s) for s in allowed(own[row])])
        assert error == pytest.approx(best_by_hand(key, values, scales, importance).item(), rel=1e-5)


@pytest.mark.parametrize("key", FITTED)
def test_a_search_is_never_worse_than_the_own_rule_and_usually_better(key: str) -> None:
    w = weight((32, 128), seed=5)
    found = {}
    for how in ("own", "searched"):
        grid = tk.quantizer(key).grid(w)
        for part in groups(grid, 128):
            grid.fit(span(part), w[:, part], None if how == "own" else torch.ones(grid.group))
        found[how] = (w - grid.round(torch.arange(128), w)).square().sum(1)
    assert (found["searched"] <= found["own"] * (1 + 1e-6)).all()
    assert (found["searched"] < found["own"] * 0.999).float().mean() > 0.25


@pytest.mark.parametrize("key", ["nvfp4", "mxfp4", "nf4", "residual"])
def test_the_search_with_spread_minimises_the_error_of_rounding_one_column_after_the_other(key: str) -> None:
    """No single scale gives a row less than the one chosen: each is tried through the public calls alone."""
    w = weight((4, 128), seed=6)
    grid = tk.quantizer(key).grid(w)
    size = grid.group
    importance = torch.rand(size, generator=torch.Generator().manual_seed(7)) + 0.5
    spread = torch.randn(size, size, generator=torch.Generator().manual_seed(8)) * 0.2
    part = slice(size, 2 * size)

    def sequential(grid) -> torch.Tensor:
        moved, loss = w[:, part].clone(), torch.zeros(4, dtype=torch.float64)
        for j in range(size):
            error = moved[:, j] - grid.round(torch.tensor([size + j]), moved[:, j : j + 1])[:, 0]
            loss += error.double().square() * importance[j]
            moved[:, j + 1 :] -= error[:, None] * spread[j, j + 1 :]
        return loss

    grid.fit(span(part), w[:, part], importance, spread)
    chosen = sequential(grid)
    seen = []
    for factor in (1.0, 0.75, 0.9, 1.1, 1.5, 0.5, 2.0):  # the own rule, and the own rule of what is larger or smaller
        other = tk.quantizer(key).grid(w)
        base = other.base[:, part] if key == "residual" else 0.0
        other.fit(span(part), (w[:, part] - base) * factor + base)
        if key == "mxfp4" or factor not in (0.5, 2.0):
            seen.append(sequential(other))
    assert (chosen <= torch.stack(seen).amin(0) * (1 + 1e-5)).all()
    assert (chosen < seen[0]).any()


def test_fitted_scales_obey_the_tensor_wide_constants() -> None:
    """NVFP4's tensor scale and the double quantization's groups stay; an overgrown block stops at the largest scale."""
    w = weight((4, 64))
    for key, constants in (("nvfp4", ["global_scale"]), ("nf4", ["nested_absmax", "nested_offset"])):
        grid, before = tk.quantizer(key).grid(w), tk.quantizer(key).quantize(w).tensors
        grid.fit(torch.arange(grid.group), w[:, : grid.group] * 1e4)
        rounded = grid.round(torch.arange(64), w)
        after = grid.pack().tensors
        assert all(torch.equal(after[name], before[name]) for name in constants)
        assert rounded.isfinite().all()
    scales = tk.quantizer("nvfp4").grid(w)
    scales.fit(torch.arange(16, 32), torch.zeros(4, 16))
    assert (scales.kept["scales"][:, 1].float() == 2.0**-6).all()


@pytest.mark.parametrize("key", FITTED)
def test_zero_blocks_stay_zero_whatever_is_searched(key: str) -> None:
    w = weight((4, 128))
    w[2] = 0
    grid = tk.quantizer(key).grid(w)
    for part in groups(grid, 128):
        grid.fit(span(part), w[:, part], torch.ones(grid.group))
    assert not grid.round(torch.arange(128), w)[2].any()


@pytest.mark.parametrize("key", ["nf4", "fp4-e2m1", "residual"])
def test_blocks_that_run_over_rows_are_static(key: str) -> None:
    grid = tk.quantizer(key).grid(weight((48, 80)))
    assert grid.group is None
    with pytest.raises(ValueError, match="run over the ends"):
        grid.fit(torch.arange(64), torch.zeros(48, 64))


def test_a_short_last_group() -> None:
    w = weight((5, 40))
    grid = tk.quantizer("nvfp4").grid(w)
    for at, stop in ((0, 16), (16, 32), (32, 40)):
        grid.fit(torch.arange(at, stop), w[:, at:stop], torch.ones(stop - at))
    rounded = grid.round(torch.arange(40), w)
    assert torch.equal(rounded, grid.pack().dequantize(torch.float32))


def test_misuse_is_refused() -> None:
    w = weight((4, 40))
    grid = tk.quantizer("nvfp4").grid(w)
    for columns in (range(8, 24), range(48, 64), range(32, 48), range(15), [*range(15), 14], []):
        with pytest.raises(ValueError, match="not all of one group of 16 columns of 40"):
            grid.fit(torch.tensor(columns, dtype=torch.int64), torch.zeros(4, len(columns)))
    grid.round(torch.arange(30), w[:, :30])
    with pytest.raises(ValueError, match="10 of 40 columns were not rounded"):
        grid.pack()
    for key in ("nvfp4", "residual"):
        with pytest.raises(InputError, match="NaN"):
            tk.quantizer(key).grid(torch.full((2, 16), torch.nan))
        with pytest.raises(InputError, match="out, in"):
            tk.quantizer(key).grid(torch.zeros(2, 2, 16))


def test_who_has_a_grid() -> None:
    assert all(tk.quantizer(key).has_grid for key in KEYS)
    none = tk.quantizer("none")
    assert not none.has_grid and none.grid(torch.ones(2, 2)) is None
    assert isinstance(none, Quantizer)


@settings(max_examples=40)
@given(
    key=st.sampled_from(KEYS),
    rows=st.integers(1, 6),
    columns=st.integers(1, 70),
    seed=st.integers(0, 99),
    size=st.sampled_from([1e-30, 1e-6, 1.0, 1e4]),
)
def test_static_is_the_quantizer_for_any_shape_and_size(key, rows, columns, seed, size) -> None:
    w = weight((rows, columns), seed=seed) * size
    grid = tk.quantizer(key).grid(w)
    rounded = torch.cat([grid.round(torch.tensor([j]), w[:, j : j + 1]) for j in range(columns)], dim=1)
    expected = tk.quantizer(key).quantize(w)
    assert torch.equal(rounded, expected.dequantize(torch.float32))
    packed = grid.pack()
    assert all(same(packed.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.mark.parametrize("key", ["nvfp4", "nf4", "residual"])
def test_the_columns_of_a_group_may_come_in_any_order(key: str) -> None:
    """One set of scales whichever way the group is written; `spread` goes by the order that is given."""
    w = weight((6, 128), seed=9)
    size = tk.quantizer(key).grid(w).group
    importance = torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.1
    order = torch.randperm(size, generator=torch.Generator().manual_seed(2))
    made = []
    for by in (torch.arange(size), order):
        grid = tk.quantizer(key).grid(w)
        grid.fit(by + size, w[:, by + size], importance[by])
        made.append(grid.round(torch.arange(128), w))
    assert torch.equal(made[0], made[1])
