"""docs/starts.md: its study is one that reads and can be run, and its command lines are the verbs'."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from typer.main import get_command

from toolkit.cli import app
from toolkit.records.initialization import CalibrationUse, Initialization, StartArm, StartContrasts
from toolkit.runs.initialization import design

PAGE = (Path(__file__).parent.parent / "docs" / "starts.md").read_text(encoding="utf-8")


def study():
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    return yaml.safe_load(block)


def test_the_study_reads_and_names_every_field():
    given = study()
    design.check(Initialization.model_validate(given))
    assert set(given) == set(Initialization.model_fields) - {"schema_", "form", "small"}
    assert set(given["calibration"]) == set(CalibrationUse.model_fields)
    assert set(given["analysis"]) == set(StartContrasts.model_fields)
    assert {key for arm in given["arms"] for key in arm} == set(StartArm.model_fields)


def test_the_defaults_on_the_page_are_the_records():
    given, plain = study(), StartContrasts(baseline="plain")
    for name in ("outcome", "level", "correction", "resamples"):
        assert given["analysis"][name] == getattr(plain, name), name
    assert (given["rank"], given["scaler"], given["calibration"]["windows"]) == (8, "lora", 64)
    assert StartArm(name="plain").initializer == "zero"


def test_one_layer_on_the_page_is_started_from_its_inputs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict = {}
    torch.manual_seed(0)
    exec(block, names)
    start = names["start"]
    full = start.base.dequantize() + start.scaling * start.B @ start.A
    assert start.scaling == pytest.approx(16 / 8**0.5) and start.residuals[-1] < start.residuals[0]
    missed = torch.linalg.norm(names["weight"] - full) / torch.linalg.norm(names["weight"])
    assert float(missed) == pytest.approx(min(start.residuals), rel=1e-4)


def test_every_command_on_the_page_is_a_verb_with_these_options():
    block = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.S))
    commands = get_command(app).commands
    for line in block.splitlines():
        _, verb, *rest = shlex.split(line)
        options = {name for parameter in commands[verb].params for name in parameter.opts}
        assert {word for word in rest if word.startswith("-")} <= options, line
    for verb in ("run", "lock"):
        assert "--calibration" in {name for parameter in commands[verb].params for name in parameter.opts}
