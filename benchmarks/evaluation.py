"""What one evaluation of a swept selection costs, and how far the same selections' losses are apart numerically.

    python benchmarks/evaluation.py [-o benchmarks/results/evaluation.json] [--draws 20] [--tokens 16384]

On the embedded model and text, on CUDA where there is one, with the windows of studies/ranking-control. Medians
over random selections of 21 layers; the fused scores against the plain tensor operations; the same selections in
bfloat16 and in float32; and with half the batch, as the runner measures the base once more: a difference below
that one says nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import torch

from toolkit.runs.models import choose_device, load_model, load_tokenizer
from toolkit.runs.ranking.sweep import Sweep
from toolkit.runs.texts import documents as texts
from toolkit.runs.texts.evaluation import Evaluation, total, window_scores
from toolkit.weights.layers import layers_of

WINDOW = 512
BATCH = {"cuda": 32, "cpu": 2}
HALF = ", half the batch"


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    dtype: torch.dtype, fused: bool, batch: int, windows: texts.Windows, draws: int, device: torch.device
) -> dict[str, object]:
    """Milliseconds an evaluation (median) and the loss of each selection."""
    model = load_model("demo")
    names = [layer.name for layer in layers_of(model)]
    sweep = Sweep(model.to(device), names, base="nf4", protect="none", dtype=dtype)
    evaluation = Evaluation(sweep.model, {"text": windows.ids}, batch=batch)
    if not fused:
        evaluation._kernel = None
    sweep.set(names)
    evaluation.keep_reference()
    pick = random.Random(0)
    losses, times = [], []
    for at in range(draws + 2):
        sweep.set(pick.sample(names, 21))
        wait(device)
        start = time.perf_counter()
        found = evaluation.measure(sweep.everything)
        wait(device)
        if at >= 2:  # two to warm up
            times.append(time.perf_counter() - start)
            losses.append(total(window_scores(found, {"text": WINDOW})["text"]).loss)
    return {"milliseconds": 1e3 * statistics.median(times), "losses": losses}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "evaluation.json")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    device = choose_device()
    windows = texts.cut(texts.read_text("python-topics"), load_tokenizer("demo"), window=WINDOW, tokens=options.tokens)
    batch = BATCH[device.type]
    cases = {"bfloat16, plain": (torch.bfloat16, False, batch), "float32, plain": (torch.float32, False, batch)}
    if device.type == "cuda":
        cases |= {"bfloat16, fused": (torch.bfloat16, True, batch), "float32, fused": (torch.float32, True, batch)}
    again = {
        f"{name}{HALF}": (*case[:2], batch // 2) for name, case in cases.items() if case[1] == (device.type == "cuda")
    }
    cases |= again
    found = {name: measure(*case, windows, options.draws, device) for name, case in cases.items()}
    exact = found["float32, plain"]["losses"]
    apart = {name: [a - b for a, b in zip(case["losses"], exact, strict=True)] for name, case in found.items()}
    floor = {
        name: [a - b for a, b in zip(found[name]["losses"], found[name.removesuffix(HALF)]["losses"], strict=True)]
        for name in again
    }
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "tokens": windows.record.tokens,
        "draws": options.draws,
        "batch": batch,
        "spread of the draws' losses (sd, nats a token)": statistics.stdev(exact),
        "cases": {
            name: {
                "milliseconds an evaluation": round(case["milliseconds"], 2),
                "loss minus float32's: mean": statistics.mean(
                    a - b for a, b in zip(case["losses"], exact, strict=True)
                ),
                "loss minus float32's: sd": statistics.stdev(apart[name]),
            }
            for name, case in found.items()
        },
        "loss with half the batch minus the loss with all of it (largest absolute, sd; nats a token)": {
            name: [max(map(abs, values)), statistics.stdev(values)] for name, values in floor.items()
        },
    }
    print(json.dumps(result, indent=1))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
