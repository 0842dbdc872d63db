"""docs/tasks.md: its table is the tasks that there are, its study reads, its own task works."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import toolkit as tk
from toolkit.records.finetuning import Use
from toolkit.registry import registry
from toolkit.runs.tasks import read

PAGE = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_the_table_is_of_all_tasks():
    table = {
        cells[0].strip("`").partition(":")[0]: cells[1:]
        for line in re.findall(r"^\| (`.*) \|$", PAGE, re.M)
        for cells in [[cell.strip() for cell in line.split(" | ")]]
    }
    found = registry.of_kind("task")
    assert set(table) == set(found)
    for name, (hub, scored, metric, _) in table.items():
        task = found[name][0]
        assert (task.scored, task.metric) == (scored, metric)
        if task.hub is not None:
            assert hub == ", ".join(filter(None, (task.hub.path, task.hub.name)))
        else:
            assert name in ("arithmetic", "commonsense", "lm-eval")


def test_the_study_reads():
    block = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.S)[1])
    for use in block["tasks"].values():
        use = Use.model_validate(use)
        registry.make("task", use.task)
        if use.train:
            registry.make("task", use.train)


def test_the_own_task_works():
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], scope)
    split = read(scope["Parity"](), "test")
    assert split.found == 50 and {e.target for e in split.examples} == {" even", " odd"}
    assert all((int(e.prompt.split()[0]) % 2 == 1) == (e.target == " odd") for e in split.examples)
    assert tk.Answered("a", 1.0).score == 1
