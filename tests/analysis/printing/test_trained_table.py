"""The table of a fine-tuning study: its numbers against scipy and against sums by hand; its words; its formats."""

import csv
import io
import json
import time

import numpy as np
import pytest
import scipy.stats

from toolkit.analysis.printing.table import table
from toolkit.analysis.printing.trained.cells import number, signed
from toolkit.analysis.printing.trained.summary import summary
from toolkit.analysis.statistics.multiplicity import holm
from toolkit.errors import InputError
from toolkit.records.levers import Seeds
from toolkit.records.trained import Flag

TOKENS = np.array([1 + n % 3 for n in range(60)])


def of(data, first, second, *, task="sums", outcome="loss", own=False):
    """The one contrast of two arms."""
    found = [
        e
        for e in data["contrasts"]
        if (e["first"], e["second"], e["task"], e["outcome"], e["own"]) == (first, second, task, outcome, own)
    ]
    assert len(found) == 1
    return found[0]


def arm(data, name, task="sums", group="", own=False):
    return next(e for e in data["arms"] if (e["arm"], e["task"], e["group"], e["own"]) == (name, task, group, own))


@pytest.fixture
def whole(made, trained):
    """Three arms, two tasks, four seeds, four repeats, three trials an arm, and the arms' own runs."""
    builder = made(
        tasks=("sums", "words"),
        repeats={"arm": "qlora", "count": 4},
        tune={"values": [1e-4, 3e-4, 1e-3]},
        values=trained.noisy({"aqlora-q": -0.1}),
    )
    return builder.write().write_own(1e-3)


def test_an_arms_mean_and_spread_are_those_of_its_runs(made):
    builder = made(seeds=3)
    losses = [1.0, 1.2, 1.7]
    for seed, loss in enumerate(losses):
        builder.run("sums", "qlora", seed, loss=np.full(60, loss), score=np.arange(60) % 2.0)
    found = arm(summary(builder.folder), "qlora")
    assert found["runs"] == 3
    assert found["loss"]["mean"] == pytest.approx(np.mean(losses))
    assert found["loss"]["sd"] == pytest.approx(np.std(losses, ddof=1))
    assert found["score"] == {"mean": 0.5, "sd": 0.0, "values": [0.5] * 3}
    assert found["padding"] == pytest.approx(0.1)
    assert found["memory"] == {"base": 2**30, "peak": 3 * 2**30 + 2 * 2**20, "kind": "allocated"}
    assert "1.3000 ± 0.3606" in table(builder.folder)


def test_differences_and_p_values_are_scipys(made, trained):
    builder = made(seeds=5, values=trained.noisy({"aqlora-q": -0.02})).write()
    data = summary(builder.folder)
    a, b = (np.array(arm(data, name)["loss"]["values"]) for name in ("aqlora-q", "qlora"))
    found = of(data, "aqlora-q", "qlora")
    welch = scipy.stats.ttest_ind(a, b, equal_var=False)
    assert found["difference"] == pytest.approx(a.mean() - b.mean())
    assert found["seeds"]["p"] == pytest.approx(welch.pvalue)
    assert (found["seeds"]["low"], found["seeds"]["high"]) == pytest.approx(tuple(welch.confidence_interval()))
    exact = scipy.stats.permutation_test((a, b), lambda x, y: x.mean() - y.mean(), n_resamples=np.inf)
    assert found["permutation_p"] == pytest.approx(exact.pvalue)
    assert found["attainable"] == pytest.approx(2 / 252)
    assert found["both"]["error"] >= found["seeds"]["error"]  # rows vary too


def test_pairs_by_seed_only_where_it_was_declared(made, trained):
    builder = made(seeds=5, values=trained.noisy({"aqlora-q": -0.02}), analysis={"paired": True}).write()
    data = summary(builder.folder)
    a, b = (np.array(arm(data, name)["loss"]["values"]) for name in ("aqlora-q", "qlora"))
    found = of(data, "aqlora-q", "qlora")
    assert found["paired"] and found["seeds"]["p"] == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue)
    assert found["attainable"] == pytest.approx(2 / 2**5)
    assert "paired by seed, as declared" in table(builder.folder)


def test_a_pair_without_its_partner_is_left_out_and_said(made, trained):
    builder = made(seeds=5, analysis={"paired": True}).write()
    (builder.results / "runs" / "sums--qlora--seed3" / "report.json").unlink()
    found = of(summary(builder.folder), "aqlora-q", "qlora")
    assert found["runs"] == [4, 4] and any("seed3" in note for note in found["notes"])


def test_the_family_is_corrected_by_holm(whole):
    data = summary(whole.folder)
    family = [e for e in data["contrasts"] if e["primary"] and e["task"] != "all tasks"]
    assert len(family) == 6 and {e["family"] for e in family} == {6}
    assert [e["adjusted"] for e in family] == pytest.approx(list(holm([e["p"] for e in family])))


def test_every_arm_is_compared_with_the_baseline_and_with_its_matched_random_arm(made):
    builder = made(analysis={"pairs": [("qlora", "matched"), ("matched", "aqlora-q")]}).write()
    data = summary(builder.folder)
    assert [(e["first"], e["second"], e["why"]) for e in data["contrasts"] if e["primary"]] == [
        ("aqlora-q", "qlora", "baseline"),
        ("matched", "qlora", "baseline"),
        ("aqlora-q", "matched", "matched"),
    ]


def test_the_average_over_tasks_counts_tasks_alike(whole):
    data = summary(whole.folder)
    each = [of(data, "aqlora-q", "qlora", task=task) for task in ("sums", "words")]
    over = of(data, "aqlora-q", "qlora", task="all tasks")
    assert over["difference"] == pytest.approx(np.mean([e["difference"] for e in each]))
    runs = [np.array(arm(data, "aqlora-q", task)["loss"]["values"]) for task in ("sums", "words")]
    average = next(e for e in data["averages"] if e["arm"] == "aqlora-q" and not e["own"])
    assert average["all"]["loss"]["values"] == pytest.approx(list(np.mean(runs, axis=0)))


def test_flips_are_counted_by_hand(made):
    """The first arm gains rows 0, 1, 2 and loses row 3; p = 2·P(X ≤ 1), X binomial(4, ½) = .625."""
    builder = made(seeds=1)
    base, better = np.zeros(60), np.zeros(60)
    base[3:10], better[:3], better[4:10] = 1, 1, 1
    builder.run("sums", "qlora", 0, score=base, loss=np.ones(60))
    builder.run("sums", "aqlora-q", 0, score=better, loss=np.ones(60))
    flips = of(summary(builder.folder), "aqlora-q", "qlora", outcome="score")["flips"]
    assert (flips["each"][0]["gained"], flips["each"][0]["lost"]) == (3, 1)
    assert flips["each"][0]["p"] == pytest.approx(scipy.stats.binomtest(1, 4).pvalue) == pytest.approx(0.625)
    assert "Flips" in table(builder.folder)


def test_shares_such_as_f1_have_no_flips(made):
    builder = made(seeds=1)
    for name in ("qlora", "aqlora-q"):
        builder.run("sums", name, 0, score=np.full(60, 0.3), loss=np.ones(60), metric="F1", chance=None)
    data = summary(builder.folder)
    assert of(data, "aqlora-q", "qlora", outcome="score")["flips"] is None
    assert "Flips" not in table(builder.folder)


@pytest.mark.parametrize(("seeds", "known"), [(3, False), (4, True)])
def test_fewer_than_four_runs_an_arm_are_said_not_to_know_the_spread(made, seeds, known):
    builder = made(seeds=seeds).write()
    text = table(builder.folder)
    assert ("the spread is not known" in text) is not known
    assert all(e["spread_known"] is known for e in summary(builder.folder)["contrasts"])


def test_one_run_an_arm_is_printed_and_not_tested(made):
    builder = made(seeds=1).write()
    found = of(summary(builder.folder), "aqlora-q", "qlora")
    assert found["verdict"] == "not tested" and found["p"] is None and found["adjusted"] is None
    text = table(builder.folder)
    assert "nothing is claimed" in text
    assert not any("±" in line for line in text.splitlines() if line.startswith("| qlora"))


@pytest.mark.parametrize("margin", [None, 0.5, 1e-6])
def test_equivalence_is_claimed_against_a_declared_margin_alone(made, margin):
    declared = {} if margin is None else {"margin": margin, "margin_reason": "no user would notice"}
    builder = made(seeds=4, analysis=declared).write()
    data, text = summary(builder.folder), table(builder.folder)
    found = of(data, "matched", "qlora")
    assert found["equivalence"]["margin"] == margin
    assert found["equivalence"]["passed"] is {None: None, 0.5: True, 1e-6: False}[margin]
    half = scipy.stats.t.ppf(0.95, found["both"]["df"]) * found["both"]["error"]  # two one-sided tests at .05 each
    assert found["equivalence"]["smallest"] == pytest.approx(abs(found["difference"]) + half, rel=1e-6)
    words = {None: "would pass at", 0.5: "passes at 0.5", 1e-6: "does not pass at 1e-06"}
    assert words[margin] in text
    assert ("| equivalent" in text) is (margin == 0.5)
    if margin is None:
        assert "No margin was declared before the first run" in text


def test_a_margin_of_the_declared_outcome_is_not_used_for_the_other(made):
    builder = made(analysis={"margin": 0.5, "margin_reason": "no user would notice"}).write()
    assert of(summary(builder.folder), "matched", "qlora", outcome="score")["equivalence"]["margin"] is None


def test_sets_of_seeds_that_share_one_are_said(made):
    seeds = [{"adapter": 0, "data": n, "draw": n} for n in range(4)]
    text = table(made("shared", seeds=seeds).write().folder)
    assert "The 4 sets of seeds hold 1 adapter seed, 4 data seeds, 4 draw seeds: runs that share a seed" in text
    assert "sets of seeds" not in table(made(seeds=4).write().folder)


def test_one_draw_for_all_seeds_is_labelled(made, trained):
    arms = [*trained.ARMS[:2], {"name": "matched", "protect": {**trained.ARMS[2]["protect"], "draw": "once"}}]
    builder = made(arms=arms).write()
    data, text = summary(builder.folder), table(builder.folder)
    assert arm(data, "matched")["labels"] == ["this draw only"]
    assert [e["this_draw_only"] for e in data["contrasts"] if e["primary"]] == [False, True, True]
    assert "this draw only" in text and "A new random draw for each seed" not in text


def test_a_new_draw_for_each_seed_is_said(made):
    text = table(made(seeds=4).write().folder)
    assert "A new random draw for each seed: matched" in text and "this draw only" not in text


def test_one_draw_of_a_budget_alone_holds_for_that_draw_only_too(made, trained):
    """A random arm that is matched to no other draws as well."""
    counted = {"selector": "random-count", "budget": "layers=0.2", "draw": "once"}
    builder = made(seeds=4, arms=[*trained.ARMS[:2], {"name": "counted", "protect": counted}]).write()
    data, text = summary(builder.folder), table(builder.folder)
    assert arm(data, "counted")["labels"] == ["this draw only"] and arm(data, "aqlora-q")["labels"] == []
    assert of(data, "counted", "qlora")["this_draw_only"] and not of(data, "aqlora-q", "qlora")["this_draw_only"]
    assert "This draw only: counted use one random draw for all seeds" in text


def test_a_grid_has_draw_as_a_random_effect(made, trained):
    """3 draws × 4 seeds; the draws' part dominates, so that p over draws is the larger one."""
    matched = {"name": "matched", "protect": {**trained.ARMS[2]["protect"], "draws": 3}}
    builder = made(arms=[*trained.ARMS[:2], matched], seeds=4)
    rng = np.random.default_rng(0)
    cells = np.array([[0.0, 0.1, -0.1]]).T + 0.01 * rng.normal(size=(3, 4))
    for seed in range(4):
        for name in ("qlora", "aqlora-q"):
            builder.run("sums", name, seed, loss=np.full(60, 0.9 + 0.01 * rng.normal()))
        for draw in range(3):
            builder.run("sums", "matched", seed, draw=draw, loss=np.full(60, 1 + cells[draw, seed]))
    data = summary(builder.folder)
    found = of(data, "aqlora-q", "matched")
    over = found["random_draws"]
    assert (over["draws"], over["seeds"], over["cells"]) == (3, 4, 12)
    assert over["estimate"] == pytest.approx(found["difference"])
    by_draw = cells.mean(axis=1).var(ddof=1)  # balanced: E MS_d/S = σ_d² + σ_e²/S
    rest = (cells - cells.mean(0) - cells.mean(1, keepdims=True) + cells.mean()).ravel()
    assert over["draw_sd"] ** 2 == pytest.approx(by_draw - (rest @ rest / 6) / 4, rel=1e-6)
    assert over["p"] > found["both"]["p"] and found["p"] == over["p"]
    reverse = of(data, "matched", "qlora")["random_draws"]  # the grid comes first: its sign turns
    assert reverse["estimate"] == pytest.approx(of(data, "matched", "qlora")["difference"])
    assert reverse["low"] < reverse["estimate"] < reverse["high"]
    assert found["runs"] == [4, 4] and arm(data, "matched")["runs"] == 12
    assert "3 × 4" in table(builder.folder)


def test_the_untrained_baseline_stands_above_the_arms(made):
    builder = made(seeds=4).write()
    builder.run("sums", "qlora", 0, role="untrained", loss=np.full(60, 3.5), score=(np.arange(60) < 15).astype(float))
    data, text = summary(builder.folder), table(builder.folder)
    assert data["tasks"][0]["untrained"] == {"arm": "qlora", "loss": pytest.approx(3.5), "score": 0.25}
    assert "| qlora, untrained |    1 |          3.5000 |        25.00% |" in text
    assert arm(data, "qlora")["runs"] == 4


def test_the_noise_is_that_of_the_repeats(made):
    builder = made(seeds=4, repeats={"arm": "qlora", "count": 4})
    repeats, seeds = [1.0, 1.01, 1.02, 0.99], [1.1, 0.9, 1.25]
    for n, value in enumerate(repeats):
        role = "arm" if n == 0 else "repeat"
        builder.run("sums", "qlora", Seeds.all(0, n), role=role, loss=np.full(60, value))
    for n, value in enumerate(seeds):
        builder.run("sums", "qlora", n + 1, loss=np.full(60, value))
    found = next(e for e in summary(builder.folder)["noise"] if e["outcome"] == "loss")
    assert (found["repeats"], found["seeds"]) == (4, 3)
    assert found["repeat_sd"] == pytest.approx(np.std(repeats, ddof=1))
    assert found["total_sd"] == pytest.approx(np.std(seeds, ddof=1))
    assert found["seed_sd"] == pytest.approx(np.sqrt(np.var(seeds, ddof=1) - np.var(repeats, ddof=1)))
    assert not found["identical"] and "A/A" in table(builder.folder)


@pytest.mark.parametrize(("seeds", "said"), [(1, "seeds were not varied"), (2, "one run under other seeds")])
def test_repeats_beside_too_few_seeds_for_a_spread(made, seeds, said):
    builder = made(seeds=seeds, repeats={"arm": "qlora", "count": 2})
    builder.run("sums", "qlora", Seeds.all(0, 1), role="repeat", loss=np.full(60, 1.0))
    for seed in range(seeds):
        builder.run("sums", "qlora", seed, loss=np.full(60, 1.1 + seed))
    found = next(e for e in summary(builder.folder)["noise"] if e["outcome"] == "loss")
    assert (found["repeats"], found["seeds"], found["total_sd"]) == (2, seeds - 1, None)
    assert found["repeat_sd"] == pytest.approx(0.1 / np.sqrt(2)) and said in table(builder.folder)


def test_a_study_without_an_a_a_arm_says_so(made):
    assert "There is no A/A arm" in table(made(seeds=4).write().folder)


def test_pairings_are_reported_whether_or_not_they_are_used(made):
    builder = made(seeds=4).write()
    found = of(summary(builder.folder), "aqlora-q", "qlora")["pairing"]
    a, b = (np.array(arm(summary(builder.folder), n)["loss"]["values"]) for n in ("aqlora-q", "qlora"))
    assert found["correlation"] == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert found["removed"] == pytest.approx(1 - (a - b).var(ddof=1) / (a.var(ddof=1) + b.var(ddof=1)))


def test_shared_and_own_values_stand_side_by_side(whole):
    data = summary(whole.folder)
    found = next(e for e in data["tune"]["arms"] if (e["task"], e["arm"]) == ("sums", "aqlora-q"))
    assert [t["value"] for t in found["trials"]] == [1e-4, 3e-4, 1e-3]
    assert found["chosen"] == 1e-3 and found["edge"] and found["shared_value"] == 3e-4
    assert found["shared"]["loss"]["values"] == arm(data, "aqlora-q")["loss"]["values"]
    assert found["own"]["loss"]["values"] == arm(data, "aqlora-q", own=True)["loss"]["values"]
    own = of(data, "aqlora-q", "qlora", own=True)
    assert own["difference"] != of(data, "aqlora-q", "qlora")["difference"] and not own["primary"]
    assert "loss, shared" in table(whole.folder) and "edge of the grid" in table(whole.folder)


def test_an_arm_at_the_shared_value_stands_with_its_shared_runs(made):
    builder = made(tasks=("sums",), seeds=4, tune={"values": [1e-4, 3e-4]}).write()
    for name, losses in {"qlora": (2.0, 1.0), "aqlora-q": (1.0, 2.0), "matched": (2.0, 1.0)}.items():
        for value, loss in zip((1e-4, 3e-4), losses, strict=True):
            builder.run("sums", name, Seeds.all(10**6), role="tune", value=value, loss=np.full(60, loss))
    for seed in range(4):
        builder.run("sums", "aqlora-q", seed, value=1e-4, own=True)
    data, text = summary(builder.folder), table(builder.folder)
    assert {e["arm"]: e["own_is_shared"] for e in data["tune"]["arms"]} == {
        "qlora": True, "aqlora-q": False, "matched": True
    }  # fmt: skip
    assert arm(data, "qlora", own=True)["value"] == 3e-4 and arm(data, "aqlora-q", own=True)["value"] == 1e-4
    for name in ("qlora", "matched"):
        assert arm(data, name, own=True)["loss"] == arm(data, name)["loss"]
    own, shared = of(data, "aqlora-q", "qlora", own=True), of(data, "aqlora-q", "qlora")
    assert own["means"][1] == shared["means"][1] and own["means"][0] != shared["means"][0]
    assert "where the chosen value is the shared one, the shared runs are the arm's own" in text
    assert "the shared runs stand as the arm's own too: qlora on sums; matched on sums" in text
    assert "Missing runs" not in text


def test_the_trials_choose_by_the_declared_outcome(made):
    from toolkit.analysis.reading.trained import read

    for outcome, expected in (("loss", 1e-4), ("score", 3e-4)):
        builder = made(outcome, tune={"values": [1e-4, 3e-4]}, analysis={"outcome": outcome})
        for value, loss, right in ((1e-4, 0.5, 0.2), (3e-4, 0.9, 0.8)):
            score = (np.arange(60) < 60 * right).astype(float)
            builder.run(
                "sums", "qlora", Seeds.all(10**6), role="tune", value=value, loss=np.full(60, loss), score=score
            )
        assert read(builder.folder).chosen("sums", "qlora") == expected


def test_chance_constant_predictions_and_averages_without_them(made):
    """WSC validation: .635 is what always guessing the majority class scores, and no better than chance."""
    builder = made(tasks=("wsc", "sums"), seeds=4)
    majority = (np.arange(104) < 66).astype(float)
    for name in ("qlora", "aqlora-q", "matched"):
        for seed in range(4):
            rng = np.random.default_rng([seed, len(name)])
            builder.run(
                "wsc", name, seed, loss=1 + 0.01 * rng.random(104), score=majority, chance=66 / 104, constant=True
            )
            builder.run("sums", name, seed, loss=2 + 0.01 * rng.random(60), score=np.ones(60), chance=0.5)
    data, text = summary(builder.folder), table(builder.folder)
    flags = {f["flag"]: (f["runs"], f["of"]) for f in arm(data, "qlora", "wsc")["flags"]}
    assert flags == {"not above chance": (4, 4), "constant prediction": (4, 4)}
    assert arm(data, "qlora", "sums")["flags"] == []
    average = data["averages"][0]
    assert average["flagged"] == ["wsc"]
    assert average["all"]["score"]["mean"] == pytest.approx((66 / 104 + 1) / 2)
    assert average["unflagged"]["score"]["mean"] == pytest.approx(1.0)
    kept = of(data, "aqlora-q", "qlora", task="tasks not flagged")
    assert kept["difference"] == pytest.approx(of(data, "aqlora-q", "qlora")["difference"])
    assert of(data, "aqlora-q", "qlora", task="all tasks")["difference"] != kept["difference"]
    assert "not above chance (4 of 4 runs)" in text and "63.5%" in text and "without wsc" in text


def test_how_the_machine_computed_is_said_once(made):
    """A study of a GPU that runs on a CPU would otherwise bear the same flag in every line."""
    builder = made(seeds=2).write()
    flag = Flag(check="not-graphed", severity="flag", reason="computed without CUDA graphs: no CUDA device")
    for at in ("qlora", "aqlora-q", "matched"):
        builder.run("sums", at, 0, flags=[flag])
    text = table(builder.folder)
    assert text.count("omputed without CUDA graphs") == 1
    assert "Computed without CUDA graphs: no CUDA device (3 of 6 runs)." in text
    assert all(entry["flags"] == [] for entry in summary(builder.folder)["arms"])


def test_one_collapsed_run_is_flagged_though_the_mean_is_above_chance(made):
    builder = made(seeds=4)
    for seed in range(4):
        score = np.ones(60) if seed else (np.arange(60) < 15).astype(float)  # a quarter right: chance
        builder.run("sums", "qlora", seed, loss=np.ones(60), score=score)
    flags = arm(summary(builder.folder), "qlora")["flags"]
    assert [(f["flag"], f["runs"]) for f in flags] == [("not above chance", 1)]


def test_sets_of_a_task_have_columns_and_count_alike(made):
    builder = made(seeds=4)
    groups = ["a"] * 40 + ["b"] * 20
    for name in ("qlora", "aqlora-q"):
        for seed in range(4):
            score = np.array([1.0] * 40 + [0.0] * 20)
            builder.run("sums", name, seed, loss=np.ones(60), score=score, groups=groups, chance=None)
    data = summary(builder.folder)
    assert arm(data, "qlora", group="a")["score"]["mean"] == 1 and arm(data, "qlora", group="b")["score"]["mean"] == 0
    assert data["averages"][0]["sets"] == ["sums/a", "sums/b"]
    assert data["averages"][0]["all"]["score"]["mean"] == pytest.approx(0.5)  # not 2/3: sets count alike
    assert "sums, by set" in table(builder.folder)


def test_unfinished_runs_are_named_with_reason_and_step(made):
    builder = made(seeds=4).write()
    fatal = Flag(check="loss", severity="fatal", reason="the loss is not finite", step=17, layer="model.layers.1.mlp")
    builder.run("sums", "aqlora-q", 2, fatal=fatal)
    data, text = summary(builder.folder), table(builder.folder)
    assert arm(data, "aqlora-q")["runs"] == 3 and data["unfinished"][0]["step"] == 17
    assert "Not finished: aqlora-q on sums (seed2) ended at step 17 of 100, layer model.layers.1.mlp" in text
    assert "the loss is not finite" in text


def test_an_arm_none_of_whose_runs_ended_well_stops_nothing(made):
    builder = made(seeds=2).write()
    for seed in range(2):
        builder.run("sums", "matched", seed, fatal=Flag(check="memory", severity="fatal", reason="out of memory"))
    data = summary(builder.folder)
    assert [e["arm"] for e in data["arms"]] == ["qlora", "aqlora-q"]
    assert {(e["first"], e["second"]) for e in data["contrasts"]} == {("aqlora-q", "qlora")}
    builder.run("sums", "qlora", 0, fatal=Flag(check="memory", severity="fatal", reason="out of memory"))
    builder.run("sums", "qlora", 1, fatal=Flag(check="memory", severity="fatal", reason="out of memory"))
    assert summary(builder.folder)["contrasts"] == []


def test_a_task_whose_runs_all_failed_is_named(made):
    builder = made(seeds=1)
    builder.run("sums", "qlora", 0, fatal=Flag(check="memory", severity="fatal", reason="out of memory", step=0))
    text = table(builder.folder)
    assert "Not finished: qlora on sums (seed0) ended at step 0 of 100: out of memory." in text
    assert "Missing runs (2)" in text


def test_missing_runs_are_named(made):
    builder = made(seeds=4).write()
    (builder.results / "runs" / "sums--matched--seed3" / "report.json").unlink()
    assert "Missing runs (1): matched on sums (seed3)." in table(builder.folder)


def test_rows_that_differ_between_arms_stop_the_table(made):
    builder = made(seeds=2).write()
    builder.run("sums", "matched", 1, loss=np.ones(61))
    with pytest.raises(InputError, match="did not score the same rows"):
        table(builder.folder)


def test_json_is_plain_and_csv_holds_the_same_numbers(whole):
    text = table(whole.folder, "json")
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["kind"] == "trained-table" and data["schema"] == 1
    lines = list(csv.DictReader(io.StringIO(table(whole.folder, "csv"))))
    assert {line["part"] for line in lines} >= {"run", "arm", "average", "contrast", "noise", "trial"}
    contrast = next(
        line
        for line in lines
        if (line["part"], line["task"], line["outcome"], line["own"]) == ("contrast", "words", "loss", "false")
        and (line["first"], line["second"]) == ("aqlora-q", "matched")
    )
    found = of(data, "aqlora-q", "matched", task="words")
    for name, value in (("difference", found["difference"]), ("p", found["p"]), ("corrected_p", found["adjusted"])):
        assert float(contrast[name]) == value
    assert float(contrast["low"]) == found["both"]["low"]
    runs = [line for line in lines if line["part"] == "run" and line["role"] == "arm" and line["own"] == "false"]
    assert len(runs) == 24 and all(float(line["loss"]) > 0 for line in runs)


def test_latex_escapes_names_and_balances_its_environments(made, trained):
    arms = [{"name": "q_lora"}, {"name": "a+b_c", "base": "none"}]
    builder = made(arms=arms, analysis={"baseline": "q_lora"}, tasks=("set_1",)).write()
    text = table(builder.folder, "latex")
    assert r"q\_lora" in text and "q_lora" not in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") > 2
    assert r"\ensuremath{\pm}" in text and "±" not in text and "−" not in text
    for line in text.splitlines():
        if " & " in line:
            assert line.endswith(r"\\")


def test_the_shell_prints_the_table_and_refuses_pairing_by_option(whole, tmp_path, capsys):
    from toolkit.cli import main

    out = tmp_path / "table.md"
    assert main(["table", str(whole.folder), "-o", str(out)]) == 0
    assert out.read_text().startswith("- Exploratory")
    assert main(["table", str(whole.folder), "--paired"]) == 2
    assert "analysis.paired" in capsys.readouterr().err


def test_results_are_confirmatory_under_a_lock_made_before_them(made):
    from toolkit.analysis.reading.trained import read
    from toolkit.records.lock import LOCK, Lock

    builder = made(seeds=4).write()
    results = read(builder.folder)
    lock = Lock(
        study=builder.study.name,
        form="full",
        analysis=builder.study.analysis,
        declaration=builder.study.declaration,
        code={"toolkit": "0"},
        model="tiny-llama",
        fingerprint=results.any.fingerprint,
        texts=results.texts,
        created="2025-12-31T00:00:00Z",
    )
    lock.save(builder.results / LOCK)
    assert "carry no lock" in " ".join(summary(builder.folder)["status"]["reasons"])
    for key in list(results.runs):
        builder.run(key.task, key.arm, key.seeds, lock=lock.hash)
    assert summary(builder.folder)["status"]["confirmatory"]
    (builder.results / "runs" / "sums--matched--seed3" / "report.json").unlink()
    assert "incomplete" in " ".join(summary(builder.folder)["status"]["reasons"])


@pytest.mark.slow
def test_two_hundred_reports_of_a_thousand_rows_take_seconds(made, trained):
    arms = [{"name": f"arm{n}", "protect": {"selector": "top-error", "budget": "layers=0.2"}} for n in range(1, 5)]
    builder = made(arms=[{"name": "qlora"}, *arms], tasks=("a", "b", "c", "d"), seeds=10, rows=1000).write()
    started = time.process_time()
    data = summary(builder.folder)
    assert data["reports"] == 200 and time.process_time() - started < 15  # 3.6 s when written


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (-0.00001, "0.0000"), (-1.5, "−1.5000"), (0.00005, "0.0001")])
def test_numbers_as_text(value, text):
    assert number(value) == text
    assert signed(value) == (text if value is None or abs(value) < 2e-5 or value < 0 else f"+{text}")


def test_a_fine_tuning_study_gets_no_certificate(made, tmp_path):
    from toolkit.analysis.certificates.certifying import certify

    builder = made(seeds=1).write()
    with pytest.raises(InputError, match="is a fine-tuning study"):
        certify(builder.folder, tmp_path / "control.json")
