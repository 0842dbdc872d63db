"""How long the profile of a Llama-3.2-1B-shaped checkpoint takes, against two naive passes on the same machine.

    python benchmarks/profiling.py [-o benchmarks/results/profile.json] [--repeats 3] [--blocks 16]

The checkpoint (16 blocks of 7 layers, 0.973 B bfloat16 weights of random values, a small embedding) is written to
a temporary folder and read once, so that it lies in the page cache. Every figure is the median of the repeats.
The naive passes run on one block, and are extrapolated to all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

HIDDEN, KEYS, INTER, VOCABULARY = 2048, 512, 8192, 256
LAYERS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTER, HIDDEN),
    "mlp.up_proj": (INTER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTER),
}
GOALS = {"whole process": 5.0, "second call in one process": 1.5}
"""Seconds on 2 cores, kernel built and file in the page cache."""

WHOLE = "import sys; from toolkit.cli import main; sys.exit(main())"
TWICE = """
import sys, time
import toolkit as tk
tk.profile(sys.argv[1])
start = time.perf_counter()
made = tk.profile(sys.argv[1])
print(time.perf_counter() - start, len(made), made.parameters)
"""
BUILD = """
import sys, time
from pathlib import Path
from toolkit.weights.native.build import build
start = time.perf_counter()
build(Path(sys.argv[1]))
print(time.perf_counter() - start)
"""
IMPORTS = "import toolkit.weights.profiling, toolkit_plugins.quantizers"


def write_checkpoint(folder: Path, blocks: int) -> None:
    """A folder with config and one safetensors file, weights N(0, 0.02²)."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16)}
    for block in range(blocks):
        for path, shape in LAYERS.items():
            weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            tensors[f"model.layers.{block}.{path}.weight"] = weight
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "num_hidden_layers": blocks, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))


def read_once(file: Path) -> None:
    with open(file, "rb") as opened:
        while opened.read(2**24):
            pass


def python(code: str, *arguments: str, cache: Path | None = None) -> str:
    """Standard output of a fresh interpreter."""
    environment = os.environ | ({"TOOLKIT_CACHE": str(cache)} if cache else {})
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def argmin_pass(weights: list[torch.Tensor]) -> None:
    """NF4's mean squared error by distance to all 16 levels, in plain PyTorch, 2²² weights at a time."""
    from toolkit.registry import registry

    levels = torch.tensor(registry.make("quantizer", "nf4").levels)
    for weight in weights:
        total = 0.0
        for chunk in weight.reshape(-1).split(2**22):
            values = chunk.float().view(-1, 64)
            scale = values.abs().amax(1, keepdim=True)
            code = ((values / scale).unsqueeze(-1) - levels).abs().argmin(-1)
            total += (values - levels[code] * scale).square().sum().item()


def bitsandbytes_pass(weights: list[torch.Tensor]) -> None:
    """The same error through bitsandbytes' CPU operators, with double quantization."""
    from bitsandbytes import functional

    for weight in weights:
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
        (weight.float() - functional.dequantize_4bit(packed, state).float()).square().mean().item()


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.processor())


def measure(folder: Path, blocks: int, repeats: int) -> dict[str, list[float]]:
    """Every figure's seconds, one number a repeat."""
    from toolkit.weights.checkpoints import open_checkpoint

    file = folder / "model.safetensors"
    read_once(file)
    checkpoint = open_checkpoint(folder)
    one_block = [checkpoint[f"model.layers.0.{path}.weight"] for path in LAYERS]
    output = str(folder / "profile.json")
    python(IMPORTS)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)
        print(f"{name}: {value:.2f} s", file=sys.stderr)

    argmin_pass(one_block[1:2])
    bitsandbytes_pass(one_block[1:2])
    for turn in range(repeats):  # in turn, so that a busy moment does not fall on one figure alone
        with tempfile.TemporaryDirectory() as fresh:
            note("one-off kernel build", float(python(BUILD, fresh)))
        note("imports alone", seconds(lambda: python(IMPORTS)))
        note("whole process", seconds(lambda: python(WHOLE, "profile", str(folder), "-o", output)))
        note("second call in one process", float(python(TWICE, str(folder)).split()[0]))
        note("reading the bytes once", seconds(lambda: read_once(file)))
        note("naive pass, plain PyTorch argmin", blocks * seconds(lambda: argmin_pass(one_block)))
        note("naive pass, bitsandbytes CPU operators", blocks * seconds(lambda: bitsandbytes_pass(one_block)))
        print(f"repeat {turn + 1} of {repeats} done", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "profile.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, arguments.blocks)
        load = os.getloadavg()[0]
        found = measure(folder, arguments.blocks, arguments.repeats)
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    weights = arguments.blocks * sum(rows * columns for rows, columns in LAYERS.values())
    result = {
        "checkpoint": f"{weights:,} bfloat16 weights in {arguments.blocks * len(LAYERS)} layers, N(0, 0.02²)",
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "load before": round(load, 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "repeats": arguments.repeats,
        "naive passes": f"measured on 1 block of {arguments.blocks}, times {arguments.blocks}",
        "goals": GOALS,
        "seconds, median": medians,
        "seconds, all": {name: [round(v, 3) for v in values] for name, values in found.items()},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, value in medians.items():
        goal = f"   (goal {GOALS[name]} s)" if name in GOALS else ""
        print(f"{value:8.2f} s  {name}{goal}")
    print(f"{arguments.output}: {result['cpu']}, {result['threads']} threads, load {result['load before']}")


if __name__ == "__main__":
    main()
