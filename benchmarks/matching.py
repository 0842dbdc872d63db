"""How long exact matched draws take: the law (counts, shares) and the draws, by layer list.

    python benchmarks/matching.py [--repeats 5] [--draws 10000]

Prints a table and writes `results/matching.json`: medians of the repeats, in seconds of wall-clock. Each repeat
begins without the law of the one before. `select` is what `toolkit.draws` takes, records and checks included.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import toolkit as tk
from toolkit.records.profile import LayerProfile, Profile, Reference
from toolkit.selection import matching

QWEN_7B = {"q": (3584, 3584), "k": (512, 3584), "v": (512, 3584), "o": (3584, 3584)} | {
    "gate": (18944, 3584),
    "up": (18944, 3584),
    "down": (3584, 18944),
}
QWEN_14B = {"q": (5120, 5120), "k": (1024, 5120), "v": (1024, 5120), "o": (5120, 5120)} | {
    "gate": (13824, 5120),
    "up": (13824, 5120),
    "down": (5120, 13824),
}
PHI_3 = {"o": (3072, 3072), "qkv": (9216, 3072), "gate_up": (16384, 3072), "down": (3072, 8192)}
SEVEN = {"a": (3584, 3584), "b": (512, 3584), "c": (640, 3583), "d": (3589, 3201)} | {
    "e": (18944, 3584),
    "f": (17920, 3584),
    "g": (3584, 17409),
}
COARSE = {"a": (3584, 3584), "b": (512, 3584), "c": (640, 3584), "d": (3584, 3136)} | {
    "e": (18944, 3584),
    "f": (17920, 3584),
    "g": (3584, 17472),
}


def experts(hidden: int, q: int, kv: int, width: int, count: int) -> dict[str, tuple[int, int]]:
    """A block of attention and `count` experts."""
    block = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    block |= {f"experts.gate_up_proj[{i}]": (2 * width, hidden) for i in range(count)}
    return block | {f"experts.down_proj[{i}]": (hidden, width) for i in range(count)}


CASES = {
    "196 layers, 7 sizes": (28, SEVEN, {}),
    "196 layers, 7 sizes, roles": (28, SEVEN, {"roles": True}),
    "Qwen2.5-7B (196)": (28, QWEN_7B, {}),
    "Qwen2.5-7B, thirds": (28, QWEN_7B, {"thirds": True}),
    "Qwen2.5-7B, thirds and roles": (28, QWEN_7B, {"thirds": True, "roles": True}),
    "Qwen2.5-7B, disjoint": (28, QWEN_7B, {"disjoint": True}),
    "Qwen2.5-14B (336)": (48, QWEN_14B, {}),
    "Phi-3-mini (128, fused)": (32, PHI_3, {}),
    "504 layers, 7 sizes": (72, COARSE, {}),
    "Mixtral-8x7B (640, experts)": (32, experts(4096, 4096, 1024, 14336, 8), {}),
    "Qwen3-30B-A3B (12,480, experts)": (48, experts(2048, 4096, 512, 768, 128), {}),
}


def profile(blocks: int, shapes: Mapping[str, tuple[int, int]], model: str) -> Profile:
    """A layer list with random scores; no weights."""
    rng = random.Random(0)
    rows = [
        LayerProfile(
            name=f"model.layers.{block}.{path}",
            tensor=f"model.layers.{block}.{path}.weight",
            role=path.partition("[")[0],
            block=block,
            shape=shape,
            parameters=shape[0] * shape[1],
            bytes=2 * shape[0] * shape[1],
            norm=rng.random(),
            density=rng.random(),
        )
        for block in range(blocks)
        for path, shape in shapes.items()
    ]
    reference = Reference(dtype="bfloat16", note="a layer list without weights")
    return Profile(model=model, fingerprint=model, reference=reference, blocks=blocks, layers=rows)


def cpu() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure(name: str, repeats: int, draws: int) -> dict[str, object]:
    """One case: medians of the law, of the bare draws, and of `toolkit.draws` as a whole."""
    blocks, shapes, constraints = CASES[name]
    layers = profile(blocks, shapes, name)
    like = tk.select("density", layers, "layers=0.2")
    count = draws if len(layers) < 1000 else min(draws, 500)
    laws, bare, whole = [], [], []
    for repeat in range(repeats):
        matching._law.cache_clear()
        start = time.perf_counter()
        law = matching.controls(layers, like, **constraints)
        assert len(law.inclusion) == len(layers)
        counted = time.perf_counter()
        law.draws(random.Random(repeat), count)
        drawn = time.perf_counter()
        matching._law.cache_clear()
        begin = time.perf_counter()
        found = tk.draws("random-matched", layers, like=like, count=count, seed=repeat, **constraints)
        whole.append(time.perf_counter() - begin)
        laws.append(counted - start)
        bare.append(drawn - counted)
        assert len(found) == count
    return {
        "case": name,
        "layers": len(layers),
        "sizes": len(set(layers["parameters"].tolist())),
        "feasible_subsets_bits": law.count.bit_length(),
        "table_steps": law.subsets.spent,
        "single_total": law.single_total,
        "draws": count,
        "law_seconds": statistics.median(laws),
        "draws_seconds": statistics.median(bare),
        "select_seconds": statistics.median(whole),
    }


def main() -> None:
    """Measure every case, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("-o", type=Path, default=Path(__file__).parent / "results" / "matching.json")
    given = parser.parse_args()
    print(f"{cpu()}; Python {platform.python_version()}; medians of {given.repeats}; budget layers=0.2, within 0.001")
    print(
        f"{'layer list':34}{'sizes':>6}{'log2 N':>8}{'steps':>10}{'law s':>8}{'draws':>8}{'bare s':>8}{'select s':>9}"
    )
    rows = []
    for name in CASES:
        row = measure(name, given.repeats, given.draws)
        rows.append(row)
        print(
            f"{name:34}{row['sizes']:>6}{row['feasible_subsets_bits']:>8}{row['table_steps']:>10,}"
            f"{row['law_seconds']:>8.2f}{row['draws']:>8,}{row['draws_seconds']:>8.2f}{row['select_seconds']:>9.2f}",
            flush=True,
        )
    given.o.parent.mkdir(parents=True, exist_ok=True)
    about = {"cpu": cpu(), "python": platform.python_version(), "repeats": given.repeats, "cases": rows}
    given.o.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"written to {given.o}")


if __name__ == "__main__":
    main()
