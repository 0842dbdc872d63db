"""One pass over a weight, natively where a C compiler is at hand, else in plain tensor operations.

`scan` reads a weight's sums and digest; `block_absmax` and `codebook_errors` are the two loops of a 16-level
block quantizer. `why_not` says why the native kernel is not used (`TOOLKIT_NATIVE=0` turns it off); results are
the same without it. Work is split in fixed pieces over `torch.get_num_threads()` threads and summed in order, so
no result depends on the number of threads. Weights on other devices are measured there by plain operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import torch
import xxhash

from toolkit.weights.native import reference
from toolkit.weights.native.build import cache_folder, library, why_not
from toolkit.weights.native.reference import CHUNK

__all__ = ["Scan", "Sums", "block_absmax", "cache_folder", "codebook_errors", "scan", "why_not"]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MODES = {"multiply": 0, "divide": 1, "divide-partial": 2}
PIECE = 2**19
"""Elements a unit of parallel work (and of summation) in the block loops."""
RUN, RUNS = 32, 64
"""How many aligned runs of how many weights are looked at for `distinct`."""

T, U = TypeVar("T"), TypeVar("U")


@dataclasses.dataclass(frozen=True)
class Scan:
    """What one pass over a weight tells, from its float32 values.

    Attributes:
        finite: no NaN and no infinity; otherwise the sums and the maximum are NaN.
        sum_abs: Σ|w|, in double.
        sum_square: Σw², in double.
        max_abs: max|w|.
        digest: 128-bit xxh3 hash (32 hex digits) of the chunks' hashes, a chunk being 65,536 float32 values in
            row-major order, little-endian: the same for a bfloat16 file and the model loaded in float32. It
            tells 0.0 from −0.0.
        distinct: the largest number of distinct values in 64 evenly spread, aligned runs of 32 weights of a row
            (−0.0 counts as 0.0); at most 16 tells of dequantized 4-bit values. 33 where no row has 32 weights.
    """

    finite: bool
    sum_abs: float
    sum_square: float
    max_abs: float
    digest: str
    distinct: int


@dataclasses.dataclass(frozen=True)
class Sums:
    """ΣE², Σ|E|, max|E| and ΣW² of a weight and its quantization error, in double."""

    square: float
    absolute: float
    largest: float
    weight_square: float


def scan(weight: torch.Tensor) -> Scan:
    """Sums, maximum, digest and a lattice probe of a floating-point weight of any shape, dtype and strides."""
    flat = _flat(weight.detach().cpu())
    kernel = library()
    starts = range(0, flat.numel(), CHUNK)
    parts = _spread(_scan_native(kernel, flat) if kernel else _scan_plain(flat), starts)
    finite = all(math.isfinite(part[3]) for part in parts)
    return Scan(
        finite=finite,
        sum_abs=math.fsum(part[1] for part in parts) if finite else math.nan,
        sum_square=math.fsum(part[2] for part in parts) if finite else math.nan,
        max_abs=max(part[3] for part in parts) if finite else math.nan,
        digest=xxhash.xxh3_128_hexdigest(b"".join(part[0] for part in parts)),
        distinct=_distinct(weight.detach()),
    )


def block_absmax(weight: torch.Tensor, block: int, columns: int | None = None) -> torch.Tensor:
    """max|w| of each block of `block` weights along rows of `columns` (default: all weights are one row).

    Returns float32 of shape (rows, ⌈columns/block⌉); NaN or infinity in a block stays one.
    """
    rows, columns = _rows(weight, columns)
    flat = _flat(weight.detach())
    kernel = library() if flat.device.type == "cpu" else None
    if kernel is None:
        return reference.block_absmax(flat, rows, columns, block)
    out = torch.empty(rows, -(-columns // block), dtype=torch.float32)

    def work(part: tuple[int, int]) -> None:
        kernel.toolkit_absmax(flat.data_ptr(), DTYPES[flat.dtype], columns, block, *part, out.data_ptr())

    _spread(work, _parts(out.numel(), block))
    return out


def codebook_errors(
    weight: torch.Tensor,
    block: int,
    factor: torch.Tensor,
    scale: torch.Tensor,
    thresholds: torch.Tensor,
    levels: torch.Tensor,
    columns: int | None = None,
    mode: Literal["multiply", "divide", "divide-partial"] = "multiply",
) -> Sums:
    """The errors E = W − scale·levels[#{thresholds < W∘factor}] of a 16-level block quantizer, in one pass.

    Every operation on elements is a float32 one, in this order; sums are in double. A rule for ties is folded
    into the thresholds: where a value at a midpoint belongs above it, the threshold is the next float below.

    Args:
        weight: finite, any floating-point dtype and strides.
        block: weights a block; blocks restart at each row of `columns` (default: all weights are one row).
        factor: float32, one number a block, (rows, ⌈columns/block⌉).
        scale: the same shape; what a level is multiplied by.
        thresholds: 15 ascending float32 numbers.
        levels: 16 float32 numbers.
        mode: ∘ is · or /; `divide-partial` divides only in a block shorter than `block`.
    """
    rows, columns = _rows(weight, columns)
    flat = _flat(weight.detach())
    factor, scale = factor.float().contiguous(), scale.float().contiguous()
    thresholds, levels = thresholds.float().contiguous(), levels.float().contiguous()
    kernel = library() if flat.device.type == "cpu" else None
    if kernel is None:
        return _errors_plain(flat, rows, columns, block, factor, scale, thresholds, levels, mode)
    pieces = _parts(factor.numel(), block)
    sums = torch.empty(len(pieces), 4, dtype=torch.float64)

    def work(numbered: tuple[int, tuple[int, int]]) -> None:
        at, part = numbered
        pointers = (factor.data_ptr(), scale.data_ptr(), MODES[mode], thresholds.data_ptr(), levels.data_ptr())
        out = sums.data_ptr() + at * 32
        kernel.toolkit_errors(flat.data_ptr(), DTYPES[flat.dtype], columns, block, *part, *pointers, out)

    _spread(work, list(enumerate(pieces)))
    return _total(sums.tolist())


def _errors_plain(
    flat: torch.Tensor,
    rows: int,
    columns: int,
    block: int,
    factor: torch.Tensor,
    scale: torch.Tensor,
    thresholds: torch.Tensor,
    levels: torch.Tensor,
    mode: str,
) -> Sums:
    values = flat.reshape(rows, columns).float()
    code = torch.bucketize(reference.scaled(values, factor, block, mode), thresholds, out_int32=True)
    error = (values - reference.scaled(levels[code], scale, block, "multiply")).double()
    return Sums(
        error.square().sum().item(),
        error.abs().sum().item(),
        error.abs().max().item(),
        values.double().square().sum().item(),
    )


def _total(rows: Iterable[list[float]]) -> Sums:
    square, absolute, largest, norm = zip(*rows, strict=True)
    return Sums(math.fsum(square), math.fsum(absolute), max(largest), math.fsum(norm))


def _scan_native(kernel: ctypes.CDLL, flat: torch.Tensor) -> Callable[[int], tuple[bytes, float, float, float]]:
    local = threading.local()
    in_place = memoryview(flat.numpy()) if flat.dtype == torch.float32 else None
    dtype, address, count = DTYPES[flat.dtype], flat.data_ptr(), flat.numel()

    def work(start: int) -> tuple[bytes, float, float, float]:
        if not hasattr(local, "sums"):
            local.sums, local.top = (ctypes.c_double * 2)(), ctypes.c_uint32()
            if in_place is None:
                local.values = torch.empty(CHUNK, dtype=torch.float32)
                local.bytes = memoryview(local.values.numpy())
        n = min(CHUNK, count - start)
        out = None if in_place is not None else local.values.data_ptr()
        kernel.toolkit_scan(address, dtype, start, n, out, local.sums, ctypes.byref(local.top))
        values = local.bytes[:n] if in_place is None else in_place[start : start + n]
        top = ctypes.c_float.from_buffer(local.top).value
        return xxhash.xxh3_128_digest(values), local.sums[0], local.sums[1], top

    return work


def _scan_plain(flat: torch.Tensor) -> Callable[[int], tuple[bytes, float, float, float]]:
    return lambda start: reference.scan_chunk(flat[start : start + CHUNK].float())


def _distinct(weight: torch.Tensor) -> int:
    """The largest number of distinct values in evenly spread, aligned runs of 32 consecutive weights of a row."""
    columns = weight.shape[-1] if weight.dim() else 1
    a_row = columns // RUN
    if a_row == 0:
        return RUN + 1
    rows = weight.numel() // columns
    count = min(RUNS, rows * a_row)
    picked = torch.arange(count, dtype=torch.int64) * (rows * a_row) // count
    place = (picked // a_row)[:, None], (picked % a_row * RUN)[:, None] + torch.arange(RUN)
    index = [place[1]]
    row = place[0]
    for size in reversed(weight.shape[:-1]):  # without a copy of a weight that is not contiguous
        index.insert(0, row % size)
        row = row // size
    runs = weight[tuple(x.to(weight.device) for x in index)].float().sort(dim=1).values
    return int((runs.diff(dim=1) != 0).sum(dim=1).max().item()) + 1


def _flat(weight: torch.Tensor) -> torch.Tensor:
    """The weights in row-major order, in a dtype that the kernel reads; a view where that is possible."""
    if weight.dtype not in DTYPES:
        weight = weight.float()
    return weight.reshape(-1)


def _rows(weight: torch.Tensor, columns: int | None) -> tuple[int, int]:
    columns = columns or weight.numel()
    return weight.numel() // columns, columns


def _parts(blocks: int, block: int) -> list[tuple[int, int]]:
    step = max(1, PIECE // block)
    return [(start, min(start + step, blocks)) for start in range(0, blocks, step)]


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_threads: int | None = None


@contextlib.contextmanager
def own_threads() -> Iterator[None]:
    """For a block, this module's loops use all of torch's threads and torch's own operations one.

    Torch's OpenMP threads spin for a while after each operation, on the cores that the next loop here needs:
    measuring a layer was up to six times slower for it beside another busy process.
    """
    global _threads
    before = torch.get_num_threads()
    if _threads is not None or before == 1:
        yield
        return
    _threads = before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _threads = None


def _spread(work: Callable[[U], T], items: Iterable[U]) -> list[T]:
    """The results of `work` in the order of `items`, over torch's number of threads."""
    items = list(items)
    threads = min(_threads or torch.get_num_threads(), len(items))
    if threads <= 1:
        return [work(item) for item in items]
    key = (os.getpid(), threads)  # a forked child has none of its parent's threads
    pool = _pools.get(key)
    if pool is None:
        pool = _pools.setdefault(key, ThreadPoolExecutor(threads, thread_name_prefix="toolkit-native"))
    # One task a thread, each taking every n-th item: no queue of thousands of small tasks.
    shares = pool.map(lambda first: [work(item) for item in items[first::threads]], range(threads))
    results: list[T | None] = [None] * len(items)
    for first, share in enumerate(shares):
        results[first::threads] = share
    return results  # type: ignore[return-value]
