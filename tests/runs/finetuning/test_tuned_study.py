"""A study whose arms are tuned: trials first, then each arm's own value, where it is not the shared one."""

from __future__ import annotations

import functools
import json

from toolkit.analysis.printing.table import table
from toolkit.records.trained import Trained
from toolkit.runs import finetuning

run = functools.partial(finetuning.run, device="cpu", dtype="float32", progress=False)


def reports(folder):
    return {path.parent.name: Trained.load(path) for path in sorted((folder / "runs").glob("*/report.json"))}


def test_trials_choose_each_arms_own_value(study, told):
    from .conftest import STUDY

    arms = [{"name": "qlora"}, {"name": "top", "protect": {"selector": "top-error", "budget": "layers=0.2"}}]
    tune = {"values": [1e-5, 0.01], "rows": 8}
    levers = STUDY["levers"] | {"learning_rate": 0.003}
    results = run(study(arms=arms, seeds=1, tune=tune, levers=levers))
    found = reports(results)
    for arm in ("qlora", "top"):
        trials = [found[f"sums--{arm}--tune-learning_rate-{value}"] for value in ("1e-05", "0.01")]
        best = min(trials, key=lambda trial: trial.scores[""].loss)
        own = found[f"sums--{arm}--seed0--own"]
        assert own.own and own.value == best.value == own.levers.learning_rate == 0.01
        assert any("edge of the grid" in label for label in own.labels)
        assert {trial.test.sha256 for trial in trials} != {own.test.sha256}
        assert own.test.sha256 == found[f"sums--{arm}--seed0"].test.sha256
        assert {trial.train.sha256 for trial in trials} == {own.train.sha256}
        assert trials[0].test.rows == 8 and own.test.rows == 16
        shared = found[f"sums--{arm}--seed0"]
        assert shared.levers.learning_rate == 0.003 and own.scores != shared.scores
    before = told(results)
    run(results.parent)
    assert told(results) == before


def test_an_arm_that_chooses_the_shared_value_is_not_trained_again(study, told, capsys):
    results = run(study(arms=[{"name": "qlora"}], seeds=1, tune={"values": [1e-5, 0.01], "rows": 8}))
    before, said = reports(results), capsys.readouterr().err
    trials = {value: before[f"sums--qlora--tune-learning_rate-{value}"] for value in ("1e-05", "0.01")}
    assert trials["0.01"].scores[""].loss < trials["1e-05"].scores[""].loss  # 0.01 is the shared value
    assert "sums--qlora--seed0" in before and not any(report.own for report in before.values())
    assert "own learning_rate is the shared one, so that the shared runs serve: qlora on sums" in said
    entry = json.loads(table(results, "json"))["tune"]["arms"][0]
    assert entry["own_is_shared"] and entry["own"] == entry["shared"] is not None
    assert "Missing runs" not in table(results)
    unchanged = told(results)
    run(results.parent)
    assert told(results) == unchanged
