"""The small form of the training benchmark: every variant runs, and its result says what a reader needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_small_form_times_ours_and_the_loops_in_one_session(tmp_path):
    path = tmp_path / "training.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "training.py"), "--small", "--rounds", "3", "-o", str(path)]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found["failed"] == {} and json.loads(done.stdout) == found
    assert set(found["variants"]) >= {"by hand, bf16", "by hand, NF4", "ours, bf16", "ours, NF4"}
    assert sum(name.startswith("by hand, NF4") for name in found["variants"]) == 3  # the floor's duplicates
    for one in found["variants"].values():
        times = one["ms a step, rounds"]
        assert len(times) == 3 and sorted(times)[1] == pytest.approx(one["ms a step, median"], rel=1e-3)
        assert one["tokens/s, median"] == pytest.approx(2 * 16 * 1e3 / one["ms a step, median"], rel=1e-2)
    for ours in ("ours, bf16", "ours, NF4"):
        told = found["against the loops"][ours]
        assert told["allowed"] == pytest.approx(max(0.05, told["floor"]), abs=1e-3)
        expected = told["speed over the loop's, paired"] >= 1 / (1 + told["allowed"])
        assert told["not slower than allowed"] is expected
        assert sum(found["variants"][ours]["where a step goes"].values()) == pytest.approx(1, abs=0.01)
