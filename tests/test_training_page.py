"""docs/training.md: its arms can be composed and are what they are called, its commands and checks exist."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

import toolkit as tk
from toolkit.records.finetuning import FineTuning
from toolkit.records.levers import Levers, Seeds
from toolkit.records.profile import Statistic
from toolkit.runs.finetuning.plans import check, plan

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
YAML = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
ARMS, CONTROLS = [block["arms"] for block in YAML if "arms" in block]


def study(arms: list, **more) -> FineTuning:
    data = {"kind": "fine-tuning", "name": "page", "question": "?", "tasks": {"a": {"task": "arithmetic"}}}
    return FineTuning.model_validate(data | {"arms": arms, "analysis": {"baseline": arms[0]["name"]}} | more)


@pytest.fixture(scope="module")
def profile() -> tk.Profile:
    spec = importlib.util.spec_from_file_location("profiles", ROOT / "tests" / "selection" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.build(24, module.PHI_1_5, model="microsoft/phi-1_5")
    held = Statistic(values=made["norm"], rows=1, batches=1, tokens=1, loss=1.0, sha256="", dtype="float32")
    return made.model_copy(update={"statistics": {"gradient-sensitivity(quantizer=nvfp4)": held}})


def planned(arms: list, name: str, profile: tk.Profile, seed: int = 0):
    return plan(study(arms), name, profile, Seeds.all(seed), 0)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm["name"])
def test_every_method_is_what_it_is_called(arm, profile):
    made, protect, adapt = planned(ARMS, arm["name"], profile)
    name = arm["name"]
    adapter = next(made.of(n).adapter for n in reversed(profile.names))
    assert made.default.quantizer == {"lora": "none", "dora": "none", "data-driven": "nvfp4"}.get(name, "nf4")
    assert adapter.dora == (name in ("dora", "qdora"))
    begun = {"loftq": "loftq", "loftq-rslora": "loftq", "qpissa": "pissa"}.get(name, "zero")
    assert made.default.initializer.partition("(")[0] == begun
    assert adapter.scaling == pytest.approx(16 / math.sqrt(8) if name.endswith(("-rs", "rslora")) else 2.0)
    if name.startswith("aqlora"):
        assert len(protect.layers) == 29 and all(made.of(n).quantizer == "none" for n in protect.layers)
    if name.startswith("aqlora-s"):
        assert adapt.layers == profile.names[-123:]  # ⌈.85 · 144⌉
    if name == "overflow-cure":
        assert {made.of(n).compute_dtype for n in protect.layers} == {"float32"}
    if name == "guarded":
        assert all(made.of(n).range_guard for n in protect.layers)


def test_the_controls_match_what_they_say(profile):
    check(study(CONTROLS))
    _, top, deep = planned(CONTROLS, "aqlora-s", profile)
    _, protection, same = planned(CONTROLS, "random-protection", profile)
    assert same.layers == deep.layers and abs(protection.parameters / top.parameters - 1) <= 0.001
    assert planned(CONTROLS, "random-protection", profile, 1)[1].layers != protection.layers
    kept, _ = (planned(CONTROLS, "random-placement", profile)[i] for i in (1, 2))
    assert kept.layers == top.layers
    sizes = {layer.name: sum(layer.shape) for layer in profile.layers}
    placed = planned(CONTROLS, "random-placement", profile)[2]
    held = sum(sizes[n] for n in deep.layers)
    assert abs(sum(sizes[n] for n in placed.layers) / held - 1) <= 0.001
    once = [planned(CONTROLS, "one-draw", profile, seed)[1].layers for seed in (0, 1)]
    assert once[0] == once[1]


def test_the_other_blocks_fit_a_study():
    others = [block for block in YAML if "arms" not in block]
    assert {key for block in others for key in block} == {"tune", "seeds", "calibration"}
    for block in others:
        study(ARMS, **block)


def test_an_undeclared_lever_is_refused():
    with pytest.raises(tk.InputError, match=r"factors: \[learning_rate\]"):
        study([*ARMS, {"name": "fast", "levers": {"learning_rate": 1e-3}}])
    assert study([*ARMS, {"name": "fast", "levers": {"learning_rate": 1e-3}}], factors=["learning_rate"])


def commands() -> list[str]:
    found = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
    return [line for line in found if line.startswith("toolkit ")]


@pytest.mark.parametrize("line", commands())
def test_every_command_and_option_exists(line):
    import typer

    from toolkit.cli import app

    group = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    command = group.commands[words[0]]
    context = click.Context(command) if not hasattr(command, "context_class") else command.context_class(command)
    allowed = {o for p in command.get_params(context) for o in [*p.opts, *p.secondary_opts]}
    assert {word for word in words if word.startswith("-")} <= allowed


def test_the_defaults_are_those_that_the_page_states():
    levers = Levers()
    assert f"r = {levers.rank}, alpha = {levers.alpha:g}, lr 3e-4 {levers.schedule}" in PAGE
    assert levers.learning_rate == 3e-4 and f"batch {levers.batch} × {levers.accumulation}" in PAGE
    assert f"{levers.length} tokens, SDPA" in PAGE and levers.attention == "sdpa"
    assert levers.dropout == levers.warmup == levers.weight_decay == 0 and levers.clip == 1 and levers.epochs == 1


def test_every_check_of_the_table_is_in_the_code():
    section = PAGE.split("## Health checks")[1].split("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`([\w-]+)`", row)}
    assert len(named) >= 12
    literals = {
        node.value
        for path in (ROOT / "toolkit" / "runs").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert named <= literals
    from toolkit.runs.tasks.summary import UNPARSED
    from toolkit.runs.training.health import PADDING, SCALE_FLOOR

    assert (UNPARSED, PADDING, SCALE_FLOOR) == (0.05, 0.25, 1.0)
