"""LoftQ of ours and of PEFT side by side: residuals at several scalings, seconds and peak memory of a whole model.

    python benchmarks/loftq.py [-o benchmarks/results/loftq.json] [--blocks 16] [--device cuda] [--peft 1 5]

Residuals: ‖W − Ŵ − s·BA‖/‖W‖ over that of the zero start (B = 0), at r = 8, on Gaussian weights and on layers of the
demo model, whose weights are dequantized 4-bit values. PEFT's answer is the same at every s, because it leaves s out.
Seconds: every layer of a Llama-3.2-1B-shaped model (16 blocks of 7, random bfloat16 weights, none counted by another),
each taken by every method in turn, the order turning too. PEFT's is `peft.utils.loftq_utils.loftq_init` on CUDA, and
the same steps where there is no CUDA. Peak memory is the most that a method held above what stood before a layer.
`--blocks` times that many blocks of the 16, and the result says so. `--small` is a smoke test on tiny layers.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from toolkit_plugins.initializers.loftq_peft import peft_loftq

import toolkit as tk
from toolkit.records.io import write_json
from toolkit.runs.provenance import device_name

HIDDEN, KEYS, INTER = 2048, 512, 8192
LAYERS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTER, HIDDEN),
    "mlp.up_proj": (INTER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTER),
}
SCALINGS = [0.25, 0.5, 1.0, 2.0, 4.0, 5.66]
RANK = 8
BLOCKS = 16
QUANTIZER = "nf4(double=false)"
"""What PEFT's LoftQ quantizes by, and the only thing: blocks of 64, float32 maxima."""
OURS = {"ours, 1 iteration": "loftq(iterations=1)", "ours, 5 iterations": "loftq"}
Fit = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Ŵ in the weight's dtype, A and B in float32."""


def ours(weight: torch.Tensor, key: str, s: float) -> Fit:
    start = tk.initialize(weight, key, QUANTIZER, rank=RANK, scaler=f"fixed(value={s})")
    return start.base.dequantize(), start.A, start.B


def off(weight: torch.Tensor, fit: Fit, s: float) -> float:
    """‖W − Ŵ − s·BA‖² in float64."""
    base, a, b = fit
    return float((weight.double() - base.double() - s * b.double() @ a.double()).square().sum())


def side_by_side(weights: dict[str, torch.Tensor], peft: list[int]) -> list[dict[str, Any]]:
    """One row a weight, method and scaling: the residual over the zero start's."""
    rows = []
    for name, weight in weights.items():
        zero = (weight.double() - tk.quantizer(QUANTIZER).quantize(weight).dequantize().double()).square().sum()
        theirs = {f"PEFT, {n} iteration{'s' if n > 1 else ''}": peft_loftq(weight, RANK, n) for n in peft}
        for s in SCALINGS:
            found = {label: ours(weight, key, s) for label, key in OURS.items()} | theirs
            ratios = {label: round(math.sqrt(off(weight, fit, s) / float(zero)), 4) for label, fit in found.items()}
            rows.append({"weight": name, "shape": list(weight.shape), "s": s, "residual over zero start": ratios})
            print(f"{name} s = {s}: {ratios}", file=sys.stderr)
    return rows


def demo_layers() -> dict[str, torch.Tensor]:
    from toolkit.weights.checkpoints import open_checkpoint

    checkpoint = open_checkpoint(tk.demo_model())
    paths = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    return {f"demo model, layers.{i}.{p}": checkpoint[f"model.layers.{i}.{p}.weight"] for i in (0, 15) for p in paths}


def layers(blocks: int, device: torch.device, shapes: dict[str, tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every layer's weight, N(0, 0.02²) in bfloat16, one at a time."""
    made = torch.Generator(device).manual_seed(0)
    for block in range(blocks):
        for path, shape in shapes.items():
            weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=made)
            yield f"layers.{block}.{path}", weight


class Meter:
    """Seconds, and the peak of memory above what stood before: of the allocator on CUDA, resident on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def __call__(self, work: Callable[[], Fit]) -> tuple[Fit, float, float, int]:
        """What the work answers, seconds, seconds of the processor (which other processes do not lengthen), bytes."""
        before = self._reset()
        start, own = time.perf_counter(), time.process_time()
        found = work()
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return found, time.perf_counter() - start, time.process_time() - own, self._peak() - before

    def _reset(self) -> int:
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew
        return self._peak()

    def _peak(self) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated(self.device)
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def whole_model(
    blocks: int, device: torch.device, peft: list[int], shapes: dict[str, tuple[int, int]], s: float
) -> dict[str, Any]:
    """Each method's seconds over all layers, largest peak, and residuals over the zero start's at s = 1 and at s."""
    methods: dict[str, Callable[[torch.Tensor], Fit]] = {}
    for label, key in OURS.items():
        methods[label] = lambda weight, key=key: ours(weight, key, s)
    for n in peft:
        methods[f"PEFT, {n} iteration{'s' if n > 1 else ''}"] = lambda weight, n=n: peft_loftq(weight, RANK, n)
    meter = Meter(device)
    warm = torch.randn(512, 512, device=device).bfloat16()
    for method in methods.values():
        method(warm)
    totals = {m: {"seconds": 0.0, "processor": 0.0, "peak": 0, "one": 0.0, "s": 0.0} for m in methods}
    by_role: dict[str, dict[str, float]] = {}
    zero = 0.0
    count = 0
    for at, (name, weight) in enumerate(layers(blocks, device, shapes)):
        zero += float((weight.double() - tk.quantizer(QUANTIZER).quantize(weight).dequantize().double()).square().sum())
        turn = list(methods)[at % len(methods) :] + list(methods)[: at % len(methods)]
        for label in turn:
            fit, seconds, own, peak = meter(lambda label=label, weight=weight: methods[label](weight))
            total = totals[label]
            total["seconds"] += seconds
            total["processor"] += own
            total["peak"] = max(total["peak"], peak)
            total["s"] += off(weight, fit, s)
            if label in OURS:  # s·BA is the product that was fitted, whatever s is
                total["one"] = total["s"]
            else:
                total["one"] += off(weight, fit, 1.0)
            role = by_role.setdefault(name.split(".")[-1], {})
            role[label] = round(role.get(label, 0.0) + seconds, 3)
            del fit
        count += 1
        so_far = {label: round(total["seconds"], 1) for label, total in totals.items()}
        print(f"{name} {tuple(weight.shape)}: {so_far}", file=sys.stderr)
    return {
        "model": f"Llama-3.2-1B's linear layers, N(0, 0.02²) in bfloat16: {count} of {BLOCKS * len(shapes)} layers, "
        f"{blocks} of {BLOCKS} blocks",
        "methods": {
            label: {
                "seconds": round(t["seconds"], 3),
                "seconds of the processor": round(t["processor"], 3),
                "peak MiB above the weight": round(t["peak"] / 2**20, 1),
                "residual over zero start, s = 1": round(math.sqrt(t["one"] / zero), 6),
                f"residual over zero start, s = {s:g}": round(math.sqrt(t["s"] / zero), 6),
            }
            for label, t in totals.items()
        },
        "seconds by role": by_role,
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "loftq.json")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="how many of the 16 blocks are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--peft", type=int, nargs="+", default=[1, 5], help="iterations of PEFT's that are timed (its own: 1)"
    )
    parser.add_argument("--without-demo", action="store_true", help="leave the demo model's layers out")
    parser.add_argument("--small", action="store_true", help="a smoke test on tiny layers")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    made = torch.Generator().manual_seed(0)
    gaussian = [(128, 128)] if arguments.small else [(128, 128), (48, 80), (576, 1536), (2048, 2048)]
    weights = {f"Gaussian {m}×{n}": torch.randn(m, n, generator=made) for m, n in gaussian}
    if not arguments.without_demo and not arguments.small:
        weights |= demo_layers()
    weights = {name: weight.to(device) for name, weight in weights.items()}
    load = os.getloadavg()[0]
    rows = side_by_side(weights, [1, 5])
    shapes = {p: (m // 16, n // 16) for p, (m, n) in LAYERS.items()} if arguments.small else LAYERS
    timed = whole_model(arguments.blocks, device, arguments.peft, shapes, 2.0)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("peft", "bitsandbytes"):
        versions[package] = sys.modules[package].__version__
    result = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "load before": round(load, 2),
        "versions": versions,
        "rank": RANK,
        "quantizer": QUANTIZER,
        "small": arguments.small,
        "residuals": rows,
        "whole model": timed,
        "peak resident MiB of the process": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    write_json(arguments.output, result)
    for label, values in timed["methods"].items():
        print(f"{label:22} {values}")


if __name__ == "__main__":
    main()
