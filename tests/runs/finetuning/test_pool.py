"""Runs side by side: the same results as one after the other, processes that die, and memory."""

from __future__ import annotations

import functools
import os
import signal

import pytest

from toolkit.errors import InputError, RunError
from toolkit.records.trained import Trained
from toolkit.runs import finetuning
from toolkit.runs.finetuning import pool as pools
from toolkit.runs.finetuning.pool import Pool

run = functools.partial(finetuning.run, device="cpu", dtype="float32", progress=False)


@pytest.mark.slow
def test_side_by_side_is_one_after_the_other_bit_for_bit(study, tmp_path, told, monkeypatch):
    """Also where a process is killed in the middle of a run."""
    one_by_one = run(study(), out=tmp_path / "serial")
    done, killed = Pool._done, []

    def kill(self, job, worker, message, bar):
        done(self, job, worker, message, bar)
        busy = [other for other in self._workers if other.job is not None]
        if busy and not killed:
            killed.append(busy[0].job.planned.run.name)
            os.kill(busy[0].process.pid, signal.SIGKILL)

    monkeypatch.setattr(Pool, "_done", kill)
    side_by_side = run(study(), out=tmp_path / "workers", workers=2)
    assert killed and told(side_by_side) == told(one_by_one)


@pytest.mark.slow
def test_a_process_that_dies_again_costs_its_run_only(study, monkeypatch, capsys):
    given = []

    def kill(self, pending):
        give(self, pending)
        for worker in self._workers:
            if worker.job is not None and worker.job.planned.run.name == "sums--top--seed0":
                os.kill(worker.process.pid, signal.SIGKILL)
                given.append(worker.process.pid)

    give = Pool._give
    monkeypatch.setattr(Pool, "_give", kill)
    results = run(study(seeds=1), workers=2)
    found = {p.parent.name: Trained.load(p) for p in results.glob("runs/*/report.json")}
    assert [name for name, report in found.items() if not report.finished] == ["sums--top--seed0"]
    (flag,) = found["sums--top--seed0"].flags
    assert flag.check == "process-died" and "signal 9" in flag.reason
    assert len(set(given)) == 2 and "marked, and the study goes on" in capsys.readouterr().err
    assert len(found) == 4


@pytest.mark.slow
def test_an_error_that_is_everyones_ends_the_study(study, monkeypatch):
    """A model that no process can read any more."""
    monkeypatch.setattr(pools, "work", _broken)
    with pytest.raises(RunError, match="the disk is full"):
        run(study(seeds=1), workers=2)


def _broken(pipe, setup, threads, parent):
    pipe.send(("failed", RunError, "the disk is full"))


class _Runner:
    def __init__(self, **facts):
        self.__dict__.update(facts)


def job(arm, alone=False):
    planned = _Runner(run=_Runner(arm=arm, task="sums", name=arm))
    return pools._Job(planned, alone=alone)


@pytest.fixture
def memory():
    """A pool that starts nothing: four processes on one device with 100 bytes free, of which 90 are given."""
    pool = Pool(None, ["cpu"], 4)
    pool._free["cpu"] = 100
    pool._workers = [pools._Worker(None, None, "cpu", ready=True) for _ in range(4)]
    return pool


def test_unknown_runs_get_their_share(memory):
    for worker in memory._workers[:3]:
        assert memory._fits(job("a"), "cpu")
        worker.job = job("a")
    assert memory._fits(job("a"), "cpu")


def test_measured_runs_fill_the_memory(memory):
    memory._measured["large", "sums"] = 40
    memory._workers[0].job = job("large")
    assert memory._fits(job("large"), "cpu")  # 2 · 42 ≤ 90
    memory._workers[1].job = job("large")
    assert not memory._fits(job("large"), "cpu")
    assert not memory._fits(job("unknown"), "cpu")  # a share is 22.5
    memory._measured["small", "sums"] = 5
    assert memory._fits(job("small"), "cpu")  # 84 + 5.25 ≤ 90


def test_a_run_that_takes_more_than_its_share_is_counted_as_it_is(memory):
    memory._workers[0].job, memory._workers[0].peak = job("a"), 80
    assert not memory._fits(job("b"), "cpu")


def test_the_first_run_of_a_device_always_fits_and_one_alone_stays_alone(memory):
    memory._measured["huge", "sums"] = 1000
    assert memory._fits(job("huge"), "cpu")
    memory._workers[0].job = job("a")
    assert not memory._fits(job("b", alone=True), "cpu")
    memory._workers[0].job = job("a", alone=True)
    assert not memory._fits(job("b"), "cpu")


def test_a_gpu_is_the_only_one_that_its_process_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert pools._only("cuda:1") == "cuda:0" and os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pools._only("cuda:1") == "cuda:0" and os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert pools._only("cpu") == "cpu" and os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_component_that_no_other_process_can_read_is_refused(study, tmp_path, monkeypatch):
    from toolkit.registry import registry

    made = registry.make("task", "arithmetic(largest=10)")
    local = type("Local", (type(made),), {"name": "local", "__doc__": "Of this function."})(largest=10)
    make = registry.make
    monkeypatch.setattr(registry, "make", lambda kind, key, *a: local if kind == "task" else make(kind, key, *a))
    with pytest.raises(InputError, match="worker processes do not see"):
        run(study(), out=tmp_path / "results", workers=2)
