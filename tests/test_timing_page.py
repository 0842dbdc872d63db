"""docs/timing.md: its setting is one that reads, and its command line is the verb's."""

import re
from pathlib import Path

import yaml
from typer.main import get_command

from toolkit.cli import app
from toolkit.records.timing import Timing

PAGE = (Path(__file__).parent.parent / "docs" / "timing.md").read_text(encoding="utf-8")


def test_the_setting_reads_and_names_every_field_but_the_task():
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    given = yaml.safe_load(block)["timing"]
    read = Timing.model_validate(given)
    assert set(given) == set(Timing.model_fields) - {"task"}
    defaults = Timing()
    for name in ("duplicates", "rounds", "seconds", "batches", "warmup", "floor"):
        assert getattr(read, name) == getattr(defaults, name), name


def test_every_option_on_the_page_is_the_verbs():
    options = {o for p in get_command(app).commands["time"].params for o in p.opts}
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    assert set(re.findall(r"--[a-z-]+", block)) | {"--beside-others"} <= options
