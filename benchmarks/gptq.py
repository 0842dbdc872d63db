"""GPTQ's options against each other, against rounding and LoftQ, and against llm-compressor's and ModelOpt's.

    python benchmarks/gptq.py --text CALIBRATION --held-out OTHER [-o benchmarks/results/gptq.json]
        [--tokens 4096] [--blocks 15] [--small]

On the demo model's layers, each by itself, with the 16-bit model's own inputs: relative output errors
√(tr(E R Eᵀ)/tr(W R Wᵀ)), R of the tokens that were calibrated with and of as many of another text, which no method
saw. Every method is given the same W and the same R. The means are geometric, over layers, of the error relative to
rounding's. Peers run where they can be imported, and are named with the reason where not; they are no dependency.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gptq_peers import Peer, peers
from shared import cpu

import toolkit as tk
from toolkit.interfaces import Given, Initializer, Moments
from toolkit.registry import registry
from toolkit.runs.models import choose_device, load_model, load_tokenizer
from toolkit.runs.texts import documents as texts
from toolkit.weights.layers import layers_of

WINDOW = 512
OPTIONS = [
    "gptq",
    "gptq(order=columns)",
    "gptq(order=none)",
    "gptq(scales=refresh)",
    "gptq(scales=refresh,order=none)",
    "gptq(scales=static)",
    "gptq(scales=static,order=columns)",
    "gptq(scales=static,order=none)",
]
FITS = ["loftq", "loftq(base=gptq,iterations=1)"]
RANK = 8
PARTS = ("calibrated", "held_out")
Rows = dict[str, dict[str, list[dict[str, Any]]]]
FEWER = ["gptq", "gptq(order=columns)", "gptq(order=none)", "gptq(scales=static,order=columns)", OPTIONS[-1]]
RUNS = {"nvfp4": [*OPTIONS, *FITS], "mxfp4": FEWER, "nf4": FEWER}
SMALL = {"nvfp4": ["gptq", "gptq(scales=static,order=none)"]}


def moments_of(
    model: torch.nn.Module, names: list[str], windows: torch.Tensor, device: torch.device
) -> dict[str, Moments]:
    """R of each layer's inputs, summed in float64, every token once."""
    modules = dict(model.named_modules())
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str):
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs = args[0].reshape(-1, args[0].shape[-1]).double()
            sums[name] = sums.get(name, 0) + inputs.T @ inputs

        return hook

    handles = [modules[name].register_forward_pre_hook(watch(name)) for name in names]
    with torch.no_grad():
        for row in windows:
            model.base_model(row[None].to(device))
    for handle in handles:
        handle.remove()
    return {name: Moments((total / windows.numel()).float(), windows.numel()) for name, total in sums.items()}


def output_error(error: torch.Tensor, weight: torch.Tensor, second: torch.Tensor) -> float:
    """√(tr(E R Eᵀ)/tr(W R Wᵀ)) in float64."""
    parts = [float(((m.double() @ second.double()) * m.double()).sum()) for m in (error, weight)]
    return math.sqrt(parts[0] / parts[1])


def started(method: Initializer, quantizer: str, name: str, weight: torch.Tensor, moments: Moments) -> torch.Tensor:
    """The weight that a layer starts with, in float32."""
    rank = RANK if method.needs_rank else None
    a = torch.randn(RANK, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device)
    given = Given(
        name, weight, tk.quantizer(quantizer), rank, 2.0 if rank else 1.0, a if rank else None, moments=moments
    )
    return method.initialize(given).effective()


def measure(weight: torch.Tensor, made: torch.Tensor, seconds: float, seen: Moments, held: Moments) -> dict[str, float]:
    """A row's numbers."""
    error = weight - made
    return {
        "calibrated": output_error(error, weight, seen.second),
        "held_out": output_error(error, weight, held.second),
        "weights": float(error.double().norm() / weight.double().norm()),
        "seconds": round(seconds, 3),
    }


def makers_of(
    quantizer: str, methods: list[str], others: dict[str, Peer], name: str, weight: torch.Tensor, moments: Moments
) -> dict[str, Callable[[], torch.Tensor]]:
    """Method → what makes a layer's Ŵ + s·BA by it."""
    makers = {"rounding": lambda: tk.quantizer(quantizer).quantize(weight).dequantize(torch.float32)}
    for key in methods:
        makers[key] = partial(started, registry.make("initializer", key), quantizer, name, weight, moments)
    return makers | {key: partial(peer, weight, moments.second) for key, peer in others.items()}


def mean(rows: list[dict], by: list[dict], key: str) -> float:
    """The geometric mean of a row's number relative to another's."""
    return math.exp(sum(math.log(r[key] / b[key]) for r, b in zip(rows, by, strict=True)) / len(rows))


def report_of(rows: Rows, cuts: dict[str, texts.Windows], device: torch.device) -> dict[str, object]:
    """What is written: means, rows, and where they come from."""
    return {
        "reference": "weights as the model has them; the demo's are dequantized 4-bit values",
        "texts": {
            part: {"source": cut.record.source, "sha256": cut.record.sha256, "tokens": cut.record.tokens}
            for part, cut in cuts.items()
        },
        "rank": RANK,
        "means": {
            quantizer: {
                method: {
                    **{key: round(mean(of, found["rounding"], key), 4) for key in (*PARTS, "weights")},
                    "seconds": round(sum(row["seconds"] for row in of), 2),
                }
                for method, of in found.items()
            }
            for quantizer, found in rows.items()
        },
        "rows": rows,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/results/gptq.json"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", default="python-topics", help="to calibrate with")
    parser.add_argument("--held-out", default="wikitext2", help="to judge by")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--blocks", default="15")
    parser.add_argument("--small", action="store_true", help="one block, two methods, 512 tokens")
    args = parser.parse_args()
    device = choose_device(None)
    model, tokenizer = load_model(args.model).float().to(device), load_tokenizer(args.model)
    blocks = {0} if args.small else {int(part) for part in args.blocks.split(",")}
    names = [layer.name for layer in layers_of(model) if layer.block in blocks]
    tokens = WINDOW if args.small else args.tokens
    cuts = [texts.cut(texts.read_text(t), tokenizer, window=WINDOW, tokens=tokens) for t in (args.text, args.held_out)]
    seen, held = (moments_of(model, names, cut.ids, device) for cut in cuts)
    weights = {name: model.get_submodule(name).weight.detach() for name in names}
    others, about = peers()
    rows: Rows = {}
    for quantizer, methods in (SMALL if args.small else RUNS).items():
        found = rows.setdefault(quantizer, {})
        for name in names:
            makers = makers_of(
                quantizer, methods, others if quantizer == "nvfp4" else {}, name, weights[name], seen[name]
            )
            for method, make in makers.items():
                start = time.perf_counter()
                made = make()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                row = measure(weights[name], made, time.perf_counter() - start, seen[name], held[name])
                found.setdefault(method, []).append({"layer": name, **row})
            print(quantizer, name, flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)  # written after each, so that a cut run is not lost
        report = {"model": args.model, "peers": about, **report_of(rows, dict(zip(PARTS, cuts, strict=True)), device)}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    for quantizer, found in report["means"].items():
        print(f"\n{quantizer}: relative to rounding")
        for method, line in found.items():
            print(f"  {method:40} " + "  ".join(f"{key} {value}" for key, value in line.items()))


if __name__ == "__main__":
    main()
