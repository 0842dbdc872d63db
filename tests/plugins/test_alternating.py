"""A stranger's plug-in, installed as a distribution of its own, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "plugins" / "alternating_selector"
SHOW = """
import json, sys
import toolkit as tk
from toolkit.records.profile import LayerProfile, Profile, Reference
from toolkit.registry import registry
found = registry.of_kind("selector")
same = dict(tensor="t", role="r", shape=(2, 3), parameters=6, bytes=12, norm=1, density=1)
rows = [LayerProfile(name=f"l{i}", block=i, **same) for i in range(6)]
profile = Profile(model="m", fingerprint="f", reference=Reference(dtype="float16", note=""), blocks=6, layers=rows)
print(json.dumps({
    "sources": {name: source for name, (_, source) in found.items()},
    "failures": registry.failures,
    "layers": {str(b): tk.select("alternating", profile, b).layers for b in ("layers=0.4", "layers=0.6", "bytes=30")}
    if "alternating" in found else None,
}))
"""


def install(source: Path, target: Path) -> None:
    """`pip install` from a folder into a folder, without a network."""
    copy = target.parent / f"source-of-{target.name}"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(target), str(copy)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


def python(folders: list[Path], code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=environment, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("alternating") / "site"
    install(SOURCE, target)
    return target


def stranger(folder: Path, name: str, module: str) -> Path:
    """An installed distribution of one module, written as pip leaves it."""
    information = folder / f"{name.replace('-', '_')}-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[toolkit.plugins]\nit = {name.replace('-', '_')}\n")
    (folder / f"{name.replace('-', '_')}.py").write_text(module)
    return folder


@pytest.mark.slow
def test_it_is_listed_and_selects(installed):
    done = python([installed], SHOW)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sources"]["alternating"] == "alternating-selector"
    assert found["sources"]["top-error"] != "alternating-selector" and found["failures"] == {}
    assert found["layers"] == {
        "layers=0.4": ["l0", "l2", "l4"],
        "layers=0.6": ["l0", "l1", "l2", "l4"],
        "bytes=30": ["l0", "l2"],
    }


def test_it_is_a_short_plugin():
    lines = (SOURCE / "alternating_selector.py").read_text().splitlines()
    body = lines[lines.index("class Alternating(RankingSelector):") :]
    assert len([line for line in body if line.strip()]) <= 10


@pytest.mark.slow
def test_two_of_one_name_name_both_distributions(installed, tmp_path):
    module = (SOURCE / "alternating_selector.py").read_text()
    other = stranger(tmp_path / "other", "copied-selector", module)
    done = python([installed, other], SHOW)
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    assert "two selectors are called 'alternating'" in message
    assert "alternating-selector" in message and "copied-selector" in message


@pytest.mark.slow
def test_one_that_does_not_import_is_named_and_the_rest_work(installed, tmp_path):
    broken = stranger(tmp_path / "broken", "broken-selector", "import a_module_that_nobody_has\n")
    done = python([broken, installed], SHOW)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["failures"]) == ["broken-selector"]
    assert "a_module_that_nobody_has" in found["failures"]["broken-selector"]
    assert "broken-selector" in done.stderr and "Traceback" not in done.stderr
    assert found["layers"]["layers=0.4"] == ["l0", "l2", "l4"] and "top-error" in found["sources"]


@pytest.mark.slow
def test_it_is_an_arm_of_a_study(installed, checkpoints, text_file, tmp_path):
    study = {
        "name": "with-a-stranger",
        "question": "Does a stranger's selector run?",
        "window": 64,
        "tokens": 128,
        "budgets": ["layers=0.2"],
        "arms": [{"selector": "top-error"}, {"selector": "alternating"}],
        "controls": [{"selector": "random-count", "draws": 2}],
        "analysis": {"control": "random-count"},
    }
    (tmp_path / "study.yaml").write_text(json.dumps(study))  # JSON is YAML
    arguments = [
        "run",
        tmp_path / "study.yaml",
        "--model",
        checkpoints(),
        "--text",
        f"t={text_file}",
        "--out",
        tmp_path,
    ]
    done = python([installed], f"from toolkit.cli import main; raise SystemExit(main({[str(a) for a in arguments]}))")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "layers-0.2--alternating" / "report.json").read_text())
    names = json.loads((tmp_path / "profile.json").read_text())["layers"]
    assert report["selection"]["layers"] == [layer["name"] for layer in names][:10:2]  # K = ⌈.2 × 21⌉ = 5
    shown = python([installed], f"from toolkit.cli import main; main(['table', {str(tmp_path)!r}])")
    assert "| alternating" in shown.stdout
