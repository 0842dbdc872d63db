"""PACT's data flow against bf16 LoRA and QLoRA on one GPU: steps, memory, where time goes, kernels, largest batches.

    python benchmarks/pact.py [--shape 1b|3b] [--parts kernels step batch] [--rounds 5] [--seconds 0.5] [--small]

A model of Llama-3.2-1B's shape (or 3B's) with random weights, batch 8 × 512, r = 8 on all seven projections, loss on
the last 32 tokens. `kernels`: NVFP4 quantize, unpack, fused RMSNorm and SiLU-multiply, bytes a second over those of a
plain copy in the same run. `step`: every method in whole cycles of one list of batches, in rounds of random order, with
the peak of its memory, its launches a step and its kernels' time by the categories of PACT's Table 11. `batch`: the
largest batch of 1,024 tokens under a cap of 16 GB, and its tokens a second.
What is done is written after every round to `benchmarks/results/pact-SHAPE.json`. `--small` tries it on any device.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from training import FULL, SMALL, Resident, Session, Shape, _versions

from toolkit.records.io import write_json
from toolkit.runs.models import choose_device
from toolkit.runs.provenance import device_name
from toolkit.runs.timing.order import Entry, rounds
from toolkit.runs.timing.profiling import _kernels, union

SHAPES = {
    "1b": FULL,
    "3b": FULL | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "small": SMALL,
}
CAP = 16e9
"""Bytes of the small GPU that largest batches are for."""
LONG = 1024

CATEGORIES = (
    ("quantization and fused kernels", r"^(quantize|norm|gated|unpack|recast)\w*(_kernel)?$|dequant"),
    ("fp8 products", r"e4m3|fp8|qmma"),
    ("attention", r"flash|fmha|attention|sdpa|cudnn"),
    ("bf16 products", r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|multiply_(packed|blocks)"),
)
"""PACT, Table 11, by what kernels are called; the first that fits; the rest is `elementwise and other`."""
REST = "elementwise and other"

Maker = Callable[[], Any]


def methods(session: Session) -> dict[str, Maker]:
    """Name → what makes it ready to step."""
    found: dict[str, Maker] = {
        "bf16 LoRA, by hand": session.by_hand,
        "bf16 LoRA, CUDA graphs": lambda: session.ours("none", graphs=True),
        "QLoRA, by hand": lambda: session.by_hand(nf4=True),
        "QLoRA, CUDA graphs": lambda: session.ours("nf4", graphs=True),
        "bf16 LoRA, compiled": lambda: session.by_hand(compiled=True),
    }
    for execution in ("auto", "exact", "fp8"):  # auto: what a device without them has
        flow = f"pact(execution={execution})"
        found[f"PACT {execution}, CUDA graphs"] = lambda flow=flow: session.ours("nvfp4", dataflow=flow, graphs=True)
        found[f"PACT {execution}"] = lambda flow=flow: session.ours("nvfp4", dataflow=flow)
    shared = "pact(execution=fp8,layouts=shared)"
    found["PACT fp8, shared layouts, CUDA graphs"] = lambda: session.ours("nvfp4", dataflow=shared, graphs=True)
    found["PACT fp8, checkpointing, CUDA graphs"] = lambda: session.ours(
        "nvfp4", dataflow="pact(execution=fp8)", graphs=True, checkpointing=True
    )
    return found


def category(name: str) -> str:
    """Of one kernel."""
    return next((kind for kind, pattern in CATEGORIES if re.search(pattern, name, re.I)), REST)


def profile(device: torch.device, runner: Any) -> dict[str, Any]:
    """One cycle's kernels by category, milliseconds a step; launches a step, and the largest kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    profiler = profiling(activities=[ProfilerActivity.CUDA], acc_events=False)
    runner.run(cycles=1, begin=profiler.start, end=profiler.stop)
    spent: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    spans = []
    for name, start, length in _kernels(profiler):
        spans.append((start, start + length))
        spent[category(name)] += length
        by_name[name[:90]] += length
    scale = 1e6 * runner.steps
    return {
        "ms a step": {kind: round(value / scale, 2) for kind, value in sorted(spent.items(), key=lambda i: -i[1])},
        "busy, ms a step": round(union(spans) / scale, 2),
        "kernels a step": round(len(spans) / runner.steps),
        "largest, ms a step": {
            name: round(value / scale, 3) for name, value in sorted(by_name.items(), key=lambda i: -i[1])[:14]
        },
    }


def step(
    session: Session,
    device: torch.device,
    chosen: Sequence[str],
    count: int,
    seconds: float,
    save: Callable[[Any], None],
) -> None:
    """Every method resident, rounds of random order; saved after each."""
    resident = Resident(device)
    makers = methods(session)
    names = [name for name in makers if not chosen or any(re.search(part, name) for part in chosen)]
    for name in names:
        print(f"making {name}", file=sys.stderr, flush=True)
        resident.add(Entry(name), makers[name])
    session.forget()
    samples: dict[str, list[float]] = {entry.arm: [] for entry in resident.held}
    profiles: dict[str, Any] = {}

    def found() -> dict[str, Any]:
        table = {}
        for name, values in samples.items():
            told: dict[str, Any] = {}
            if values:
                told = {
                    "ms a step, median": round(statistics.median(values), 2),
                    "tokens/s": round(1e3 * session.shape.batch * session.shape.length / statistics.median(values)),
                    "ms a step, rounds": [round(v, 2) for v in values],
                }
            table[name] = told | resident.memory.get(name, {}) | profiles.get(name, {})
        return {"methods": table, "failed": resident.failed}

    for number, order in enumerate(rounds(list(resident.held), count, 0)):
        print(f"round {number + 1} of {count}", file=sys.stderr, flush=True)
        for entry in order:
            runner = resident.held[entry]
            ran = runner.run(lead=3 * runner.steps, seconds=seconds)  # under graphs: plain, captured, replayed
            samples[entry.arm].append(1e3 * ran.seconds / (ran.cycles * runner.steps))
        save(found())
    if device.type == "cuda":
        for entry, runner in resident.held.items():
            try:
                profiles[entry.arm] = profile(device, runner)
            except Exception as error:  # a profile that fails costs itself alone
                profiles[entry.arm] = {"profile": f"{type(error).__name__}: {error}"[:200]}
            save(found())
    for runner in resident.held.values():
        runner.close()


def batches(
    shape: str, device: torch.device, folder: Path, save: Callable[[Any], None], *, length: int, cap: float
) -> None:
    """The largest batch that fits under the cap, found upwards from 2 in even steps, and its speed."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total, device)
    found: dict[str, Any] = {}
    for name in ("bf16 LoRA, by hand", "QLoRA, by hand", "PACT fp8, CUDA graphs"):
        best: dict[str, Any] = {}
        for batch in (2, 4, 6, 8, 12, 16, 20, 24, 28, 32) if device.type == "cuda" else (2,):
            try:
                session = Session(Shape(SHAPES[shape], batch, length, min(32, length // 2), 1), device, folder)
                runner = methods(session)[name]()
                session.forget()
                ran = runner.run(lead=3 * runner.steps, seconds=0.3)
                best = {"batch": batch, "tokens/s": round(ran.cycles * runner.steps * batch * length / ran.seconds)}
                runner.close()
            except torch.OutOfMemoryError:
                break
            except Exception as error:
                traceback.print_exc(limit=3, file=sys.stderr)
                best["stopped"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                break
            finally:
                runner = session = None
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        found[name] = best
        print(f"largest batch of {name}: {best}", file=sys.stderr, flush=True)
        save(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=None)
    parser.add_argument("--shape", choices=("1b", "3b"), default="1b")
    parser.add_argument("--parts", nargs="+", choices=("kernels", "step", "batch"), default=["kernels", "step"])
    parser.add_argument("--methods", nargs="*", default=[], help="patterns; all without")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--small", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--device", default=None)
    given = parser.parse_args(arguments)
    device = choose_device(given.device)
    shape = "small" if given.small else given.shape
    output = given.output or Path(__file__).parent / "results" / f"pact-{shape}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"device": device_name(device), "packages": _versions(), "shape": SHAPES[shape]}

    def saver(part: str) -> Callable[[Any], None]:
        def save(found: Any) -> None:
            result[part] = found
            write_json(output, result)

        return save

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        if "kernels" in given.parts and device.type == "cuda":
            from toolkit_plugins.dataflows.pact.kernels.speed import measure

            sizes = SHAPES[shape]["hidden_size"], SHAPES[shape]["intermediate_size"]
            saver("kernels")(
                {
                    f"4096 × {width}": {
                        one.name: {"µs": round(1e6 * one.seconds, 2), "of copy": round(one.share, 3)}
                        for one in measure(4096, width, torch.bfloat16)
                    }
                    for width in sizes
                }
            )
        if "step" in given.parts:
            sizes = (2, 16, 4, 2) if given.small else (8, 512, 32, 2)
            session = Session(Shape(SHAPES[shape], *sizes), device, Path(scratch))
            chosen = given.methods or (["CUDA graphs", "QLoRA, by hand"] if given.small else ["^(?!PACT auto)"])
            step(session, device, chosen, given.rounds, given.seconds, saver("step"))
        if "batch" in given.parts:
            length = 32 if given.small else LONG
            batches(shape, device, Path(scratch), saver("largest batch"), length=length, cap=CAP)
    result["seconds"] = round(time.perf_counter() - started, 1)
    write_json(output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
