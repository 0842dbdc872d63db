"""docs/statistics.md: its block runs, and its figures are those of the committed simulation."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "benchmarks" / "results" / "seeds.json").read_text())
RUNS = ("3", "4", "6", "10")


def test_the_block_runs_and_finds_the_difference(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(block, names)
    found = names["found"]
    assert found.both.low < -0.05 < found.both.high and found.attainable == pytest.approx(2 / 924)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_coverage_is_as_the_page_says():
    """93–97% everywhere but where a shared part was not declared; the percentile bootstrap at 85 and 81%."""
    for name, kinds in FOUND["crossed"].items():
        for kind, covered in kinds.items():
            if (name, kind) == ("seeds add alike to both arms", "welch"):
                assert all(round(covered[n], 2) >= 0.99 for n in RUNS)
            else:
                assert all(0.93 <= covered[n] <= 0.97 for n in RUNS), (name, kind)
    for name, kinds in FOUND["crossed bootstrap, ten runs"].items():
        for kind, covered in kinds.items():
            assert 0.93 <= covered <= (1 if (name, kind) == ("seeds add alike to both arms", "welch") else 0.97)
    alone = FOUND["seeds"]["nothing is shared"]
    assert all(0.93 <= alone[n][kind] <= 0.97 for n in RUNS for kind in ("welch", "paired t"))
    assert round(alone["4"]["percentile bootstrap, two arms"], 2) == 0.85
    assert round(alone["4"]["percentile bootstrap, pairs"], 2) == 0.81


def test_floors_are_as_the_page_says():
    floors = FOUND["sessions under a 3% floor"]
    assert (
        f"in {floors['gaps spread by 4.2%, 3 runs of the baseline']['one gap']:.0%} of sessions, the bound in " in PAGE
    )
    shares = [
        floors[f"gaps spread by {gap}, {runs} runs of the baseline"]["upper bound"]
        for gap, runs in (("4.2%", 3), ("1.0%", 3), ("1.0%", 5))
    ]
    assert [f"{share:.0%}" for share in shares] == ["3%", "38%", "66%"]
