"""How long a table over many reports takes: reading and checking every report, inference, rendering.

    python benchmarks/table.py [--reports 10000] [--kilobytes 50] [--repeats 3]

Prints the seconds and writes `results/table.json`: each repeat is a process of its own that runs what
`toolkit table STUDY` runs, start included, on reports in the page cache. Three studies are measured:

- controls: every report holds as many draws of a control as make up its size;
- arms: every report is an arm of its own, with its plan and selection;
- draws: every report holds one draw, with its law and inclusion probabilities.
"""

from __future__ import annotations

import argparse
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

from toolkit.records.report import REPORT
from toolkit.records.study import Study

HERE = Path(__file__).parent
TABLE = "import sys; from toolkit.analysis.printing.table import table; sys.stdout.write(table(sys.argv[1]))"
BUDGETS = ("layers=0.05", "layers=0.1", "layers=0.2")


def put(folder: Path, data: dict[str, Any]) -> int:
    """Write a report as the runner does, one draw a line; its size in bytes."""
    draws = data.pop("draws", [])
    text = json.dumps(data, indent=1)
    if draws:
        lines = ",\n".join(f"  {json.dumps(draw)}" for draw in draws)
        text = text[:-2] + f',\n "draws": [\n{lines}\n ]\n}}'
    (folder / data["run"]).mkdir(parents=True)
    (folder / data["run"] / REPORT).write_text(text + "\n")
    data["draws"] = draws
    return len(text) + 1


def make(folder: Path, kind: str, reports: int, size: int) -> tuple[Path, float]:
    """A study of one of the three kinds; its folder, and the mean size of its reports in bytes."""
    module, rng = builders(), random.Random(0)
    arms = max(1, reports // len(BUDGETS)) if kind == "arms" else 2
    study = module.make_study(budgets=BUDGETS, draws=max(1, reports), count_matched=False)
    made = module.Builder(folder, study)
    data = study.to_json()
    if kind == "arms":
        data["arms"] = [{"selector": f"arm-{at}"} for at in range(arms)]
    Study.model_validate(data).save(made.results / "study.json")
    for name in ("16-bit", "base"):
        put(made.results, made.reference(name).to_json())
    budget = study.budgets[-1]
    arm, control = made.arm("top-error", budget).to_json(), made.control("matched", "top-error", budget, 1).to_json()
    total = 0
    if kind == "arms":
        filler = {f"model.layers.{at}.x": {"quantizer": "nf4", "compute_dtype": "bfloat16"} for at in range(size // 10)}
        for at in range(reports):
            name, budget = f"arm-{at // len(BUDGETS)}", BUDGETS[at % len(BUDGETS)]
            report = arm | {"run": f"run-{at}", "arm": name, "budget": budget}
            selection = arm["selection"] | {"layers": sorted(rng.sample(made.names, 42), key=made.names.index)}
            base = len(json.dumps(report | {"selection": selection}, indent=1))
            keep = max(0, (size - base) // 95)
            plan = arm["plan"] | {"layers": arm["plan"]["layers"] | dict(list(filler.items())[:keep])}
            total += put(made.results, report | {"selection": selection, "plan": plan})
        return folder, total / reports
    for budget in study.budgets:
        for name in ("top-error", "bottom-error"):
            put(made.results, made.arm(name, budget).to_json())
    draw = control["draws"][0]
    empty = len(json.dumps(control | {"draws": []}, indent=1))
    per = 1 if kind == "draws" else max(1, (size - empty) // (len(json.dumps(draw)) + 4))
    names = control["layers"]
    if kind == "draws":  # the rest of its size in layers, as of a model with experts
        more = max(0, (size - empty - 300) // 60)
        names = names + [f"model.layers.{at // 8}.mlp.experts.gate_up_proj[{at}]" for at in range(more)]
    for at in range(reports):
        label = str(study.budgets[at % len(study.budgets)])
        name = ("top-error", "bottom-error")[at // len(study.budgets) % 2]
        law = control["law"] | {"like": name}
        draws = []
        for index in range(per):
            scores = {}
            for text, score in draw["scores"].items():
                scores[text] = score | {"loss": score["loss"] + rng.gauss(0, 0.003)}
            draws.append(draw | {"index": index, "mask": hex(rng.getrandbits(200)), "scores": scores})
        report = control | {"run": f"run-{at}", "arm": name, "budget": dict([label.split("=")]), "law": law}
        total += put(made.results, report | {"draws": draws, "layers": names})
    return folder, total / reports


def measure(folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of whole processes that print the table, wall-clock and CPU; the first, which fills the cache, is out."""
    seconds, busy = [], []
    for _ in range(repeats + 1):
        before, start = os.times(), time.perf_counter()
        done = subprocess.run([sys.executable, "-c", TABLE, str(folder)], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
        after = os.times()
        busy.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert "top-error" in done.stdout or "arm-0" in done.stdout
    return seconds[1:], busy[1:]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=10_000)
    parser.add_argument("--kilobytes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    results = []
    for kind in ("controls", "arms", "draws"):
        with tempfile.TemporaryDirectory() as folder:
            study, size = make(Path(folder) / "study", kind, given.reports, given.kilobytes * 1000)
            seconds, busy = measure(study, given.repeats)
        results.append(
            {
                "study": kind,
                "reports": given.reports,
                "mean_bytes": round(size),
                "seconds": [round(s, 3) for s in seconds],
                "median_seconds": round(statistics.median(seconds), 3),
                "median_cpu_seconds": round(statistics.median(busy), 3),
            }
        )
        print(f"{kind:9} {given.reports:6,} reports of {size / 1000:5.1f} kB: {results[-1]['median_seconds']:6.2f} s")
    data = {"cpu": cpu(), "python": platform.python_version(), "repeats": given.repeats}
    if hasattr(os, "getloadavg"):  # above the number of CPUs, other work was running too
        data["load_average"] = round(os.getloadavg()[1], 2)
    data["studies"] = results
    out = HERE / "results" / "table.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{data['cpu']}; wrote {out.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
