"""The small form of the training benchmark: every variant runs, and its result says what a reader needs."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def training(monkeypatch):
    """The benchmark as a module; its neighbours are found beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("training")


@pytest.mark.slow
def test_the_small_form_times_ours_and_the_loops_in_one_session(tmp_path):
    path = tmp_path / "training.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "training.py"), "--small", "--rounds", "3", "-o", str(path)]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found["failed"] == {} and json.loads(done.stdout) == found
    assert found["rounds"] == found["rounds asked for"] == 3
    told = found["seconds of each stage"]
    assert {f"round {number} of 3" for number in (1, 2, 3)} < set(told) and min(told.values()) >= 0
    assert sum(name.startswith("making ") for name in told) == 2 + len(found["variants"])
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


class Cut(Exception):
    """As a machine that is taken away."""


@pytest.mark.slow
def test_a_cut_session_leaves_its_whole_rounds(tmp_path, training):
    """Each round is saved with how many there are; a floor of three runs stands after the first."""
    path, saved = tmp_path / "training.json", []

    def save(found):
        training.write_json(path, found)
        saved.append(found["rounds"])
        if len(saved) == 2:
            raise Cut

    shape = training.Shape(training.SMALL, 2, 16, 4, 2)
    with pytest.raises(Cut):
        training.measure(
            shape,
            torch.device("cpu"),
            seconds=0.0,
            count=3,
            compiled=False,
            seed=0,
            say=lambda *a, **b: None,
            save=save,
        )
    found = json.loads(path.read_text())
    assert saved == [1, 2] and found["rounds"] == 2 and found["rounds asked for"] == 3
    assert all(len(one["ms a step, rounds"]) == 2 for one in found["variants"].values())
    assert "verdict" in found["against the loops"]["ours, NF4"]


def test_a_copied_base_computes_as_the_one_it_is_copied_from(tmp_path, training):
    """Dense and NF4; and the copy shares no storage, so that what it adds to the memory is its own."""
    session = training.Session(training.Shape(training.SMALL, 2, 16, 4, 2), torch.device("cpu"), tmp_path)
    for nf4 in (False, True):
        first, second = session.base(nf4=nf4), session.base(nf4=nf4)
        with torch.no_grad():
            assert torch.equal(first(session.ids[0]).logits, second(session.ids[0]).logits)
        held = [{p.data_ptr() for p in model.parameters()} for model in (first, second)]
        assert held[0].isdisjoint(held[1])
        packed = sum(p.dtype == torch.uint8 for p in first.parameters())
        assert packed == (2 * 7 if nf4 else 0)


def test_layers_made_without_weights_hold_what_bitsandbytes_own_making_gives(training):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(128, 192, bias=False, dtype=torch.bfloat16)})
    weight = model["up"].weight.detach().clone()
    training.to_nf4(model, torch.device("cpu"))
    expected, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert torch.equal(model["up"].weight.data, expected)
    read = bnb.functional.dequantize_4bit(model["up"].weight.data, model["up"].weight.quant_state)
    assert torch.equal(read, bnb.functional.dequantize_4bit(expected, state))
