"""How long judging takes: many scores of many selection files, and few of few, start included.

    python benchmarks/judging.py [--scores 10000] [--repeats 3]

Prints the seconds and writes `results/judging.json`: each repeat is a process of its own that runs what
`toolkit judge` runs, on files in the page cache.

- many: as many selection files as scores, families of two laws for two arms at three budgets;
- few: 20 scores, which is mostly the start;
- help: `toolkit judge --help`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import builders, cpu

import toolkit as tk
from toolkit.records.selection import Selection

HERE = Path(__file__).parent
BUDGETS = ("layers=0.05", "layers=0.1", "layers=0.2")
ARMS = ("top-error", "bottom-error")
LAWS = ("random-matched", "random-permuted")


def put(path: Path, selection: Selection) -> None:
    """Write a selection as `Selection.save` does, without waiting for the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(selection.to_json(), indent=1) + "\n")


def make(folder: Path, scores: int, budgets: tuple[str, ...]) -> Path:
    """Selections and their scores; one score a set of layers."""
    profile, rng = builders().make_profile(), random.Random(0)
    draws = max(1, (scores - len(ARMS) * len(budgets)) // (len(ARMS) * len(budgets) * len(LAWS)) + 1)
    lines: dict[str, list[Any]] = {}
    for name in ARMS:
        arms = [tk.select(name, profile, budget=budget) for budget in budgets]
        made = [(folder / "s" / f"{name}-{at}.json", arm) for at, arm in enumerate(arms)]
        for law in LAWS:
            for number, family in enumerate(tk.chains(law, profile, likes=arms, count=draws)):
                made += [(folder / "s" / law / name / str(at) / f"{number}.json", s) for at, s in enumerate(family)]
        for path, selection in made:
            put(path, selection)
            lines[selection.layers_hash] = [selection.layers_hash, selection.model, "", 0, "loss", rng.gauss(2.8, 0.01)]
    with open(folder / "scores.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["selection", "model", "budget", "seed", "metric", "value"])
        writer.writerows(lines.values())
    return folder


def measure(arguments: list[str], repeats: int) -> dict[str, Any]:
    """Seconds of whole processes, wall-clock and CPU; the first, which fills the cache, is out."""
    seconds, busy = [], []
    for _ in range(repeats + 1):
        before, start = os.times(), time.perf_counter()
        command = [sys.executable, "-c", "from toolkit.cli import main; raise SystemExit(main())", *arguments]
        subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
        after = os.times()
        busy.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {
        "seconds": [round(s, 3) for s in seconds[1:]],
        "median_seconds": round(statistics.median(seconds[1:]), 3),
        "median_cpu_seconds": round(statistics.median(busy[1:]), 3),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    results = []
    for what, scores, budgets in (("many", given.scores, BUDGETS), ("few", 20, BUDGETS[:1])):
        with tempfile.TemporaryDirectory() as root:
            folder = make(Path(root), scores, budgets)
            files = sum(1 for _ in (folder / "s").rglob("*.json"))
            lines = len((folder / "scores.csv").read_text().splitlines()) - 1
            shell = ["judge", "--selections", str(folder / "s"), "--results", str(folder / "scores.csv")]
            found = measure([*shell, "--control", LAWS[0]], given.repeats)
        results.append({"what": what, "selections": files, "scores": lines} | found)
        print(f"{what:5} {files:6,} selections, {lines:6,} scores: {found['median_seconds']:6.2f} s")
    found = measure(["judge", "--help"], given.repeats)
    results.append({"what": "help"} | found)
    print(f"help {found['median_seconds']:.2f} s")
    data: dict[str, Any] = {"cpu": cpu(), "python": platform.python_version(), "repeats": given.repeats}
    if hasattr(os, "getloadavg"):  # above the number of CPUs, other work was running too
        data["load_average"] = round(os.getloadavg()[1], 2)
    data["judging"] = results
    out = HERE / "results" / "judging.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{data['cpu']}; wrote {out.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
