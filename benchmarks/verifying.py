"""How long certifying and verifying take, and how large a certificate is.

    python benchmarks/verifying.py [--repeats 3]

Makes studies of 210 layers with the real laws' draws and made-up losses: one of 1,500 draws, and one with four arms,
three budgets, two texts and about 17,000 draws. Prints a table and writes `results/verifying.json`: seconds of
wall-clock, of whole processes for `toolkit verify`, start-up included.
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
from pathlib import Path
from typing import Any

from shared import builders, cpu

from toolkit.analysis.certificates.certifying import certify
from toolkit.records.certificate import Certificate

HERE = Path(__file__).parent
COMMAND = "import sys; from toolkit.cli import main; sys.exit(main(['verify', sys.argv[1]]))"
FEW = {"draws": 75, "few": 40, "texts": ("python-topics", "wikitext2")}
MANY = {"draws": 499, "few": 199, "texts": ("python-topics", "wikitext2"), "extra_arms": ("density", "depth")}


def make(folder: Path, settings: dict[str, Any]) -> Path:
    """A finished and locked study."""
    module = builders()
    study = module.make_full_study(**settings)
    made = module.Builder(folder, study, real=True, windows=32)
    made.seal()
    made.write(rows=True)
    study.save(made.results / "study.json")
    return made.folder


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    results = []
    for settings in (FEW, MANY):
        with tempfile.TemporaryDirectory() as folder:
            study, path = make(Path(folder) / "study", settings), Path(folder) / "control.json"
            start = time.perf_counter()
            certify(study, path)
            certifying = time.perf_counter() - start
            seconds, busy = [], []
            for _ in range(given.repeats):
                before, start = os.times(), time.perf_counter()
                subprocess.run([sys.executable, "-c", COMMAND, str(path)], check=True, capture_output=True)
                seconds.append(time.perf_counter() - start)
                after = os.times()
                busy.append(after.children_user + after.children_system - before.children_user - before.children_system)
            item = Certificate.load(path)
            size = path.stat().st_size
        draws = sum(len(control.hashes) for control in item.controls)
        results.append(
            {
                "draws": draws,
                "controls": len(item.controls),
                "texts": len(item.texts),
                "layers": len(item.profile),
                "bytes": size,
                "certify_seconds": round(certifying, 3),
                "verify_seconds": [round(s, 3) for s in seconds],
                "median_verify_seconds": round(statistics.median(seconds), 3),
                "median_verify_cpu_seconds": round(statistics.median(busy), 3),
            }
        )
        print(
            f"{draws:6,} draws, {size / 1e6:4.2f} MB: certify {certifying:5.1f} s, verify "
            f"{results[-1]['median_verify_seconds']:5.1f} s"
        )
    data = {"cpu": cpu(), "python": platform.python_version(), "repeats": given.repeats}
    if hasattr(os, "getloadavg"):  # above the number of CPUs, other work was running too
        data["load_average"] = round(os.getloadavg()[1], 2)
    data["certificates"] = results
    out = HERE / "results" / "verifying.json"
    out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{data['cpu']}; wrote {out.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
