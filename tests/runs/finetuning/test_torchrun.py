"""One model trained by two processes, as `torchrun` starts them: the run of one process, to rounding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from toolkit.records import rows as rows_file
from toolkit.records.trained import Trained
from toolkit.runs import finetuning


@pytest.mark.slow
def test_two_processes_train_what_one_trains(study, tmp_path):
    levers = {"steps": 3, "batch": 4, "accumulation": 2, "length": 64, "rank": 2, "learning_rate": 0.01}
    folder = study(
        levers=levers, seeds=1, arms=[{"name": "qlora"}, {"name": "loftq", "initializer": "loftq(iterations=2)"}]
    )
    alone = finetuning.run(folder, out=tmp_path / "alone", device="cpu", dtype="float32", progress=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "toolkit", "run", str(folder), "--device", "cpu", "--dtype", "float32"]
    command += ["--out", str(tmp_path / "together")]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gemm_4bit_forward" not in done.stderr  # of a kernel that is not used
    losses = []
    for results in (alone, tmp_path / "together"):
        found = {path.parent.name: Trained.load(path) for path in results.glob("runs/*/report.json")}
        assert set(found) == {"sums--qlora--untrained", "sums--qlora--seed0", "sums--loftq--seed0"}
        assert len(list(results.glob("starts/*/start.json"))) == 1  # the first process made it, both read it
        for report in (found["sums--qlora--seed0"], found["sums--loftq--seed0"]):
            assert report.finished and report.course.examples == 24
            rows = rows_file.read(results / "runs" / report.run / report.rows.file, report.rows, "report")
            losses.append(rows["nll"])
    assert losses[0] == pytest.approx(losses[2], rel=1e-3)
    assert losses[1] == pytest.approx(losses[3], rel=1e-3)
