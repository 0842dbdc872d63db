"""The committed studies of starts: they can be run, and their families are what their files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.records.initialization import Initialization
from toolkit.runs.initialization import design

STUDIES = Path(__file__).parents[3] / "studies"


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", ["loftq-scaling", "nvfp4-calibration"])
def test_the_components_of_every_form_exist(name, small):
    study = Initialization.read(STUDIES / name, small=small)
    design.check(study)
    assert study.analysis.baseline == study.arms[0].name


@pytest.mark.parametrize(("name", "family"), [("loftq-scaling", 5 * 6), ("nvfp4-calibration", 9 * 2)])
def test_so_many_comparisons_are_declared(name, family):
    assert Initialization.read(STUDIES / name).family_size == family


def test_only_the_initializer_differs_between_the_arms():
    for name in ("loftq-scaling", "nvfp4-calibration"):
        arms = Initialization.read(STUDIES / name).arms
        assert len({arm.base for arm in arms}) == 1 and not any(arm.protect for arm in arms)
        assert len({arm.initializer for arm in arms}) == len(arms)
