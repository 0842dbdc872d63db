"""Studies on disk for the analysis tests, made by `builders.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def _load(name="builders"):
    spec = importlib.util.spec_from_file_location(f"analysis_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def builders():
    """The module that writes studies."""
    return _load()


@pytest.fixture(scope="session")
def trained():
    """The module that writes fine-tuning studies."""
    return _load("trained_builders")


@pytest.fixture
def made(trained, tmp_path):
    """Keyword arguments of `study` → a builder of that fine-tuning study in a folder of its own."""

    def make(name: str = "study", *, rows: int = 60, values=None, **study):
        return trained.Builder(tmp_path / name, trained.study(**study), rows=rows, values=values)

    return make


@pytest.fixture
def builder(builders, tmp_path):
    """Keyword arguments of `make_study` → a builder of that study in a folder of its own."""

    def make(name: str = "study", **study):
        return builders.Builder(tmp_path / name, builders.make_study(**study))

    return make


@pytest.fixture(scope="session")
def whole(builders, tmp_path_factory):
    """A finished study of two budgets and two texts, with rows; it is only read."""
    study = builders.make_study(draws=24, budgets=("layers=0.1", "layers=0.2"), texts=("python-topics", "wikitext2"))
    made = builders.Builder(tmp_path_factory.mktemp("whole") / "study", study)
    made.write(rows=True)
    return made


@pytest.fixture(scope="session")
def full(builders, tmp_path_factory):
    """A finished and locked study with every kind of run and the real laws' draws; it is only read."""
    study = builders.make_full_study(texts=("python-topics", "wikitext2"))
    made = builders.Builder(tmp_path_factory.mktemp("full") / "study", study, real=True, windows=16)
    made.seal()
    made.write(rows=True)
    study.save(made.results / "study.json")
    return made


@pytest.fixture(scope="session")
def certify_small(builders, tmp_path_factory):
    """Keyword arguments → a small locked study with the real laws' draws, and its certificate's file; only read."""
    from toolkit.analysis.certificates.certifying import certify

    def make(*, lock: bool = True, seed: int = 0, fingerprint: str | None = None, **study):
        controls = [law | {"draws": 9} for law in builders.LAWS if "shuffle" not in law["selector"]]
        controls.append({"selector": "random-count", "name": "count-matched", "draws": 7, "like": ["top-error"]})
        given = {"budgets": ("layers=0.1", "layers=0.2"), "texts": ("python-topics", "wikitext2"), "controls": controls}
        declared = builders.make_full_study(**given | study)
        folder = tmp_path_factory.mktemp("certified") / "study"
        made = builders.Builder(folder, declared, real=True, windows=6, blocks=6, seed=seed)
        if fingerprint is not None:
            made.profile = builders.make_profile(6, fingerprint=fingerprint)
        if lock:
            made.seal()
        made.write(rows=True)
        declared.save(made.results / "study.json")
        certify(made.folder, folder.parent / "control.json")
        return made, folder.parent / "control.json"

    return make


@pytest.fixture(scope="session")
def certified(certify_small):
    """A small certified study and its certificate's file; they are only read."""
    return certify_small()
