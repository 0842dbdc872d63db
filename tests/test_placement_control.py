"""The committed results of placement-control: its table is printed from them, and the README holds.

Means are taken from the reports as plain JSON; p-values and verdicts from the table's own data. Two things that the
README tells are in no file and are not tested: why there is no lock, and for how long other tests used the device.
"""

from __future__ import annotations

import json
import re
import statistics

import pytest

from tests.committed import Committed, git, p_of, section, shown, signed
from toolkit.records.finetuning import FineTuning

RAN = Committed("placement-control")
TASKS = {"SST-2": "sst2", "ARC-E": "arc-easy"}
RULES = ("density", "weight-norm", "depth")
ARMS = ("all-layers", *(f"{rule}{control}" for rule in RULES for control in ("", "-matched", "-count")))
DECLARED, CODE = "337b836", "42b63b8"


def adapters(report: dict, shapes: dict[str, tuple[int, int]]) -> int:
    """r·(d_out + d_in) over the layers that the report's plan adapts: those it names, or else its default."""
    plan = report["plan"]
    of = {name: plan["layers"].get(name, plan["default"]).get("adapter") for name in shapes}
    return sum(adapter["rank"] * sum(shapes[name]) for name, adapter in of.items() if adapter)


def parameters(arm: str) -> set[int]:
    """An arm's adapter parameters, over its runs."""
    return {r["course"]["trainable"] for r in RAN.reports if (r["role"], r["arm"]) == ("arm", arm)}


def verdicts(task: str, second: str) -> dict[str, str]:
    """rule → verdict of rule − its control (`matched` or `count`)."""
    return {rule: RAN.contrast(task, f"{rule} − {rule}-{second}")["verdict"] for rule in RULES}


# -- the files ---------------------------------------------------------------------------------------------------------


def test_the_committed_table_is_what_is_printed():
    assert RAN.printed == (RAN.folder / "table.md").read_text(encoding="utf-8")


def test_every_declared_run_is_there_once_and_finished():
    assert "10 arms × 2 tasks × 6 seeds = 120 runs, 6 repeats, 2 untrained ones; 150 steps of batch 32" in RAN.readme
    roles = [r["role"] for r in RAN.reports]
    assert {role: roles.count(role) for role in set(roles)} == {"arm": 10 * 2 * 6, "repeat": 3 * 2, "untrained": 2}
    assert RAN.table["missing"] == [] and RAN.table["unfinished"] == []
    keys = {(r["role"], r["task"], r["arm"], tuple(r["seeds"].values())) for r in RAN.reports}
    assert len(keys) == len(RAN.reports) == 128 and all(r["finished"] for r in RAN.reports)
    trained = [r for r in RAN.reports if r["role"] != "untrained"]
    assert {(r["course"]["steps"], r["levers"]["batch"]) for r in trained} == {(150, 32)}


def test_what_ran_is_what_is_declared():
    """The folders of the rows are the machine's; all else is the file's, the rows of each report included."""
    assert "`results/study.json`) says the same" in RAN.prose
    ran = FineTuning.load(RAN.results / "study.json")
    assert ran == RAN.study and ran.model_copy(update={"seeds": 7}) != RAN.study
    assert len({tuple(r[split]["sha256"] for split in ("train", "test")) for r in RAN.reports}) == len(TASKS)


def test_it_is_exploratory_since_there_is_no_lock():
    assert "**Not locked.**" in RAN.prose and "the table therefore calls itself exploratory" in RAN.prose
    assert not (RAN.results / "lock.json").exists() and all(r.get("lock") is None for r in RAN.reports)
    status = RAN.table["status"]
    (reason,) = status["reasons"]
    assert status["confirmatory"] is False and status["lock"] is None and reason.startswith("there is no lock.json")
    assert RAN.printed.startswith("- Exploratory: there is no lock.json")


def test_the_declaration_is_older_than_the_runs_and_was_not_changed():
    assert f"`study.yaml` as it stands since commit {DECLARED}, seven hours before the runs" in RAN.prose
    file = "studies/placement-control/study.yaml"
    assert git(DECLARED, "show", f"{DECLARED}:{file}") == (RAN.folder / "study.yaml").read_bytes()
    assert git(DECLARED, "log", "-1", "--format=%H", "--", file).decode().startswith(DECLARED)
    committed = int(git(DECLARED, "show", "--no-patch", "--format=%ct", DECLARED))
    assert round((RAN.spans[0][0] - committed) / 3600) == 7


def test_the_code_is_of_the_last_commit_before_the_first_run():
    assert f"At commit {CODE} (the machine had no git repository, so the reports name none)" in RAN.prose
    assert not any("commit" in r["provenance"] for r in RAN.reports)
    before = git(CODE, "rev-list", "-1", "--first-parent", f"--before={int(RAN.spans[0][0])}", "HEAD")
    assert before.decode().startswith(CODE)


# -- the README --------------------------------------------------------------------------------------------------------


def test_the_readmes_table_holds_the_reports_means_and_adapters():
    header, untrained, *lines = RAN.rows
    outcomes = [f"{task}, {outcome}" for task in TASKS.values() for outcome in ("loss", "accuracy")]
    assert header == ["arm", "adapter parameters", *outcomes]
    scores = [(f"{RAN.untrained[task]['loss']:.3f}", RAN.percent(task, "untrained")) for task in TASKS.values()]
    assert untrained == ["untrained", "", *(cell for both in scores for cell in both)]
    assert tuple(line[0] for line in lines) == ARMS
    for arm, shares, *cells in lines:
        low, high = min(parameters(arm)), max(parameters(arm))
        assert shares == (f"{low:,}" if low == high else f"{low:,} to {high:,}")
        assert cells == [
            cell
            for task in TASKS.values()
            for cell in (shown(statistics.mean(RAN.arms[task, arm, "loss"]), 4), RAN.percent(task, arm))
        ]
    assert {len(values) for values in RAN.arms.values()} == {6} and "mean over six seeds" in RAN.prose


def test_the_adapters_are_those_of_the_plans_and_matched_ones_are_as_large():
    shapes = {one["name"]: one["shape"] for one in json.loads((RAN.results / "profile.json").read_bytes())["layers"]}
    trained = [r for r in RAN.reports if r["role"] != "untrained"]
    assert len(shapes) == 210 and all(r["course"]["trainable"] == adapters(r, shapes) for r in trained)
    for rule in RULES:
        assert parameters(f"{rule}-matched") == parameters(rule) and len(parameters(rule)) == 1
    for rule in ("density", "weight-norm"):
        assert max(parameters(f"{rule}-count")) < min(parameters(rule))


def test_the_contrasts_and_their_correction():
    """Differences are the reports' means; corrected p are Holm's over the declared contrasts, stepped down here."""
    declared = (len(RAN.study.arms) - 1 + len(RAN.study.analysis.pairs)) * len(TASKS)
    assert f"p corrected by Holm over the {declared} declared contrasts" in RAN.prose and declared == 30
    for outcome in ("loss", "score"):
        of = [c for c in RAN.table["contrasts"] if c["outcome"] == outcome and c["task"] in TASKS.values()]
        assert len(of) == 30 and {(c["family"], c["primary"]) for c in of} == {(30, outcome == "loss")}
        least = 0.0
        for rank, one in enumerate(sorted(of, key=lambda c: c["p"])):
            least = max(least, min(1.0, (30 - rank) * one["p"]))
            assert one["adjusted"] == pytest.approx(least, rel=1e-12)
            gap = RAN.gap(one["task"], f"{one['first']} − {one['second']}", outcome)
            assert one["difference"] == pytest.approx(gap, abs=1e-12)


def test_the_control_decides():
    controls = ("count", "matched")
    count, matched = (RAN.contrast("arc-easy", f"density − density-{control}") for control in controls)
    assert (count["verdict"], matched["verdict"]) == ("equivalent", "worse")
    told = "On ARC-E the densest layers are equivalent to as many random layers"
    assert f"{told} ({signed(count['difference'], 4)} nats), whose adapters are smaller" in RAN.prose
    told = "and *worse* than random layers whose adapters are as large"
    assert f"{told} ({signed(matched['difference'], 4)}, {p_of(matched['adjusted'])})" in RAN.prose
    of_count, of_matched = (RAN.contrast("arc-easy", f"weight-norm − weight-norm-{control}") for control in controls)
    assert (of_count["verdict"], of_matched["verdict"]) == ("not separated", "worse")
    told = f"weight norm: not separated from as many layers ({signed(of_count['difference'], 4)}), worse than as many"
    p = p_of(of_matched["adjusted"])
    assert f"{told} parameters ({signed(of_matched['difference'], 4)}, {p})" in RAN.prose
    # in whatever family a study without the other control had corrected them
    assert "the count-matched control alone would have found neither rule worse than chance there" in RAN.prose
    assert min(count["p"], of_count["p"]) > RAN.study.analysis.level
    near = [one["adjusted"] for one in (matched, of_matched)]
    assert "two p-values just below .05 in point 1" in RAN.readme and all(0.04 < p < 0.05 for p in near)


def test_no_rule_beats_chance():
    assert "**No rule beats chance.**" in RAN.prose
    all_of = [verdicts(task, second) for task in (*TASKS.values(), RAN.all_tasks) for second in ("matched", "count")]
    assert "better" not in {verdict for of in all_of for verdict in of.values()}
    equivalent = {"density": "equivalent", "weight-norm": "equivalent", "depth": "not separated"}
    assert verdicts("sst2", "matched") == verdicts("sst2", "count") == equivalent
    pairs = [f"{rule} − {rule}-{second}" for rule in RULES[:2] for second in ("matched", "count")]
    gaps = [RAN.gap("sst2", words) for words in pairs]
    low, high = signed(min(gaps), 4), signed(max(gaps), 4)
    told = f"On SST-2 density and weight norm are equivalent to both of their controls (from {low} to {high} nats)"
    assert f"{told}; depth is not separated from its own" in RAN.prose


def test_depth_is_behind_at_less_memory():
    matched = RAN.contrast("arc-easy", "depth − depth-matched")
    assert verdicts("arc-easy", "matched")["depth"] == verdicts("arc-easy", "count")["depth"] == "worse"
    told = f"{signed(matched['difference'], 4)} nats against random layers of as many adapter parameters"
    assert f"**Depth is well behind on ARC-E**, as in the paper: {told} ({p_of(matched['adjusted'])})" in RAN.prose
    score = RAN.contrast("arc-easy", "depth − depth-matched", "score")
    assert score["verdict"] == "not separated" and score["difference"] < 0 and score["family"] == 30
    told = f"Its {-100 * score['difference']:.1f} points less accuracy are not separated ({p_of(score['adjusted'])}"
    assert f"{told}, corrected over the 30 contrasts of accuracy)" in RAN.prose
    shares = [100 * RAN.peaks[task, "depth"] / RAN.peaks[task, "all-layers"] for task in TASKS.values()]
    low, high = map(int, re.search(r"(\d+) to (\d+)% of the peak memory of `all-layers`", RAN.prose).groups())
    assert (low, high) == (round(min(shares)), round(max(shares)))


def test_half_of_the_layers_cost_something():
    gaps = {task: {arm: RAN.gap(task, f"{arm} − all-layers") for arm in ARMS[1:]} for task in TASKS.values()}
    found = {
        task: [RAN.contrast(task, f"{arm} − all-layers")["verdict"] for arm in ARMS[1:]] for task in TASKS.values()
    }
    assert found["arc-easy"] == ["worse"] * 9 and "every arm is worse than `all-layers` there" in RAN.prose
    least, most = (of(gaps["arc-easy"], key=gaps["arc-easy"].get) for of in (min, max))
    low, high = (shown(gaps["arc-easy"][arm], 3) for arm in (least, most))
    assert f"by {low} ({least}) to {high} nats ({most})" in RAN.prose
    low, high = (shown(of(gaps["sst2"].values()), 3) for of in (min, max))
    assert min(gaps["sst2"].values()) > 0 and f"On SST-2 the nine arms are behind by {low} to {high}" in RAN.prose
    assert sorted(found["sst2"]) == ["not separated"] * 5 + ["worse"] * 4
    assert "the correction leaves four of them apart" in RAN.prose


def test_four_runs_under_the_same_seeds_are_one():
    """Their scores, and every row's loss and prediction: the hash of the rows is the same."""
    assert "Four runs under the same seeds agree to the last digit on both tasks" in RAN.prose
    for task in TASKS.values():
        runs = [r for r in RAN.reports if (r["task"], r["arm"]) == (task, "all-layers") and r["role"] != "untrained"]
        again = [r for r in runs if (r["seeds"]["adapter"], r["seeds"]["data"], r["seeds"]["draw"]) == (0, 0, 0)]
        assert sorted(r["seeds"]["repeat"] for r in again) == [0, 1, 2, 3]
        assert len({(r["scores"][""]["loss"], r["scores"][""]["score"], r["rows"]["sha256"]) for r in again}) == 1
        assert (
            len({r["rows"]["sha256"] for r in runs}) == 6 and statistics.stdev(RAN.arms[task, "all-layers", "loss"]) > 0
        )
    noise = {(one["task"], one["outcome"]): one for one in RAN.table["noise"]}
    assert len(noise) == 4 and all(one["identical"] and one["repeats"] == 4 for one in noise.values())


def test_how_it_was_run():
    device = {(r["provenance"]["device"], r["provenance"]["compute_dtype"]) for r in RAN.reports}
    assert device == {("NVIDIA H200", "bfloat16")} and "One NVIDIA H200, bfloat16" in RAN.prose
    versions = {name: {r["provenance"]["packages"][name] for r in RAN.reports} for name in ("torch", "transformers")}
    assert versions == {"torch": {"2.11.0"}, "transformers": {"5.17.0"}}
    assert "torch 2.11, transformers 5.17" in RAN.prose
    rows = {(r["task"], r["train"]["rows"], r["train"]["found"], r["test"]["rows"]) for r in RAN.reports}
    assert rows == {("sst2", 4000, 4000, 872), ("arc-easy", 2251, 2251, 1000)}
    assert "4,000 training rows of SST-2 (a sample), all of ARC-E" in RAN.prose
    label = "1 of 1000 scored rows stand among the training rows"
    labels = {(r["task"], *r["labels"]) for r in RAN.reports if r["role"] != "untrained"}
    assert labels == {("sst2",), ("arc-easy", label)} and RAN.printed.count(label) == len(ARMS)
    assert "One of the 1,000 scored rows of ARC-E stands among its training rows too; the table flags it" in RAN.prose
    assert "seconds of training are no timing measurement" in RAN.printed and "say nothing of speed" in RAN.prose


def test_the_time_that_it_took_and_the_pieces():
    """Runs that were stopped were begun again, and their first part is in no report: minutes have a range."""
    words = r"The (\d+) runs took (\d) to (\d) minutes \(what was stopped is in no report\), (\d) to (\d) side by side"
    runs, least, most, low, high = map(int, re.search(words, RAN.prose).groups())
    assert runs == len(RAN.reports)
    assert (least, most) == (round(RAN.busy / 60), round(RAN.whole / 60))
    assert low <= RAN.side_by_side <= high == low + 1
    assert len(RAN.pieces) == 2 and "in two pieces (stopped and resumed once;" in RAN.prose


def test_what_it_cannot_show():
    told = section(RAN.readme, "What it cannot show")
    assert "Whether a rule's two controls differ from each other: no such contrast is declared." in told
    pairs = [(c["first"], c["second"]) for c in RAN.table["contrasts"]]
    assert not any({f"{rule}-matched", f"{rule}-count"} == set(pair) for rule in RULES for pair in pairs)
    assert "150 steps are the beginning" in told and "of one model, one task and six seeds" in told
