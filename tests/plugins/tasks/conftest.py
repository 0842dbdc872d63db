"""Real rows, which stay outside the project."""

import gzip
import json
from pathlib import Path

import pytest

from toolkit.registry import registry

DATA = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.fixture(scope="session")
def data():
    """The folder of the real rows."""
    if not DATA.is_dir():
        pytest.skip("needs the real rows in ../shared/data")
    return DATA


@pytest.fixture(scope="session")
def rows(data):
    """name, split → rows."""

    def get(name, split):
        with gzip.open(data / name / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    return get


@pytest.fixture
def task():
    return lambda key: registry.make("task", key)
