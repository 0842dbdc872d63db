"""CUDA graphs: replayed steps are the plain ones, shape by shape, and what cannot be captured is said."""

import random

import pytest
import torch

from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.runs import adapters
from toolkit.runs.building import build
from toolkit.runs.tasks.encoding import Encoded
from toolkit.runs.training import train
from toolkit.runs.training.batches import COARSE, IGNORED, collate, schedule
from toolkit.runs.training.graphs import refused


def rows(count: int = 96, seed: int = 0) -> list[Encoded]:
    """Rows of 10 to 90 tokens, the last 1 to 5 of them targets."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        length, targets = chance.randint(10, 90), chance.randint(1, 5)
        ids = tuple(chance.randint(1, 250) for _ in range(length))
        made.append(Encoded(ids, tuple(at >= length - targets for at in range(length))))
    return made


@pytest.mark.parametrize("count", [1, 8, 33])
def test_coarse_batches_hold_the_same_targets(count):
    data = rows(count)
    fine, coarse = collate(data, 0), collate(data, 0, coarse=True)
    width = coarse["input_ids"].shape[1]
    found = fine["targets"].numel()
    filled = {1: 64, 8: 64, 33: 128}[count]  # 1 to 5 targets a row
    assert width % COARSE == 0 and coarse["targets"].numel() == coarse["positions"].numel() == filled >= found
    kept = coarse["targets"] != IGNORED
    assert torch.equal(coarse["targets"][kept], fine["targets"])
    row, column = coarse["positions"][kept] // width, coarse["positions"][kept] % width
    assert torch.equal(row * fine["input_ids"].shape[1] + column, fine["positions"])
    plan = schedule(data, Levers(batch=64, accumulation=1, graphs=True), 0)
    assert plan.computed == [coarse["input_ids"].numel()]
    assert plan.waste(1) == pytest.approx(1 - sum(len(row.ids) for row in data) / fine["input_ids"].numel())


@pytest.mark.parametrize(
    ("checkpointing", "device", "processes", "scaled", "word"),
    [
        (False, "cpu", 1, False, "CUDA device"),
        (True, "cuda", 1, False, "random numbers"),
        (False, "cuda", 2, False, "exchange gradients"),
        (False, "cuda", 1, True, "loss scale"),
    ],
)
def test_what_cannot_be_captured_is_named(checkpointing, device, processes, scaled, word):
    assert word in refused(checkpointing, torch.device(device), processes, scaled)


def test_what_can_be_captured_is_not_refused():
    assert refused(False, torch.device("cuda"), 1, False) is None


def test_on_a_cpu_the_lever_is_named_as_without_effect(checkpoints, tmp_path):
    levers = Levers(batch=8, accumulation=1, steps=2, rank=2, graphs=True)
    model = build(checkpoints("llama"), Plan.protecting(None, "none", rank=2), device="cpu", dtype="float32")
    done = train(model, rows(16), levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert done.finished and done.course.replayed == 0
    assert [flag.check for flag in done.flags if flag.check == "not-graphed"] == ["not-graphed"]


@pytest.mark.gpu
@pytest.mark.parametrize(("base", "dtype"), [("none", "float32"), ("nf4", "bfloat16"), ("nvfp4", "bfloat16")])
@pytest.mark.parametrize("dora", [False, True])
def test_replayed_steps_are_the_plain_ones(checkpoints, tmp_path, base, dtype, dora):
    """Losses and adapters after 30 steps of several shapes, against the same run without graphs."""
    if dora and base != "none":
        pytest.skip("one base is enough for DoRA")
    ends, courses = {}, {}
    for graphs in (False, True):
        levers = Levers(batch=8, accumulation=2, steps=30, rank=4, learning_rate=1e-3, graphs=graphs)
        plan = Plan.protecting(None, base, rank=4, alpha=16, scaler="rslora", dora=dora)
        model = build(checkpoints("llama"), plan, device="cuda", dtype=dtype, seed=3)
        done = train(model, rows(), levers, Seeds.all(1), folder=tmp_path / str(graphs), pad=0, progress=False)
        assert done.finished, done.flags
        assert [flag.check for flag in done.flags if flag.check == "not-graphed"] == []
        ends[graphs] = {name: p.detach().float().cpu() for name, p in adapters.trainable(model).items()}
        courses[graphs] = done.course
    assert courses[False].replayed == 0 and courses[True].replayed > 30
    close = 1e-4 if dtype == "float32" else 2e-2
    assert courses[True].last_loss == pytest.approx(courses[False].last_loss, rel=close)
    assert courses[True].last_loss < courses[True].first_loss
    for name, plain in ends[False].items():
        moved = (plain - ends[True][name]).norm() / plain.norm().clamp_min(1e-6)
        assert moved < (2e-3 if dtype == "float32" else 0.15), name


@pytest.mark.gpu
def test_a_forward_that_waits_for_the_device_is_computed_plainly(checkpoints, tmp_path):
    levers = Levers(batch=8, accumulation=1, steps=12, rank=2, graphs=True)
    model = build(checkpoints("llama"), Plan.protecting(None, "none", rank=2), device="cuda", dtype="float32")
    embedding = model.get_base_model().get_input_embeddings()
    embedding.register_forward_hook(lambda module, given, out: out * float(out.abs().max().item() > -1))
    done = train(model, rows(), levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert done.finished and done.course.replayed == 0
    assert "not-graphed" in [flag.check for flag in done.flags]
