"""The native loops against numpy in float64 and against the plain operations."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.weights import native
from toolkit.weights.native import build

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (7, 13), (1, 64), (257, 300), (3, 5, 70), (2, 40000), (65536,), (65537,), (3, 65536)]
LEVELS = torch.linspace(-1, 1, 16) ** 3
THRESHOLDS = (LEVELS[1:] + LEVELS[:-1]) / 2


def weight(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.fixture(params=["native", "portable", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel, with the kernel as any processor of this kind gets it, and without it."""
    if request.param == "plain":
        monkeypatch.setenv("TOOLKIT_NATIVE", "0")
    elif request.param == "portable":
        monkeypatch.setattr(build, "FLAGS", [f for f in build.FLAGS if f != "-march=native"])
        monkeypatch.setattr(build, "_state", {})
    if request.param != "plain" and (reason := native.why_not()):
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_equals_numpy(way: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = weight(shape, dtype)
    exact = w.float().numpy().astype(np.float64)
    found = native.scan(w)
    assert found.finite
    assert found.sum_abs == pytest.approx(math.fsum(np.abs(exact).ravel()), rel=1e-12)
    assert found.sum_square == pytest.approx(math.fsum(np.square(exact).ravel()), rel=1e-12)
    assert found.max_abs == np.abs(exact).max()
    chunks = w.float().numpy().tobytes()
    size = 4 * 65536
    digests = [xxhash.xxh3_128_digest(chunks[at : at + size]) for at in range(0, len(chunks), size)]
    assert found.digest == xxhash.xxh3_128_hexdigest(b"".join(digests))


def test_digest_is_of_the_values_in_row_major_order(way: str) -> None:
    w = weight((300, 500), torch.bfloat16)
    digest = native.scan(w).digest
    assert native.scan(w.float()).digest == digest == native.scan(w.double()).digest
    assert native.scan(w.t().contiguous().t()).digest == digest
    assert native.scan(w.t()).digest == native.scan(w.t().contiguous()).digest != digest
    changed = w.clone()
    changed[299, 499] = torch.nextafter(changed[299, 499], torch.tensor(9.0, dtype=torch.bfloat16))
    assert native.scan(changed).digest != digest
    half = weight((300, 500), torch.float16)
    half[0, :4] = torch.tensor([6e-8, 6.1e-5, 65504.0, -5.9e-8])  # subnormal, and the largest
    assert native.scan(half).digest == native.scan(half.float()).digest


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 65535, 65536, 99_999])
def test_scan_finds_one_bad_value(way: str, bad: float, dtype: torch.dtype, place: int) -> None:
    w = weight((100_000,), dtype)
    assert native.scan(w).finite
    w[place] = bad
    assert not native.scan(w).finite


def test_distinct_tells_a_lattice(way: str) -> None:
    dense = weight((64, 96), torch.bfloat16)
    assert native.scan(dense).distinct > 24
    lattice = torch.randint(0, 16, (64, 96)).float() * torch.rand(64, 3).repeat_interleave(32, 1) - 0.1
    assert native.scan(lattice).distinct == max(len(set(run.tolist())) for run in lattice.view(-1, 32)[::3])
    assert native.scan(torch.zeros(3, 32)).distinct == 1
    signed = torch.zeros(3, 32)
    signed[:, ::2] = -0.0
    assert native.scan(signed).distinct == 1
    one_row = torch.zeros(1, 70)
    one_row[0, 32:64] = torch.arange(32)
    assert native.scan(one_row).distinct == 32
    assert native.scan(torch.zeros(40, 31)).distinct == 33
    assert native.scan(lattice.t().contiguous().t()).distinct == native.scan(lattice).distinct
    assert native.scan(lattice.view(4, 16, 96)).distinct == native.scan(lattice).distinct


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [16, 32, 48, 64, 4096])
def test_block_absmax_equals_numpy(way: str, block: int, dtype: torch.dtype) -> None:
    for shape, columns in (((7, 13), None), ((33, 130), 130), ((3, 5, 70), 70), ((2, 5000), 5000), ((40, 16), None)):
        w = weight(shape, dtype)
        found = native.block_absmax(w, block, columns)
        rows = w.float().numpy().reshape(-1, columns or w.numel())
        right = np.stack([np.abs(rows[:, at : at + block]).max(1) for at in range(0, rows.shape[1], block)], axis=1)
        assert found.dtype == torch.float32 and np.array_equal(found.numpy(), right)


def oracle(
    w: torch.Tensor, block: int, columns: int, factor: torch.Tensor, scale: torch.Tensor, mode: str
) -> tuple[float, float, float, float]:
    """The loop in numpy, one block after another, each operation in float32."""
    rows = w.float().numpy().reshape(-1, columns)
    errors = np.empty_like(rows)
    thresholds, levels = THRESHOLDS.numpy(), LEVELS.numpy()
    for r, row in enumerate(rows):
        for b, at in enumerate(range(0, columns, block)):
            x = row[at : at + block]
            divide = mode == "divide" or (mode == "divide-partial" and len(x) < block)
            y = x / factor[r, b].numpy() if divide else x * factor[r, b].numpy()
            errors[r, at : at + block] = x - scale[r, b].numpy() * levels[(thresholds < y[:, None]).sum(1)]
    e, exact = errors.astype(np.float64), rows.astype(np.float64)
    return math.fsum((e * e).ravel()), math.fsum(np.abs(e).ravel()), np.abs(e).max(), math.fsum((exact**2).ravel())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["multiply", "divide", "divide-partial"])
def test_codebook_errors_equal_numpy(way: str, mode: str, dtype: torch.dtype) -> None:
    """Sums within 1e-12 relative; the maximum is equal, so that no code differs."""
    cases = [
        ((7, 13), None, 64),
        ((33, 130), 130, 16),
        ((5, 70), 70, 32),
        ((2, 2500), None, 2048),
        ((4, 1000), 1000, 48),
    ]
    for shape, columns, block in cases:
        w = weight(shape, dtype)
        absmax = native.block_absmax(w, block, columns)
        factor = absmax if mode == "divide" else 1 / absmax
        if mode == "divide-partial" and (columns or w.numel()) % block:
            factor[:, -1] = absmax[:, -1]
        scale = absmax * 1.01
        found = native.codebook_errors(w, block, factor, scale, THRESHOLDS, LEVELS, columns, mode)
        square, absolute, largest, norm = oracle(w, block, columns or w.numel(), factor, scale, mode)
        assert found.largest == largest
        assert found.square == pytest.approx(square, rel=1e-12)
        assert found.absolute == pytest.approx(absolute, rel=1e-12)
        assert found.weight_square == pytest.approx(norm, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 2200),
    block=st.sampled_from([1, 5, 16, 31, 32, 64, 100, 1024, 1500, 4096]),
    mode=st.sampled_from(["multiply", "divide", "divide-partial"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_native_equals_plain(rows: int, columns: int, block: int, mode: str, dtype: torch.dtype, seed: int) -> None:
    w = weight((rows, columns), dtype, seed)
    absmax = native.block_absmax(w, block, columns).clamp(min=1e-9)
    factor = absmax if mode == "divide" else 1 / absmax
    found = native.codebook_errors(w, block, factor, absmax, THRESHOLDS, LEVELS, columns, mode)
    os.environ["TOOLKIT_NATIVE"] = "0"
    try:
        assert torch.equal(native.block_absmax(w, block, columns).clamp(min=1e-9), absmax)
        plain = native.codebook_errors(w, block, factor, absmax, THRESHOLDS, LEVELS, columns, mode)
    finally:
        del os.environ["TOOLKIT_NATIVE"]
    assert found.largest == plain.largest
    assert found.square == pytest.approx(plain.square, rel=1e-12, abs=1e-300)
    assert found.absolute == pytest.approx(plain.absolute, rel=1e-12, abs=1e-300)


def test_results_do_not_depend_on_threads(way: str) -> None:
    w = weight((1100, 1024), torch.bfloat16)
    absmax = native.block_absmax(w, 64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            errors = native.codebook_errors(w, 64, 1 / absmax, absmax, THRESHOLDS, LEVELS)
            results.append((native.scan(w), errors if way != "plain" else None))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_threads_of_the_caller_may_scan_at_once(way: str) -> None:
    weights = [weight((200, 1000), torch.bfloat16, seed) for seed in range(6)]
    right = [native.scan(w) for w in weights]
    found: list[native.Scan | None] = [None] * 6

    def work(at: int) -> None:
        found[at] = native.scan(weights[at])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == right


def test_the_library_is_built_once_and_kept(tmp_path) -> None:
    if reason := native.why_not():
        pytest.skip(reason)
    path = build.build(tmp_path)
    made = path.stat().st_mtime_ns
    assert build.build(tmp_path) == path and path.stat().st_mtime_ns == made
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert ctypes.CDLL(str(path)).toolkit_scan


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"TOOLKIT_NATIVE": "0"}, "turned off"),
        ({"CC": "no-such-compiler"}, "no-such-compiler"),
        ({"CC": "false"}, "false failed"),
        ({"TOOLKIT_CACHE": "/dev/null/cache"}, "/dev/null/cache"),
    ],
)
def test_without_the_kernel_it_says_why_and_gives_the_same(environment: dict[str, str], reason: str) -> None:
    code = (
        "import torch; from toolkit.weights import native; print(native.why_not());"
        "print(native.scan(torch.arange(100000.).view(100, 1000).bfloat16()).digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, check=True
    )
    why, digest = done.stdout.splitlines()
    assert reason in why
    assert digest == native.scan(torch.arange(100000.0).view(100, 1000).bfloat16()).digest


def test_importing_builds_nothing(tmp_path) -> None:
    code = "import toolkit.weights.native"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TOOLKIT_CACHE": str(tmp_path / "c")}, check=True)
    assert not (tmp_path / "c").exists()
