"""docs/exports.md: its commands and options are the verb's, its tables name what there is, its numbers hold."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from toolkit.cli import app
from toolkit.registry import registry
from toolkit.runs.exporting import FORMATS
from toolkit.runs.exporting.compressed_tensors import FUSED
from toolkit.runs.exporting.exporting import LEAST

PAGE = (Path(__file__).parent.parent / "docs" / "exports.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line):
    words = shlex.split(line, comments=True)
    context = get_command(app).commands[words[1]].make_context(words[1], words[2:])
    assert words[0] == "toolkit" and context.params["output"]
    assert words[1] != "export" or context.params["format"] in FORMATS


def test_every_option_on_the_page_is_the_verbs():
    verbs = [get_command(app).commands[name] for name in ("export", "fuse", "calibrate")]
    options = {o for verb in verbs for p in verb.params for o in [*p.opts, *p.secondary_opts]}
    assert set(re.findall(r"(?<=[\s`(])--[a-z][a-z-]+", PAGE)) <= options


def test_the_tables_name_every_format_and_choice():
    first = {cell for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for cell in re.findall(r"`(\w[\w-]+)`", row)}
    assert first == {*FORMATS, *FUSED}
    assert f"Below a share of {LEAST:g} " in PAGE


def test_the_formats_hold_what_the_page_says():
    made = {name: cls() for name, (cls, _) in registry.of_kind("quantizer").items()}
    held = {form: {n for n, q in made.items() if q.layout(form) is not None} for form in FORMATS}
    assert held == {"peft": set(), "bnb": {"nf4", "fp4-bnb"}, "compressed-tensors": {"nvfp4", "mxfp4"}, "merged": set()}
    for quantizer in held["compressed-tensors"]:
        assert f"`{made[quantizer].layout('compressed-tensors').name}`" in PAGE
