"""The committed studies of starts: they can be run, and their families are what their files say."""

from __future__ import annotations

from pathlib import Path

import pytest

import toolkit as tk
from toolkit.analysis.printing.starts.summary import summary
from toolkit.records.initialization import Initialization
from toolkit.runs.initialization import design

STUDIES = Path(__file__).parents[3] / "studies"


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", ["loftq-scaling", "nvfp4-calibration"])
def test_the_components_of_every_form_exist(name, small):
    study = Initialization.read(STUDIES / name, small=small)
    design.check(study)
    assert study.analysis.baseline == study.arms[0].name


@pytest.mark.parametrize(("name", "family"), [("loftq-scaling", 5 * 6), ("nvfp4-calibration", 13 * 2)])
def test_so_many_comparisons_are_declared(name, family):
    assert Initialization.read(STUDIES / name).family_size == family


def test_only_the_initializer_differs_between_the_arms():
    for name in ("loftq-scaling", "nvfp4-calibration"):
        arms = Initialization.read(STUDIES / name).arms
        assert len({arm.base for arm in arms}) == 1 and not any(arm.protect for arm in arms)
        assert len({arm.initializer for arm in arms}) == len(arms)


def test_the_readmes_numbers_are_those_of_the_results():
    """What loftq-scaling's README quotes of its table, and that its lock holds."""
    folder = STUDIES / "loftq-scaling"
    text = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    data = summary(folder)
    assert data["status"]["confirmatory"] and not data["missing"] and len(data["contrasts"]) == 30
    of = {(entry["arm"], entry["scaling"]): entry for entry in data["entries"]}
    for s in data["scalings"]:
        assert f"{of['loftq', s]['relative']:.4f}"[1:] == ".9097" and ".9097 of the plain start's" in text
        assert f"{of['loftq-once', s]['relative']:.4f}"[1:] == ".9651" and "and .9651 with one" in text
        assert of["loftq", s]["worse"] == 0
    for s in (2.0, 4.0, 5.66):
        assert f"{of['loftq-peft', s]['relative']:.4f} at s = {s:g}" in text
    shown = [of["loftq-peft", s]["scores"]["wikitext2"]["none"]["perplexity"] for s in (1.0, 2.0, 4.0, 5.66)]
    plain = of["zero", 1.0]["scores"]["wikitext2"]["none"]
    sixteen = data["sixteen"]["wikitext2"]["none"]
    assert "perplexity {:.1f} at s = 1, {:.1f} at s = 2, {:.1f} at s = 4 and {:.1f} at s = 5.66".format(*shown) in text
    assert f"{plain['perplexity']:.1f} of the plain start and {sixteen['perplexity']:.1f} of the 16-bit" in text
    assert f"of the {plain['loss'] - sixteen['loss']:.3f}".replace("0.", ".") in text
    pairs = {(c["first"], c["second"], c["scaling"]): c for c in data["contrasts"]}
    once = [pairs["loftq-once", "loftq-peft", s]["verdict"] for s in data["scalings"]]
    assert once == ["lower", "not separated", "not separated", "lower", "lower", "lower"]
    assert {pairs["loftq-once", "zero", s]["verdict"] for s in data["scalings"]} == {"lower"}
    assert {pairs["loftq", "zero", s]["verdict"] for s in data["scalings"]} == {"not separated"}
    assert tk.table(folder) + "\n" == (folder / "table.md").read_text(encoding="utf-8")
