"""How often intervals over few seeds cover what they are asked to, in simulation.

    python benchmarks/seeds.py [--studies 4000] [--boot 1000]

Prints a table and writes `results/seeds.json`: coverage where 95% is asked for, at 3, 4, 6 and 10 runs an arm.
`seeds` holds intervals over seeds alone (outcomes of runs; a percentile bootstrap beside them); `crossed` those where
seeds and rows both vary and all runs share the rows. Rows weigh 1 to 5 tokens. Every study has its own seeds and rows.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from toolkit.analysis.statistics import crossed, seeds

RUNS = (3, 4, 6, 10)


@dataclass(frozen=True)
class World:
    """Row r of run i: base_r + arm's ρ_r + σ_i (+ what a seed adds to both arms) + ε_ir; the true difference is 0.

    Attributes:
        rows: of a study.
        row, seed, cell: standard deviations of ρ, σ and ε.
        common: of what a seed adds to both arms.
        wider: how much wider the second arm's seeds spread.
        skewed: ρ is exponential less its mean, as losses are; else normal.
    """

    rows: int = 100
    row: float = 1.0
    seed: float = 0.1
    cell: float = 0.5
    common: float = 0.0
    wider: float = 1.0
    skewed: bool = False

    def study(self, rng: np.random.Generator, runs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Two arms (runs, rows) and the rows' weights."""
        base = 3 * rng.standard_normal(self.rows)
        own = (rng.exponential(size=self.rows) - 1) if self.skewed else rng.standard_normal(self.rows)
        both = self.common * rng.standard_normal((runs, 1))
        first = base + self.row * own + both + self.seed * rng.standard_normal((runs, 1))
        second = base + both + self.wider * self.seed * rng.standard_normal((runs, 1))
        first, second = (x + self.cell * rng.standard_normal((runs, self.rows)) for x in (first, second))
        return first, second, rng.integers(1, 6, self.rows).astype(float)


WORLDS = {
    "seeds as wide as rows": World(),
    "seeds wider than rows": World(seed=1.0),
    "rows wider than seeds": World(seed=0.02),
    "skewed rows": World(rows=200, skewed=True),
    "no interaction of arm and row": World(row=0.0, cell=1.0),
    "one arm's seeds three times wider": World(row=0.5, wider=3.0),
    "seeds add alike to both arms": World(common=0.3),
}


def covered(world: World, runs: int, paired: bool, studies: int, *, seed: int = 1, boot: int = 0) -> float:
    """Share of studies whose seeds × rows interval holds 0; with `boot`, the bootstrap's of so many resamples."""
    rng = np.random.default_rng([seed, runs, paired])
    held = 0
    for study in range(studies):
        first, second, weights = world.study(rng, runs)
        sides = [first - second] if paired else [first, second]
        if boot:
            found = crossed.resampled(sides, weights, resamples=boot, seed=study)
        else:
            found = crossed.interval(sides, weights)
        assert found.low is not None and found.high is not None
        held += found.low <= 0 <= found.high
    return held / studies


def over_seeds(runs: int, studies: int, *, common: float = 1.0, seed: int = 2, boot: int = 1000) -> dict[str, float]:
    """Coverage over seeds alone, sd 1 in each arm and `common` for what a seed adds to both."""
    rng = np.random.default_rng([seed, runs])
    both = common * rng.standard_normal((studies, runs))
    a, b = both + rng.standard_normal((studies, runs)), both + rng.standard_normal((studies, runs))
    welch = [seeds.welch(x, y) for x, y in zip(a, b, strict=True)]
    paired = [seeds.paired(d) for d in a - b]
    return {
        "welch": held((found.low, found.high) for found in welch),
        "paired t": held((found.low, found.high) for found in paired),
        "percentile bootstrap, two arms": percentile(a, b, boot, rng),
        "percentile bootstrap, pairs": percentile(a - b, None, boot, rng),
        "paired half-width / welch's": float(
            np.median([p.high - p.low for p in paired]) / np.median([w.high - w.low for w in welch])
        ),
    }


def percentile(first: np.ndarray, second: np.ndarray | None, boot: int, rng: np.random.Generator) -> float:
    """Coverage of the percentile bootstrap over seeds: (studies, runs) a side; resamples are shared by the studies."""
    means = np.zeros((boot, len(first)))
    for sign, side in ((1.0, first), (-1.0, second)):
        if side is not None:
            runs = side.shape[1]
            means += sign * rng.multinomial(runs, np.full(runs, 1 / runs), size=boot) @ side.T / runs
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return float(((low <= 0) & (high >= 0)).mean())


def held(limits: Iterator[tuple[float | None, float | None]]) -> float:
    """Share of intervals that hold 0."""
    return float(np.mean([low is not None and high is not None and low <= 0 <= high for low, high in limits]))


def floors(gap: float, runs: int, sessions: int = 100_000) -> dict[str, float]:
    """Share of sessions under a 3% floor, gaps between two runs spreading by `gap`: one gap, and the upper bound.

    The bound is `toolkit.analysis.statistics.timing.floor`'s, written out here for all sessions at once.
    """
    x = np.random.default_rng(3).normal(0, gap / np.sqrt(2), (sessions, runs))
    bound = np.expm1(stats.t.ppf(0.975, runs - 1) * np.sqrt(2) * x.std(axis=1, ddof=1))
    return {
        "one gap": float((np.expm1(np.abs(x[:, 1] - x[:, 0])) < 0.03).mean()),
        "upper bound": float((bound < 0.03).mean()),
    }


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=4000)
    parser.add_argument("--boot", type=int, default=1000, help="studies of the crossed bootstrap")
    parser.add_argument("-o", type=Path, default=Path(__file__).parent / "results" / "seeds.json")
    args = parser.parse_args()
    result: dict[str, object] = {
        "studies": args.studies,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    result["seeds"] = {
        name: {str(n): over_seeds(n, 2 * args.studies, common=common) for n in RUNS}
        for name, common in (("nothing is shared", 0.0), ("half of the variance is shared", 1.0))
    }
    result["crossed"] = {
        name: {
            kind: {str(n): covered(world, n, paired, args.studies) for n in RUNS}
            for kind, paired in (("welch", False), ("paired", True))
        }
        for name, world in WORLDS.items()
    }
    result["crossed bootstrap, ten runs"] = {
        name: {
            kind: covered(world, 10, paired, args.boot, boot=500)
            for kind, paired in (("welch", False), ("paired", True))
        }
        for name, world in WORLDS.items()
    }
    result["sessions under a 3% floor"] = {
        f"gaps spread by {gap:.1%}, {runs} runs of the baseline": floors(gap, runs)
        for gap in (0.042, 0.01, 0.005)
        for runs in (3, 5)
    }
    path: Path = args.o
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
