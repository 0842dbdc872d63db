"""The small form of LoftQ's benchmark runs, and its figures are those of the traps: PEFT's leaves the scaling out."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from Linux's /proc")
def test_the_small_form(tmp_path):
    path = tmp_path / "loftq.json"
    main = runpy.run_path(str(ROOT / "benchmarks" / "loftq.py"))["main"]
    main(["-o", str(path), "--small", "--device", "cpu", "--blocks", "2", "--peft", "1"])
    found = json.loads(path.read_text())
    ratios = {row["s"]: row["residual over zero start"] for row in found["residuals"]}
    assert [ratios[s]["PEFT, 1 iteration"] for s in (1.0, 2.0, 5.66)] == pytest.approx([0.887, 1.0, 2.33], abs=5e-3)
    assert {ratios[s]["ours, 1 iteration"] for s in ratios} == {ratios[1.0]["PEFT, 1 iteration"]}
    timed = found["whole model"]
    assert "14 of 112 layers, 2 of 16 blocks" in timed["model"]
    ours, theirs = timed["methods"]["ours, 1 iteration"], timed["methods"]["PEFT, 1 iteration"]
    one = "residual over zero start, s = 1"  # ours is fitted to the base as bfloat16 rounds it
    assert ours[one] <= theirs[one] == pytest.approx(ours[one], rel=1e-4)
    assert ours["residual over zero start, s = 2"] == ours["residual over zero start, s = 1"] < 1
    assert theirs["residual over zero start, s = 2"] == pytest.approx(1.0, rel=1e-4)
    assert all(method["seconds"] > 0 for method in timed["methods"].values())
