"""Studies of the runner's tests: written on demand, and measurements that can be counted and stopped."""

from __future__ import annotations

import hashlib
import json

import pytest
import yaml

from toolkit.runs.texts.evaluation import Evaluation


@pytest.fixture
def measurements(monkeypatch):
    """Counts measurements, and stops before the one whose number is set as `stop`."""

    class Counter:
        count, stop, error = 0, None, KeyboardInterrupt

    measure = Evaluation.measure

    def counted(self, *arguments):
        if Counter.count == Counter.stop:
            raise Counter.error
        Counter.count += 1
        return measure(self, *arguments)

    monkeypatch.setattr(Evaluation, "measure", counted)
    return Counter


@pytest.fixture(scope="session")
def other_text(tmp_path_factory):
    """A second text of 2,000 letters."""
    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_text("".join(chr(65 + (7 * i * i + i) % 26) for i in range(2000)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def facts():
    """Everything in a results folder but provenance, each rows file checked against its report."""

    def get(folder):
        found = {}
        for path in sorted(folder.glob("*/report.json")):
            data = json.loads(path.read_text(encoding="utf-8"))
            data.pop("provenance")
            found[path.parent.name] = data
            rows = path.parent / data["rows"]["file"]
            assert hashlib.sha256(rows.read_bytes()).hexdigest() == data["rows"]["sha256"]
        return found

    return get


@pytest.fixture(scope="session")
def put():
    """Write a study into a folder."""

    def to(folder, data):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "study.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
        return folder

    return to
