"""Locks: what is sealed, when a lock is refused, and when reports carry it."""

from __future__ import annotations

import functools
import json
import shutil

import pytest

from toolkit.errors import InputError, RunError
from toolkit.records.lock import Lock
from toolkit.records.profile import Profile
from toolkit.records.report import PARTIAL, Report
from toolkit.records.study import Study
from toolkit.runs import locking, results
from toolkit.runs.ranking import runner, sealing
from toolkit.runs.ranking.sealing import lock

run = functools.partial(runner.run, dtype="float32", device="cpu", progress=False)

STUDY = {
    "name": "sealed",
    "question": "Was it declared before?",
    "tokens": 128,
    "window": 64,
    "batch": 2,
    "budgets": ["layers=0.2"],
    "arms": [{"selector": "top-error"}],
    "controls": [{"selector": "random-matched(within=0.2)", "name": "matched", "draws": 2}],
    "analysis": {"control": "matched"},
    "repeat": False,
    "small": {"controls": [{"selector": "random-count", "draws": 2, "name": "matched"}]},
}


@pytest.fixture
def study(tmp_path, checkpoints, text_file, put):
    data = STUDY | {"model": str(checkpoints()), "texts": {"letters": str(text_file)}}
    return lambda **changes: put(tmp_path / "study", data | changes)


def carried(folder):
    return {p.parent.name: Report.load(p).lock for p in folder.glob("*/report.json")}


def test_a_lock_holds_what_is_declared_and_with_what(study, text_file):
    import hashlib

    import numpy
    import torch
    import transformers

    import toolkit

    path = lock(study())
    assert path == study() / "results" / "lock.json"
    found = Lock.load(path)
    declared = Study.read(study())
    assert (found.analysis, found.declaration, found.form) == (declared.analysis, declared.declaration, "full")
    assert found.texts == {"letters": hashlib.sha256(text_file.read_bytes()).hexdigest()}
    assert found.code["toolkit"] == toolkit.__version__ and found.code["torch"] == torch.__version__
    assert (found.code["numpy"], found.code["transformers"]) == (numpy.__version__, transformers.__version__)
    assert {k for k in found.code if k.startswith("sources of")} == {"sources of toolkit", "sources of toolkit_plugins"}
    assert found.created.endswith("+00:00") and len(found.hash) == 64


def test_every_report_carries_the_hash(study, capsys):
    sealed = Lock.load(lock(study()))
    folder = run(study())
    assert carried(folder) == dict.fromkeys(
        ("reference--16-bit", "reference--base", "layers-0.2--top-error", "layers-0.2--top-error--matched"), sealed.hash
    )
    assert "exploratory" not in capsys.readouterr().err
    assert Profile.load(folder / "profile.json").fingerprint == sealed.fingerprint
    assert Study.load(folder / "study.json").declaration == sealed.declaration  # what the analysis compares


def test_locking_twice_keeps_the_first_also_after_the_run(study):
    path = lock(study())
    data = json.loads(path.read_text())
    data["created"] = "2020-01-01T00:00:00+00:00"
    path.write_text(json.dumps(data))
    assert lock(study()) == path and Lock.load(path).created.startswith("2020")
    run(study())
    assert lock(study()) == path and Lock.load(path).created.startswith("2020")


def test_no_lock_after_results(study, measurements):
    measurements.stop = 2
    with pytest.raises(KeyboardInterrupt):
        run(study())
    with pytest.raises(InputError, match=r"layers-0.2--top-error.report\.json exists: a lock made after results"):
        lock(study())
    folder = study() / "results"
    for path in folder.glob("*/report.json"):
        path.unlink()
    (folder / "x").mkdir()
    (folder / "x" / PARTIAL).write_text("")
    with pytest.raises(InputError, match=r"draws\.partial\.jsonl exists"):
        lock(study())


def test_without_a_lock_results_are_exploratory(study, capsys):
    folder = run(study())
    assert set(carried(folder).values()) == {None}
    assert "warning: exploratory: there is no lock.json; `toolkit lock` before the first run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"analysis": {"control": "matched", "level": 0.01}},
            "the analysis was changed after it was locked: level was 0.05 and is now 0.01",
        ),
        ({"seed": 3}, r"the study was changed after it was locked \(its arms, controls, texts, seed or settings\)"),
        ({"controls": [STUDY["controls"][0] | {"draws": 3}]}, "the study was changed"),
        ({"name": "other"}, r"lock\.json is of study 'sealed' \(full form\), and this is 'other'"),
    ],
)
def test_a_changed_study_is_exploratory_and_never_locked_anew(study, capsys, changes, message):
    import re

    lock(study())
    changed = study(**changes)
    with pytest.raises(InputError, match=rf"lock\.json locks something else: .*{message}"):
        lock(changed)
    folder = run(changed)
    assert set(carried(folder).values()) == {None}
    assert re.search(rf"warning: exploratory: .*{message}", capsys.readouterr().err)


def test_a_changed_text_is_exploratory(study, tmp_path, capsys):
    lock(study())
    other = tmp_path / "letters.txt"  # the same name, so that only its hash tells
    other.write_text("zyx" * 700)
    folder = run(study(), texts={"letters": str(other)})
    assert set(carried(folder).values()) == {None}
    assert "exploratory: text 'letters' is not the one that was locked" in capsys.readouterr().err


def test_the_same_text_and_model_in_other_folders_stay_locked(study, tmp_path, checkpoints, text_file):
    lock(study())
    model, text = tmp_path / "copies" / checkpoints().name, tmp_path / "copies" / text_file.name
    shutil.copytree(checkpoints(), model)
    shutil.copy(text_file, text)
    folder = run(study(), model=model, texts={"letters": str(text)})
    assert None not in carried(folder).values()


def test_changed_weights_are_exploratory(study, tmp_path, checkpoints, capsys):
    from safetensors.torch import load_file, save_file

    lock(study())
    model = tmp_path / "copies" / checkpoints().name
    shutil.copytree(checkpoints(), model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    folder = run(study(), model=model)
    assert set(carried(folder).values()) == {None}
    assert "exploratory: the weights are not those that were locked" in capsys.readouterr().err


def test_changed_code_is_exploratory_from_there_on(study, monkeypatch, measurements, capsys):
    """Runs that were finished under the locked code keep the hash."""
    sealed = Lock.load(lock(study()))
    measurements.stop = 2
    with pytest.raises(KeyboardInterrupt):
        run(study())
    measurements.stop = None
    sources = locking._sources
    monkeypatch.setattr(locking, "_sources", lambda p: "0" * 64 if p == "toolkit_plugins" else sources(p))
    found = carried(run(study()))
    assert "exploratory: code 'sources of toolkit_plugins' was " in capsys.readouterr().err
    assert found.pop("layers-0.2--top-error--matched") is None
    assert set(found.values()) == {sealed.hash}


def test_the_hash_of_a_package_is_that_of_its_sources(tmp_path, monkeypatch):
    sources = locking._sources.__wrapped__  # it is read once a process
    package = tmp_path / "locked_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "kernel.c").write_text("int f(void) { return 1; }")
    (tmp_path / "locked_module.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    first, module = sources("locked_package"), sources("locked_module")
    (package / "notes.txt").write_text("no source")
    assert sources("locked_package") == first
    (package / "inner" / "kernel.c").write_text("int f(void) { return 2; }")
    second = sources("locked_package")
    (package / "inner" / "kernel.c").rename(package / "kernel.c")
    assert len({first, second, sources("locked_package")}) == 3
    (tmp_path / "locked_module.py").write_text("x = 2\n")
    assert sources("locked_module") != module
    assert sources("__main__") is None


def test_a_selector_made_by_hand_is_locked_by_its_own_text(study, monkeypatch):
    """As in a notebook's cell, which is no installed package."""
    from toolkit.registry import registry

    class Mine(type(registry.make("selector", "depth"))):
        """Depth, under another name."""

        name = "made-by-hand"

    before = registry.make
    monkeypatch.setattr(registry, "make", lambda kind, key, *a: Mine() if key == Mine.name else before(kind, key, *a))
    monkeypatch.setattr(Mine, "__module__", "__main__")
    declared = Study.read(study(arms=[{"selector": "made-by-hand"}]))
    found = locking.code(sealing.components(declared))
    (own,) = [name for name in found if name.startswith("source of ")]
    assert own.startswith("source of __main__.") and own.endswith("Mine")
    assert len(found[own]) == 64 or found[own] == "not available"


def test_a_damaged_lock_is_said_and_not_replaced(study, capsys):
    path = lock(study())
    path.write_text("{]")
    with pytest.raises(InputError, match=r"lock\.json is not JSON"):
        lock(study())
    assert set(carried(run(study())).values()) == {None}
    assert "exploratory: " in capsys.readouterr().err


def test_forms_have_locks_of_their_own(study):
    full, small = lock(study()), lock(study(), small=True)
    assert small == study() / "results-small" / "lock.json"
    assert Lock.load(small).form == "small" and Lock.load(small).declaration != Lock.load(full).declaration
    assert Lock.load(lock(study(), small=True, out=study() / "else")).hash


def test_a_folder_in_use_is_not_locked(study):
    with results.locked(study() / "results"), pytest.raises(RunError, match="another process is writing"):
        lock(study())


def test_the_shell_prints_the_hash(study, capsys):
    from toolkit.cli import main

    assert main(["lock", str(study())]) == 0
    assert capsys.readouterr().out == Lock.load(study() / "results" / "lock.json").hash + "\n"
    run(study())
    (study() / "results" / "lock.json").unlink()
    assert main(["lock", str(study())]) == 2
    assert "a lock made after results would say nothing" in capsys.readouterr().err


def test_the_analysis_calls_locked_results_confirmatory(study):
    from toolkit.analysis.certificates import locks
    from toolkit.analysis.reading import reports

    sealed = Lock.load(lock(study()))
    found = locks.status(reports.read(run(study())))
    assert (found.confirmatory, found.reasons, found.hash) == (True, (), sealed.hash)
