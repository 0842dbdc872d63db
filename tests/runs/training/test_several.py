"""The same run on two processes, started by torchrun unchanged: the same steps, the first one writes."""

import csv
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import train

LEVERS = Levers(batch=4, accumulation=2, epochs=1, learning_rate=1e-2, checkpointing=True)

RUN = """
import os, pathlib, runpy, sys
from safetensors.torch import save_file
from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import Pacing, train

here, folder, levers = sys.argv[1:]
folder = pathlib.Path(folder)
tests = runpy.run_path(here)
model = tests["built"]("nf4", {1, 3})
rank = os.environ["RANK"]
outcome = train(model, tests["examples"](52), Levers.model_validate_json(levers), Seeds.all(5), folder=folder, pad=0,
                save_steps=3, name="two", pacing=Pacing(stop_file=folder / "stop"))
(folder / f"outcome-{rank}").write_text(f"{outcome.finished} {outcome.course.steps} {outcome.course.last_loss!r}")
save_file({n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, folder / f"{rank}.safetensors")
"""


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(arm, rows, adapters, here, tmp_path):
    """13 micro-batches, 7 steps; the last holds one, of which the second process gets none."""
    (tmp_path / "run.py").write_text(RUN)
    folder = tmp_path / "two"
    folder.mkdir()
    done = subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            *[str(tmp_path / "run.py"), str(here), str(folder), LEVERS.model_dump_json()],
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model = arm("nf4", {1, 3})
    outcome = train(model, rows(52), LEVERS, Seeds.all(5), folder=tmp_path / "one", pad=0, progress=False)
    assert outcome.course.steps == 7
    one, two = (list(csv.DictReader((tmp_path / name / "curve.csv").open())) for name in ("one", "two"))
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for key in ("loss", "gradient_norm", "learning_rate", "target_tokens"):
        assert [float(line[key]) for line in two] == pytest.approx([float(line[key]) for line in one], rel=1e-4)
    ranks = [load_file(folder / f"{rank}.safetensors") for rank in "01"]
    for name, value in adapters(model).items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], value, rtol=1e-3, atol=1e-4)
    for rank in "01":
        finished, steps, loss = (folder / f"outcome-{rank}").read_text().split()
        assert (finished, steps) == ("True", "7")
        assert float(loss) == pytest.approx(outcome.course.last_loss, rel=1e-4)
    assert done.stderr.count("two, loss") == 1
    assert not list(folder.glob("*checkpoint*"))


REFUSED = """
import runpy, sys
from toolkit.errors import InputError
from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import train
tests = runpy.run_path(sys.argv[1])
try:
    train(tests["built"]("none", {3}), tests["examples"](), Levers(batch=4, accumulation=3), Seeds.all(0),
          folder=sys.argv[2], pad=0)
except InputError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_an_accumulation_that_does_not_divide_is_refused(here, tmp_path):
    (tmp_path / "run.py").write_text(REFUSED)
    done = subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            *[str(tmp_path / "run.py"), str(here), str(tmp_path / "out")],
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stdout.count("accumulation 3 does not divide among 2 processes") == 2, done.stderr[-2000:]
