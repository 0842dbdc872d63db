"""What the lever `graphs` buys a small model: milliseconds a step, with and without, for several bases.

    python benchmarks/graphs.py [-o benchmarks/results/graphs.json] [--model demo] [--rounds 5] [--seconds 1]

The arms are trained by the Trainer that trains studies, as a timing session drives it, interleaved in rounds: batches
of 32 rows of 30 to 60 random tokens, the last two of each the target, r = 8 on every layer. Needs a GPU; `--small` is a
smoke test on any device.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.records.io import write_json
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.runs.building import build
from toolkit.runs.models import choose_device
from toolkit.runs.provenance import device_name
from toolkit.runs.tasks.encoding import Encoded
from toolkit.runs.timing.cycling import driver

BASES = ("none", "nf4", "nvfp4")
ROWS, BATCHES = 32, 4


def batches(vocabulary: int, rows: int) -> list[list[Encoded]]:
    """The list that every arm goes through."""
    chance = random.Random(0)
    made = []
    for _ in range(BATCHES):
        lengths = [chance.randint(30, 60) for _ in range(rows)]
        made.append(
            [
                Encoded(tuple(chance.randrange(1, vocabulary) for _ in range(n)), tuple(i >= n - 2 for i in range(n)))
                for n in lengths
            ]
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "graphs.json")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--small", action="store_true", help="4 rows a batch and one base, for a smoke test")
    given = parser.parse_args(arguments)
    device = choose_device(None)
    rows = 4 if given.small else ROWS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        runners = {}
        for base in BASES[:1] if given.small else BASES:
            for graphs in (False, True):
                model = build(given.model, Plan.protecting(None, base, rank=8), device=str(device))
                levers = Levers(batch=rows, accumulation=1, length=64, graphs=graphs)
                listed = batches(model.config.vocab_size, rows)
                name = base + (", CUDA graphs" if graphs else "")
                runners[name] = driver(model, listed, levers, Seeds.all(0), Path(scratch), 0)
        samples: dict[str, list[float]] = {name: [] for name in runners}
        for number in range(given.rounds):
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
            for name in random.Random(number).sample(list(runners), len(runners)):
                ran = runners[name].run(lead=3 * BATCHES, seconds=given.seconds)  # plain, captured, replayed
                samples[name].append(1e3 * ran.seconds / (ran.cycles * BATCHES))
        for runner in runners.values():
            runner.close()
    for name, values in samples.items():
        found[name] = {
            "ms a step, median": round(statistics.median(values), 2),
            "ms a step, rounds": [round(v, 2) for v in values],
        }
    data = {
        "device": device_name(device),
        "torch": torch.__version__,
        "model": given.model,
        "rows a batch": rows,
        "arms": found,
    }
    print(json.dumps(data, indent=1))
    write_json(given.output, data)


if __name__ == "__main__":
    main()
