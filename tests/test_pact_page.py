"""docs/pact.md: its arms are planned, its commands and code run, its tables are what the code holds."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import yaml
from toolkit_plugins.dataflows.pact import choosing
from toolkit_plugins.dataflows.pact.settings import Settings
from typer.main import get_command

import toolkit as tk
from tests.plugins.dataflows.test_pact_flow import block_bytes, gate_bytes, packed_bytes
from toolkit.cli import app
from toolkit.records.finetuning import FineTuning
from toolkit.runs.finetuning import plans

PAGE = (Path(__file__).parent.parent / "docs" / "pact.md").read_text(encoding="utf-8")
(STUDY,) = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def table(heading: str, within: str = "") -> list[list[str]]:
    """The cells of the first table of a section whose first heading is this."""
    lines = PAGE[PAGE.index(within) :].splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[at + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_arms_are_planned(checkpoints):
    data = {"kind": "fine-tuning", "name": "page", "question": "?", "tasks": {"a": {"task": "arithmetic"}}}
    study = FineTuning.model_validate(data | STUDY | {"analysis": {"baseline": "lora"}})
    plans.check(study)
    profile = tk.profile(str(checkpoints("llama", torch.float32)), ["nf4", "nvfp4"], progress=False)
    flows = {}
    for arm in study.arms:
        made, _, _ = plans.plan(study, arm.name, profile, study.runs_of_an_arm[0])
        flows[arm.name] = made.dataflow
    pact = {"pact-rounded", "pact", "protected"}
    assert flows == {name: "pact" if name in pact else "stock" for name in flows} | {"shared": "pact(layouts=shared)"}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line):
    words = shlex.split(line, comments=True)
    context = get_command(app).commands[words[1]].make_context(words[1], words[2:])
    assert words[0] == "toolkit" and context.params["output"]
    if flow := context.params.get("dataflow"):
        assert tk.Plan.protecting(None, "nvfp4", rank=8, dataflow=flow).dataflow == flow


def test_the_code_runs(checkpoints, capsys):
    exec(CODE.replace('"demo"', repr(str(checkpoints("llama", torch.float32)))), {})
    assert "blocks along the input" in capsys.readouterr().out


def test_every_switch_and_value_stands_on_the_page():
    hints = get_type_hints(Settings)
    rows = {row[0].strip("`"): row for row in table("switch")}
    assert list(rows) == list(hints)
    for name, (_, values, _) in rows.items():
        named = re.findall(r"`(\w+)`", values)
        allowed = [str(value).lower() for value in get_args(hints[name]) or (True, False)]
        assert sorted(named) == sorted(allowed)
        assert named[0] == str(getattr(Settings(), name)).lower()


def test_every_execution_stands_on_the_page():
    assert {row[0].strip("`") for row in table("execution")} == set(choosing.OFFERS)


def number(cell: str) -> int:
    return int(cell.strip("*").replace(",", ""))


def test_the_bytes_are_those_that_the_tests_of_the_flow_hold():
    hidden, width, rank = 2048, 8192, 8
    low, rows = 2 * rank, table("part", "## What is kept for backward")
    kept = {row[0].strip("*"): number(row[2]) for row in rows}
    assert kept["two RMSNorms"] == 2 * (packed_bytes(hidden) + 4)
    assert kept["q, k, v, gate, up"] == 5 * low and kept["o"] == packed_bytes(hidden) + low
    assert kept["SiLU-multiply"] == 2 * gate_bytes(width, "nvfp4")
    assert kept["down"] == packed_bytes(width) + low
    ours = sum(kept.values()) - kept["all"] - kept["attention, RoPE"]
    assert ours == block_bytes(hidden, width, hidden, rank, "nvfp4", "nvfp4", True)
    assert kept["all"] == ours + kept["attention, RoPE"]
    stock = number(re.search(r"the ([\d,]+) bytes of the stock", PAGE)[1])
    said = re.search(r"For 16 blocks: ([\d,]+) KiB a token, stock ([\d,]+)", PAGE).groups()
    assert [number(each) for each in said] == [round(16 * each / 1024) for each in (kept["all"], stock)]


def test_the_bytes_of_the_other_switches():
    hidden, width = 2048, 8192
    rows = {row[0].strip("`"): row[1] for row in table("instead")}
    assert number(rows["norm=16bit"]) == 2 * (2 * hidden + 4)
    for gates in ("16bit", "int4", "int2"):
        assert number(rows[f"gates={gates}"]) == 2 * gate_bytes(width, gates)
    shared, more = (number(each) for each in rows["reuse=false"].split(" + "))
    assert (shared, more) == (2 * (packed_bytes(hidden) + 4), 5 * packed_bytes(hidden))


def test_the_gaps_of_the_two_layouts():
    from toolkit_plugins.dataflows.pact.weights import PactLinear

    weight = torch.randn(512, 768, generator=torch.Generator().manual_seed(0))
    packed = tk.quantizer("nvfp4").quantize(weight)
    for names, *_, gap in table("`layouts`, `source`"):
        layouts, source = (*re.findall(r"`(\w+)`", names), "calibrated")[:2]
        made = PactLinear(packed, None, torch.float32, Settings(layouts=layouts, source=source), weight)
        assert made.gap == pytest.approx(float(gap), abs=0.005)


def test_the_error_of_gaussian_rows():
    from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows

    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    found = float((quantize_rows(x).values() - x).norm() / x.norm())
    assert f"{found:.4f}"[1:] in PAGE
