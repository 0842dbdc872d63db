"""The small form of the graphs' benchmark runs, and writes what it prints."""

import json
import runpy
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_small_form_times_one_base_with_and_without(checkpoints, tmp_path, capsys):
    path = tmp_path / "graphs.json"
    main = runpy.run_path(str(ROOT / "benchmarks" / "graphs.py"))["main"]
    main(["-o", str(path), "--model", str(checkpoints("llama")), "--small", "--rounds", "3", "--seconds", "0.01"])
    found = json.loads(path.read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert list(found["arms"]) == ["none", "none, CUDA graphs"]
    for one in found["arms"].values():
        assert (
            one["ms a step, median"] == statistics.median(one["ms a step, rounds"])
            and len(one["ms a step, rounds"]) == 3
        )
