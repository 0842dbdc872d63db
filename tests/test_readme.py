"""The README tells the truth: its table is what the command prints, its tree exists, its selector works."""

import json
import re
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.records.profile import LayerProfile, Profile, Reference

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_study_prints():
    shown = README.split("<!-- table: rows as printed -->")[1].split("<!-- /table -->")[0]
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    printed = tk.table(ROOT / "studies" / "ranking-control").splitlines()
    assert len(rows) > 30
    assert [row for row in rows if row not in printed] == []
    kept = (ROOT / "studies" / "ranking-control" / "table.md").read_text(encoding="utf-8").splitlines()
    assert kept == printed


def test_every_path_of_the_tree_exists():
    tree = README.split("## Where things are")[1].split("```")[1]
    folders: list[str] = []
    for line in filter(str.strip, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        for name in line.split("  ")[0].split() if depth == 0 else [line.split()[0]]:
            folders = [*folders[:depth], name]
            assert (ROOT / "".join(folders[:depth]) / name).exists(), line


def test_the_ten_line_selector_works():
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "hookimpl" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    scope: dict = {}
    exec(code, scope)
    (cls,) = scope["toolkit_components"]()
    wide = {"tensor": "t", "role": "r", "norm": 1, "density": 1, "parameters": 6, "bytes": 12}
    rows = [LayerProfile(name=f"l{i}", shape=shape, **wide) for i, shape in enumerate([(2, 3), (6, 1), (3, 2)])]
    profile = Profile(model="m", fingerprint="f", reference=Reference(dtype="float16", note=""), blocks=0, layers=rows)
    assert tk.select(cls(), profile, "layers=0.5").layers == ["l1", "l2"]


def test_the_ten_line_task_works(tmp_path):
    from toolkit.runs.tasks import read

    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "tk.Task" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    scope: dict = {}
    exec(code, scope)
    rows = [{"text": "A joy.", "good": True}, {"text": "A mess.", "good": 0}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = read(scope["Reviews"](), "test", source=str(tmp_path)).examples
    assert {(e.prompt, e.target) for e in found} == {
        ("A joy. The review is", " good"),
        ("A mess. The review is", " bad"),
    }
    assert all(e.options[e.gold] == e.target for e in found)


@pytest.mark.parametrize("text", re.findall(r"toolkit (\w+)", README.split("## From the shell")[1].split("```")[1]))
def test_every_verb_exists(text):
    from toolkit.cli import app

    assert text in {c.name or c.callback.__name__ for c in app.registered_commands}


def test_the_commands_for_ones_own_trainer_work(tmp_path, monkeypatch, capsys):
    """Each line of the block, one after the other; the template is filled in between."""
    import csv
    import shlex
    import shutil

    from toolkit.cli import main

    block = README.split("**Your own trainer.**")[1].split("```")[1]
    lines = [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("toolkit ")]
    assert [line[1] for line in lines] == ["select", "select", "select", "judge", "judge"]
    shutil.copy(ROOT / "studies" / "ranking-control" / "results" / "profile.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    for line in lines:
        assert main(line[1:]) == 0, line
        if "--template" in line:
            with open("results.csv", encoding="utf-8", newline="") as file:
                heading, *rows = csv.reader(file)
            assert len(rows) == 2 * 100
            with open("results.csv", "w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([heading, *([*row[:-1], 3 + at / 1e4] for at, row in enumerate(rows))])
    assert "top-error is " in capsys.readouterr().out and (tmp_path / "judged.png").stat().st_size > 10_000
