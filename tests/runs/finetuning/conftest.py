"""A very small study, and what its results hold."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
import yaml

from toolkit.records.finetuning import FineTuning
from toolkit.weights.profiling import profile as measure

STUDY = {
    "kind": "fine-tuning",
    "name": "tiny",
    "question": "Does it run?",
    "tasks": {"sums": {"task": "arithmetic(largest=10)", "train_rows": 24, "rows": 16}},
    "arms": [
        {"name": "qlora"},
        {"name": "top", "protect": {"selector": "top-error", "budget": "layers=0.2"}},
        {"name": "drawn", "protect": {"selector": "random-matched(within=0.5)", "like": "top"}},
    ],
    "levers": {"steps": 3, "batch": 4, "accumulation": 1, "length": 64, "rank": 2, "learning_rate": 0.01},
    "seeds": 2,
    "repeats": None,
    "analysis": {"baseline": "qlora"},
}


@pytest.fixture(scope="session")
def model(checkpoints):
    """Folder of the model."""
    return checkpoints("llama", torch.float32)


@pytest.fixture
def declared(model):
    """The study as a record; changes as keywords."""

    def make(**changes):
        return FineTuning.model_validate(STUDY | {"model": str(model)} | changes)

    return make


@pytest.fixture
def study(tmp_path, model):
    """Write the study; changes as keywords."""

    def write(**changes):
        folder = tmp_path / "study"
        folder.mkdir(exist_ok=True)
        text = yaml.safe_dump(STUDY | {"model": str(model)} | changes)
        (folder / "study.yaml").write_text(text, encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def profile(model):
    """The profile of the model."""
    return measure(str(model), ["nf4"], progress=False)


def facts(folder):
    """Every report of a results folder but what depends on the moment, each rows file checked against its report."""
    found = {}
    for path in sorted((folder / "runs").glob("*/report.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        data.pop("provenance")
        for key in ("seconds", "resumed", "paused"):
            data["course"].pop(key)
        if "rows" in data:
            rows = path.parent / data["rows"]["file"]
            assert hashlib.sha256(rows.read_bytes()).hexdigest() == data["rows"]["sha256"]
        found[path.parent.name] = data
    return found


@pytest.fixture(scope="session")
def told():
    return facts
