"""The runs of a study: how many, under which names, seeds and levers."""

import pytest

from toolkit.errors import InputError
from toolkit.records.levers import Seeds
from toolkit.runs.finetuning.design import expand, notes, own

TWO = {"sums": {"task": "arithmetic(largest=10)"}, "more": {"task": "arithmetic(largest=12)", "levers": {"steps": 5}}}


def of(runs, role):
    return [run for run in runs if run.role == role]


def test_arms_tasks_and_seeds_are_crossed(declared):
    runs = expand(declared(tasks=TWO, seeds=3, repeats={"arm": "top", "count": 4}))
    assert len(of(runs, "arm")) == 3 * 2 * 3
    assert {run.name for run in of(runs, "arm")} == {
        f"{task}--{arm}--seed{seed}" for task in TWO for arm in ("qlora", "top", "drawn") for seed in range(3)
    }
    repeats = of(runs, "repeat")
    assert [run.name for run in repeats] == [f"{t}--top--seed0-r{r}" for r in (1, 2, 3) for t in TWO]
    assert all(run.seeds == Seeds.all(0, repeat=run.seeds.repeat) for run in repeats)
    assert [run.name for run in of(runs, "untrained")] == ["sums--qlora--untrained", "more--qlora--untrained"]
    assert {run.levers.steps for run in runs if run.task == "more"} == {5}


def test_runs_go_seed_by_seed(declared):
    seeds = [run.seeds.adapter for run in of(expand(declared(tasks=TWO, seeds=3)), "arm")]
    assert seeds == sorted(seeds)


def test_seeds_are_separate_factors(declared):
    sets = [{"adapter": 0, "data": 0, "draw": 0}, {"adapter": 1, "data": 0, "draw": 0}]
    runs = of(expand(declared(seeds=sets)), "arm")
    assert [run.name for run in runs if run.arm == "top"] == ["sums--top--seed0", "sums--top--a1-d0-s0"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([(0, 0, 0), (1, 1, 1)], None),
        ([(5, 7, 9), (6, 8, 4)], None),
        ([(0, 0, 0), (0, 1, 1)], "2 sets of seeds hold 1 adapter seed, 2 data seeds, 2 draw seeds: "),
        ([(0, 0, 0), (0, 0, 1)], "sets that differ in the draw alone are repeats"),
    ],
)
def test_sets_of_seeds_that_share_one_are_said(declared, sets, said):
    """Two draws under one adapter seed and one data order are no two runs of an arm that draws nothing."""
    study = declared(seeds=[dict(zip(("adapter", "data", "draw"), each, strict=True)) for each in sets])
    found = " ".join(notes(study, expand(study)))
    assert ("sets of seeds" in found) is (said is not None) and (said or "") in found


def test_a_grid_crosses_draws_with_seeds(declared):
    grid = {"selector": "random-count", "budget": "layers=0.2", "draws": 3}
    matched = {"selector": "random-matched(within=0.5)", "like": "grid"}
    arms = [{"name": "qlora"}, {"name": "grid", "protect": grid}, {"name": "like", "protect": matched}]
    runs = expand(declared(arms=arms, repeats={"arm": "grid", "count": 2}, tune={"values": [0.1, 0.2], "rows": 4}))
    assert [run.draw for run in of(runs, "arm") if run.arm == "grid"] == [0, 1, 2, 0, 1, 2]
    assert [run.draw for run in of(runs, "arm") if run.arm == "like"] == [0, 1, 2, 0, 1, 2]
    assert [run.draw for run in of(runs, "arm") if run.arm == "qlora"] == [None, None]
    assert [run.draw for run in of(runs, "repeat")] == [0]  # the first draw again, under the same name's seeds
    assert "sums--grid--seed1--draw2" in {run.name for run in runs}


def test_trials_are_every_arms_and_own_runs_follow_their_choice(declared):
    study = declared(tune={"values": [0.001, 0.1], "rows": 8, "seed": 77})
    trials = of(expand(study), "tune")
    assert {run.name for run in trials} == {
        f"sums--{arm}--tune-learning_rate-{value}" for arm in ("qlora", "top", "drawn") for value in ("0.001", "0.1")
    }
    assert all(run.levers.learning_rate == run.value and run.seeds == Seeds.all(77) for run in trials)
    assert {run.levers.learning_rate for run in of(expand(study), "arm")} == {0.01}  # shared
    runs = own(study, {("sums", "top"): 0.1}, {("sums", "top"): "at the edge"})
    assert [run.name for run in runs] == ["sums--top--seed0--own", "sums--top--seed1--own"]
    assert all(r.own and r.value == r.levers.learning_rate == 0.1 and "at the edge" in r.labels for r in runs)


def test_an_arm_that_chose_the_shared_value_has_no_own_runs(declared):
    tasks = TWO | {"more": TWO["more"] | {"levers": {"learning_rate": 0.1}}}
    study = declared(tasks=tasks, tune={"values": [0.01, 0.1], "rows": 8})
    runs = own(study, {(task, arm): 0.1 for task in tasks for arm in ("qlora", "top")}, {})
    assert {(run.task, run.arm) for run in runs} == {("sums", "qlora"), ("sums", "top")}  # 0.1 is shared on `more`
    study = declared(tune={"lever": "rank", "values": [2, 4], "rows": 8})
    assert {run.levers.rank for run in own(study, {("sums", "qlora"): 2.0, ("sums", "top"): 4.0}, {})} == {4}


def test_one_draw_for_all_seeds_is_labelled(declared):
    once = {"selector": "random-count", "budget": "layers=0.2", "draw": "once"}
    runs = expand(declared(arms=[{"name": "qlora"}, {"name": "once", "protect": once}]))
    for run in runs:
        assert any("this draw only" in label for label in run.labels) == (run.arm == "once")


def test_two_runs_never_share_a_folder(declared):
    with pytest.raises(InputError, match="two runs would share the folder"):
        expand(declared(arms=[{"name": "qlora"}, {"name": "QLORA", "base": "none"}]))


def test_what_is_said_before_the_first_run(declared):
    study = declared(seeds=2)
    said = "\n".join(notes(study, expand(study)))
    assert "no A/A arm" in said and "2 seeds an arm: with fewer than four" in said
    study = declared(seeds=1, repeats={"arm": "qlora"})
    assert "one seed an arm: with fewer than four" in "\n".join(notes(study, expand(study)))
    study = declared(seeds=4, repeats={"arm": "qlora"})
    assert notes(study, expand(study)) == []


def test_a_folder_that_no_file_system_would_make_is_refused(declared):
    arms = [{"name": "a" * 190}]
    with pytest.raises(InputError, match=r"would have a name of .* letters, and at most 200 are allowed"):
        expand(declared(arms=arms, analysis={"baseline": "a" * 190}))


def test_more_runs_than_can_be_planned_are_refused_before_they_are_listed(declared):
    grid = {"selector": "random-count", "budget": "layers=0.2", "draws": 10_000}
    arms = [{"name": "qlora"}, {"name": "grid", "protect": grid}]
    with pytest.raises(InputError, match=r"100,010,000 runs .* are declared; at most 100,000"):
        expand(declared(arms=arms, seeds=10_000, repeats=None))
