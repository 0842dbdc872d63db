"""Studies of starts on small models."""

from __future__ import annotations

import pytest
import yaml


def declared(**changes) -> dict:
    """A study of a plain and a fitted arm at two scalings."""
    study = {
        "kind": "initialization",
        "name": "starts",
        "question": "Does a fitted start lose less?",
        "tokens": 512,
        "window": 64,
        "batch": 3,
        "rank": 4,
        "scalings": [0.5, 4.0],
        "arms": [{"name": "plain"}, {"name": "fitted", "initializer": "loftq(iterations=2)"}],
        "analysis": {"baseline": "plain", "resamples": 400},
    }
    return study | changes


@pytest.fixture
def study(tmp_path, checkpoints, text_file):
    """Write a study into a folder of its own, with changes; the folder."""
    numbers = iter(range(1000))

    def write(family: str = "llama", **changes):
        folder = tmp_path / f"study{next(numbers)}"
        folder.mkdir()
        data = declared(model=str(checkpoints(family)), texts={"letters": str(text_file)}) | changes
        (folder / "study.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def other_text(tmp_path_factory):
    """A second text of 2,000 letters."""
    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_text("".join(chr(65 + (7 * i * i + i) % 26) for i in range(2000)), encoding="utf-8")
    return path
