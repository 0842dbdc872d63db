"""What it takes to judge one selector: sweep, oracle, families of draws, certificate, verification.

    python benchmarks/comparing.py --work FOLDER [-o benchmarks/results/comparing.json] [--draws 499] [--tokens 16384]

`toolkit compare top-error` on the embedded model and its embedded text, from nothing: the profile, the single-layer
sweep in both directions, the reference selections, and as many draws of every standard law at three budgets.
Seconds by kind of run, from the reports; and `toolkit verify` of the certificate.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import torch

import toolkit as tk
from toolkit.records.report import REPORT, Report


def seconds_by_role(folder: Path) -> dict[str, dict[str, float]]:
    """Role → runs, evaluations and the seconds that their reports state."""
    runs: Counter[str] = Counter()
    evaluations: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for path in sorted(folder.glob(f"*/{REPORT}")):
        report = Report.load(path)
        role = f"control {report.control}" if report.role == "control" else report.role
        runs[role] += 1
        evaluations[role] += max(1, len(report.draws))
        seconds[role] += report.provenance.seconds
    return {
        role: {"runs": runs[role], "evaluations": evaluations[role], "seconds": round(seconds[role], 2)}
        for role in runs
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="empty folder for the results")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/comparing.json"))
    parser.add_argument("--draws", type=int, default=499)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    start = time.perf_counter()
    made = tk.compare(
        "top-error",
        draws=args.draws,
        tokens=args.tokens,
        window=args.window,
        batch=args.batch,
        out=args.work,
        progress=False,
    )
    whole = time.perf_counter() - start
    start = time.perf_counter()
    verified = tk.verify(made.path)
    verifying = time.perf_counter() - start
    cuda = torch.cuda.is_available()
    data = {
        "date": datetime.now().date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "draws": args.draws,
        "tokens": args.tokens,
        "seconds": {"compare, from nothing": round(whole, 1), "verify": round(verifying, 1)},
        "by role": seconds_by_role(made.folder),
        "draws verified": verified.draws,
        "certificate bytes": made.path.stat().st_size,
        "sentences": list(made.sentences),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(data, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
