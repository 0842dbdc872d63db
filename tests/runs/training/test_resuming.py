"""A killed run goes on to the same bits; a torn checkpoint is not taken; another run's is refused."""

import csv
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from toolkit.errors import InputError, RunError
from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import train
from toolkit.runs.training.checkpoints import STATE, found

LEVERS = Levers(batch=4, accumulation=2, steps=20, learning_rate=1e-2, dropout=0.2, warmup=0.1, checkpointing=True)

KILLED = """
import os, pathlib, runpy, signal, sys
from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import checkpoints, train

here, folder, levers, way = sys.argv[1:]
tests = runpy.run_path(here)
model = tests["built"]("nf4", {1, 3})
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
if way == "step":  # in the middle of a backward-to-be: step 13, its second micro-batch
    passes = [0]
    def hook(*_):
        passes[0] += 1
        if passes[0] == 2 * 12 + 2:
            die()
    model.get_base_model().lm_head.register_forward_hook(hook)
else:  # while a checkpoint is written: the adapters are there, the state is not
    write = checkpoints._write
    checkpoints._write = lambda trainer, folder: (write(trainer, folder), (folder / checkpoints.STATE).unlink(), die())
train(model, tests["examples"](), Levers.model_validate_json(levers), Seeds.all(5), folder=folder, pad=0,
      progress=False, save_steps=5)
"""


def killed(here, folder, way, levers=LEVERS):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(here), str(folder), levers.model_dump_json(), way],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,  # as many threads as here, which the bits depend on
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def curve(path):
    """Without its seconds."""
    return [row[:-1] for row in csv.reader(path.open())]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(arm, rows, adapters, here, tmp_path):
    whole = arm("nf4", {1, 3})
    expected = train(whole, rows(), LEVERS, Seeds.all(5), folder=tmp_path / "whole", pad=0, progress=False)
    assert expected.finished and not found(tmp_path / "whole")
    folder = tmp_path / "killed"
    killed(here, folder, "step")
    assert [path.name for path in found(folder)] == ["checkpoint-10"]
    assert len(curve(folder / "curve.csv")) == 1 + 12  # two steps more than the checkpoint knows
    killed(here, folder, "saving")
    assert [path.name for path in found(folder)] == ["checkpoint-10"]
    assert (folder / ".checkpoint-15.partial" / "adapters.safetensors").is_file()
    model = arm("nf4", {1, 3})
    outcome = train(model, rows(), LEVERS, Seeds.all(5), folder=folder, pad=0, progress=False)
    assert outcome.finished and outcome.course.resumed == 1  # the second part died before it had saved anything
    assert outcome.course.steps == 20
    assert outcome.course.first_loss == expected.course.first_loss
    assert outcome.course.last_loss == expected.course.last_loss
    assert curve(outcome.curve) == curve(expected.curve)
    for name, value in adapters(whole).items():
        assert torch.equal(adapters(model)[name], value), name
    assert not list(folder.glob("*checkpoint*")) and not list(folder.glob(".checkpoint*"))


class Ended(Exception):
    """What ends a run from inside."""


def stop_at(model, passes):
    """Raise in the n-th forward pass."""
    count = [0]

    def hook(*_):
        count[0] += 1
        if count[0] == passes:
            raise Ended

    model.get_base_model().lm_head.register_forward_hook(hook)
    return model


@pytest.fixture
def interrupted(arm, rows, tmp_path):
    """A folder with the checkpoint of step 4 of 6."""
    levers = Levers(batch=4, accumulation=1, steps=6)
    with pytest.raises(Ended):
        train(stop_at(arm(), 6), rows(), levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False, save_steps=2)
    assert [path.name for path in found(tmp_path)] == ["checkpoint-4"]
    return levers


def test_only_what_is_trained_is_saved_and_nothing_pickled(interrupted, tmp_path):
    files = sorted(path.name for path in (tmp_path / "checkpoint-4").iterdir())
    assert all(name.endswith((".json", ".safetensors")) for name in files)
    assert "adapters.safetensors" in files and "optimizer.safetensors" in files


@pytest.mark.parametrize("harm", ["state", "size", "json", "list", "types", "header", "curve", "no curve"])
def test_a_torn_checkpoint_is_not_taken(arm, rows, adapters, interrupted, tmp_path, harm):
    """It cannot come about by a kill; a disk can still lose a file's end."""
    folder = tmp_path / "checkpoint-4"
    if harm == "state":
        (folder / STATE).unlink()
    elif harm == "size":
        path = folder / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-7])
    elif harm == "curve":  # a torn line in its middle, and bytes that are no text
        path = tmp_path / "curve.csv"
        path.write_bytes(path.read_bytes()[:60] + b"\xff\xfe")
    elif harm == "no curve":
        (tmp_path / "curve.csv").unlink()
    elif harm == "header":
        path = folder / "adapters.safetensors"
        path.write_bytes(bytes(path.stat().st_size))
    else:
        text = {"json": (folder / STATE).read_text()[:-30], "list": "[]", "types": '{"files": {}, "identity": 5}'}
        (folder / STATE).write_text(text[harm])
    model = arm()
    outcome = train(model, rows(), interrupted, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert outcome.finished and outcome.course.resumed == 0
    assert len(curve(outcome.curve)) == 1 + 6
    whole = arm()
    train(whole, rows(), interrupted, Seeds.all(0), folder=tmp_path / "whole", pad=0, progress=False)
    assert all(torch.equal(adapters(model)[name], value) for name, value in adapters(whole).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levers": {"learning_rate": 1e-3}}, "other levers .*learning_rate: 0.0003, and 0.001 now"),
        ({"seeds": Seeds.all(1)}, "other seeds"),
        ({"data": 49}, "other data"),
        ({"adapted": {2}}, "other trained"),
    ],
)
def test_another_runs_checkpoint_is_refused(arm, rows, interrupted, tmp_path, change, message):
    levers = interrupted.model_copy(update=change.get("levers", {}))
    seeds, data = change.get("seeds", Seeds.all(0)), rows()[: change.get("data", 50)]
    with pytest.raises(InputError, match=message):
        train(arm("none", change.get("adapted")), data, levers, seeds, folder=tmp_path, pad=0, progress=False)
    assert found(tmp_path)  # nothing was lost


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(arm, rows, interrupted, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("toolkit.runs.training.checkpoints._flush", full)
    with pytest.raises(RunError, match="checkpoint-5: No space left on device; those before it stay"):
        train(arm(), rows(), interrupted, Seeds.all(0), folder=tmp_path, pad=0, progress=False, save_steps=5)
    monkeypatch.undo()
    assert [path.name for path in found(tmp_path)] == ["checkpoint-4"]
    outcome = train(arm(), rows(), interrupted, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert outcome.finished and outcome.course.resumed == 1


def test_checkpoints_come_by_the_clock_too(arm, rows, tmp_path):
    with pytest.raises(Ended):
        train(
            stop_at(arm(), 4),
            rows(),
            Levers(batch=4, accumulation=1, steps=6),
            Seeds.all(0),
            folder=tmp_path,
            pad=0,
            progress=False,
            save_seconds=0.0,
        )
    state = json.loads((tmp_path / "checkpoint-3" / STATE).read_text())
    assert state["step"] == 3 and state["position"]["seconds"] > 0


def test_a_file_where_the_runs_folder_should_be_is_named(arm, rows, tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunError, match=r"cannot make the run's folder .*run: File exists"):
        train(arm(), rows(), LEVERS, Seeds.all(0), folder=tmp_path / "run", pad=0, progress=False)
    assert (tmp_path / "run").read_text() == "mine"
