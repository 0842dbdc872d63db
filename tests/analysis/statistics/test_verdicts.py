"""Verdicts from made-up evidence: what is claimed, under which law, in which words, and what is refused."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from toolkit.analysis.reading.evidence import Chance, Evidence, Judged, Room
from toolkit.analysis.statistics import inference
from toolkit.analysis.statistics.joint import joint
from toolkit.analysis.statistics.multiplicity import holm, max_t
from toolkit.analysis.statistics.verdicts import verdicts
from toolkit.errors import InputError
from toolkit.records.report import Law
from toolkit.records.study import Analysis, Headroom

BUDGETS = ("layers=0.05", "layers=0.1", "layers=0.2")
TEXTS = ("wikitext2", "python-topics")
LAWS = {
    "matched": {"selector": "random-matched", "chain": True},
    "shuffled": {"selector": "random-shuffle-matched"},
    "composed": {"selector": "random-matched(roles=true,thirds=true)", "holds": ["roles", "thirds"], "chain": True},
    "permuted": {"selector": "random-permuted", "holds": ["roles"], "shared": True, "single_total": True},
    "counted": {"selector": "random-count"},
}


def evidence(
    shifts=None,
    controls=("matched", "shuffled", "composed", "permuted"),
    budgets=BUDGETS,
    texts=TEXTS,
    draws=99,
    below=None,
    headroom=False,
    unit="nats a token",
    **analysis,
):
    """Arms `shift` standard deviations from draws around 3 nats; `below` lowers the draws of a control likewise."""
    shifts, below = shifts or {"top": -4.0, "other": 0.0}, below or {}
    rng = np.random.default_rng(0)
    arms = []
    for arm, shift in shifts.items():
        for at, budget in enumerate(budgets):
            chances = tuple(
                Chance(
                    control,
                    Law(options={}, like=arm, **LAWS[control]),
                    draws,
                    (0.05, 0.3) if control == "counted" else (0.0, 0.0005),
                    {t: 3 - 0.1 * at + 0.01 * (rng.normal(size=draws) + below.get(control, 0.0)) for t in texts},
                )
                for control in controls
            )
            outcomes = {t: 3 - 0.1 * at + 0.01 * shift for t in texts}
            rooms = {t: room(rng) for t in texts} if headroom else {}
            arms.append(Judged(arm, budget, f"{arm}-error", 1000, outcomes, chances, rooms))
    declared = Analysis(**{"control": controls[0], "test": "joint"} | analysis)
    return Evidence(texts, budgets, tuple(arms), declared, Headroom() if headroom else None, unit)


def room(rng):
    tokens, windows = np.full(8, 511), 8
    chance = tokens * (3 + 0.1 * rng.normal(size=windows))
    gains = {"arm": 0.01, "oracle": 0.05, "anti": -0.05}
    others = {n: chance - tokens * (g + 0.001 * rng.normal(size=windows)) for n, g in gains.items()}
    return Room(tokens, chance, **others, draws=chance.sum() / tokens.sum() + 0.005 * rng.normal(size=99))


def change(given, arm, budget, **values):
    """The evidence with fields of one judged arm replaced."""
    arms = tuple(dataclasses.replace(j, **values) if (j.arm, j.budget) == (arm, budget) else j for j in given.arms)
    return dataclasses.replace(given, arms=arms)


def outcomes(given, arm, control, text):
    """The arm's outcomes, (budgets,), and its draws', (budgets, n)."""
    judged = [j for j in given.arms if j.arm == arm]
    drawn = [next(c for c in j.chances if c.control == control).outcomes[text] for j in judged]
    return np.array([j.outcomes[text] for j in judged]), np.array(drawn)


def test_the_family_is_the_joint_test_corrected_by_holm():
    given = evidence(headroom=True)
    found = verdicts(given)
    assert [(c["arm"], c["text"], c["budget"]) for c in found["claims"]] == [
        (arm, text, None) for arm in ("top", "other") for text in TEXTS
    ]
    tests = [joint(*outcomes(given, c["arm"], "matched", c["text"]), "less") for c in found["claims"]]
    assert [c["p"] for c in found["claims"]] == [t.p for t in tests]
    assert [c["adjusted"] for c in found["claims"]] == pytest.approx(holm([t.p for t in tests]))
    assert [c["effect"]["standardized"] for c in found["claims"]] == [t.statistic for t in tests]
    assert [c["verdict"] for c in found["claims"]] == ["better", "better", "not separated", "not separated"]
    values, drawn = outcomes(given, "top", "matched", "wikitext2")
    gap = np.mean(values - np.median(drawn, axis=1))
    assert found["claims"][0]["effect"]["gap"] == pytest.approx(gap) and found["claims"][0]["budgets"] == list(BUDGETS)
    family = found["family"]
    assert (family["tests"], family["draws"], family["reachable"], family["descriptive"]) == (4, 99, 0.04, False)
    assert json.loads(json.dumps(found, allow_nan=False)) == found == verdicts(given)


def test_each_comparison_is_a_rank():
    given = evidence(test="each", correction="none")
    found = verdicts(given)
    assert len(found["comparisons"]) == 2 * 3 * 4 * 2 and len(found["claims"]) == 2 * 3 * 2
    for row in found["comparisons"]:
        values, drawn = outcomes(given, row["arm"], row["control"], row["text"])
        at = BUDGETS.index(row["budget"])
        place = inference.rank(values[at], drawn[at], "less")
        assert (row["p"], row["at_least_as_good"], row["draws"]) == (place.p, place.at_least_as_good, 99)
        assert (row["outcome"], row["median"]) == (values[at], np.median(drawn[at]))
        assert (row["smallest"], row["largest"]) == (drawn[at].min(), drawn[at].max())
        assert row["mean"] == pytest.approx(drawn[at].mean()) and row["sd"] == pytest.approx(drawn[at].std(ddof=1))
        assert row["exact"] == (row["control"] == "permuted") and not row["descriptive"]
    for claim in found["claims"]:
        same = {"arm", "budget", "control", "text"}
        row = next(r for r in found["comparisons"] if all(r[k] == claim[k] for k in same))
        assert claim["p"] == claim["adjusted"] == row["p"] and claim["effect"]["gap"] == row["gap"]


def test_joint_tests_stand_for_every_law_that_draws_families():
    found = verdicts(evidence())["joint"]
    assert {t["control"] for t in found} == {"matched", "composed", "permuted"} and len(found) == 2 * 3 * 2
    assert verdicts(evidence(budgets=BUDGETS[:1]))["joint"] == []


def test_max_t_over_shared_draws():
    given = evidence(control="permuted", correction="max-t", test="each")
    found = verdicts(given)
    rows = [outcomes(given, c["arm"], "permuted", c["text"]) for c in found["claims"]]
    at = [BUDGETS.index(c["budget"]) for c in found["claims"]]
    values = [v[b] for (v, _), b in zip(rows, at, strict=True)]
    drawn = np.array([d[b] for (_, d), b in zip(rows, at, strict=True)])
    assert [c["adjusted"] for c in found["claims"]] == pytest.approx(max_t(values, drawn, "less"))
    assert found["family"]["reachable"] == 0.01
    joint_family = verdicts(evidence(control="permuted", correction="max-t"))
    assert [c["verdict"] for c in joint_family["claims"]] == ["better", "better", "not separated", "not separated"]
    assert all(c["adjusted"] >= c["p"] for c in joint_family["claims"])


def test_the_other_tail_is_called_worse_and_margins_are_kept():
    found = verdicts(evidence({"top": -4.0, "bottom": 4.0}, margin=0.03, margin_reason="less is noise of training."))
    assert [c["verdict"] for c in found["claims"]] == ["better", "better", "worse", "worse"]
    assert "p of the other side = .010" in found["sentences"][2]
    found = verdicts(evidence({"top": -4.0}, margin=0.05, margin_reason="less is noise of training."))
    assert {c["verdict"] for c in found["claims"]} == {"better, below the margin"}
    assert (
        "The gap is less than the margin of 0.0500 (declared because: less is noise of training)."
        in (found["sentences"][0])
    )
    greater = verdicts(evidence({"top": -4.0, "bottom": 4.0}, side="greater"))
    assert [c["verdict"] for c in greater["claims"]] == ["worse", "worse", "better", "better"]


def test_too_few_draws_are_descriptive_and_say_so():
    found = verdicts(evidence(draws=10))
    assert found["family"]["descriptive"] and found["family"]["reachable"] == pytest.approx(4 / 11)
    assert {c["verdict"] for c in found["claims"]} == {"not separated"}
    assert "This is descriptive: 4 claims and 10 draws give no corrected p below .364" in found["sentences"][0]


def test_a_sentence_says_it_all():
    found = verdicts(evidence({"top-error": 0.5}, texts=("wikitext2",), draws=499))
    claim = found["claims"][0]
    p = f"{claim['p']:.3f}".lstrip("0")
    assert found["sentences"] == [
        "top-error is not separated from chance over 3 budgets of wikitext2: its loss is "
        f"{claim['effect']['gap']:.4f} nats a token above the median draw of matched, the mean over budgets, "
        f"{claim['effect']['standardized']:+.2f} standard deviations of the draws (p = {p}, corrected {p}; the "
        "smallest that 499 draws give is .002). The law is random-matched; p is a Monte Carlo value."
    ]
    with_room = verdicts(evidence({"top": -4.0}, texts=("a",), budgets=(None,), headroom=True, unit="nats"))
    assert with_room["sentences"][0].startswith("top is better than chance on a: its loss is 0.0")
    assert " nats below the median draw of matched, −" in with_room["sentences"][0]
    assert "On held-out windows, it goes 2" in with_room["sentences"][0]
    of_scores = verdicts(evidence({"top": -4.0}, texts=("loss",)))  # the scores of a file stand under their metric
    assert " chance over 3 budgets: its loss is " in of_scores["sentences"][0]


def test_laws_that_hold_composition_and_disagree():
    found = verdicts(evidence({"top": -4.0}, below={"composed": -4.0, "permuted": -4.0}))
    law = found["laws"][0]
    by_control = {t["control"]: t for t in law["tests"]}
    assert {c: t["verdict"] for c, t in by_control.items()} == {
        "matched": "better",
        "shuffled": "better",
        "composed": "not separated",
        "permuted": "not separated",
    }
    assert {c: t["test"] for c, t in by_control.items()} == {
        "matched": "joint",
        "shuffled": "bonferroni",
        "composed": "joint",
        "permuted": "joint",
    }
    assert by_control["shuffled"]["smallest_p"] == 0.03
    assert not law["agree"] and law["composition"] and law["corrected"] is False
    assert "composition, and not ranking, explains the difference" in law["sentence"]
    assert "composed, which holds roles and thirds (p = " in law["sentence"]


def test_laws_that_hold_the_same_and_disagree_are_told_plainly():
    law = verdicts(evidence({"top": -4.0}, below={"shuffled": -4.0}))["laws"][0]
    assert not law["agree"] and not law["composition"]
    assert "the verdict differs between laws" in law["sentence"] and "declared is matched" in law["sentence"]
    law = verdicts(evidence({"top": -4.0}))["laws"][0]
    assert law["agree"] and "every law gives the same verdict" in law["sentence"]
    law = verdicts(evidence({"top": -4.0}, controls=("matched",)))["laws"][0]
    assert law["agree"] and "the only law it was judged by" in law["sentence"]


def test_laws_do_not_disagree_over_the_margin():
    """Better by .04 under one law and by .02 under another, where .03 matters: one answer."""
    given = {"below": {"composed": -2.0}, "controls": ("matched", "composed")}
    law = verdicts(evidence({"top": -4.0}, margin=0.03, margin_reason="a test", **given))["laws"][0]
    assert [t["verdict"] for t in law["tests"]] == ["better", "better, below the margin"]
    assert law["agree"] and not law["composition"]


def test_a_control_of_other_memory_has_no_say():
    law = verdicts(evidence({"top": -4.0}, controls=("matched", "counted"), below={"counted": -9.0}))["laws"][0]
    assert law["agree"] and [t["counts"] for t in law["tests"]] == [True, False]
    assert law["tests"][1]["verdict"] == "worse" and "counted does not hold the arm's memory" in law["sentence"]


def test_draws_that_cannot_reach_the_level_have_no_say():
    """Ten draws give no p below .09: that they show nothing is no sign of composition."""
    given = evidence({"top": -4.0}, controls=("matched", "permuted"), draws=99)
    arms = []
    for judged in given.arms:
        first, second = judged.chances
        few = {text: values[:10] for text, values in second.outcomes.items()}
        arms.append(dataclasses.replace(judged, chances=(first, dataclasses.replace(second, outcomes=few))))
    law = verdicts(dataclasses.replace(given, arms=tuple(arms)))["laws"][0]
    assert [t["verdict"] for t in law["tests"]] == ["better", "not separated"]
    assert law["agree"] and not law["composition"]
    assert "permuted cannot tell: its draws give no p below .091." in law["sentence"]
    law = verdicts(evidence({"top": -4.0}, controls=("matched", "permuted"), draws=10))["laws"][0]
    assert "no law has the draws to reach the level 0.05" in law["sentence"]


def test_exclusions_are_listed_and_not_tested():
    gone = [{"arm": "other", "reason": "not of interest"}, {"text": "python-topics", "reason": "a pilot"}]
    found = verdicts(evidence(exclusions=gone))
    assert [(c["arm"], c["text"]) for c in found["claims"]] == [("top", "wikitext2")]
    assert [(e["arm"], e["text"], e["reason"]) for e in found["excluded"]] == [
        ("top", "python-topics", "a pilot"),
        ("other", "wikitext2", "not of interest"),
        ("other", "python-topics", "not of interest"),
    ]
    assert found["family"]["tests"] == 1 and len(found["sentences"]) == 1 and len(found["comparisons"]) == 48


def test_an_excluded_budget_leaves_a_joint_test():
    gone = [{"budget": BUDGETS[0], "reason": "a pilot."}]
    given = evidence({"top": -4.0}, texts=("a",), exclusions=gone)
    found = verdicts(given)
    values, drawn = outcomes(given, "top", "matched", "a")
    assert found["claims"][0]["p"] == joint(values[1:], drawn[1:], "less").p
    assert found["claims"][0]["budgets"] == list(BUDGETS[1:]) and "over 2 budgets of a" in found["sentences"][0]
    assert all(t["budgets"] == list(BUDGETS[1:]) for t in found["laws"][0]["tests"])
    assert found["notes"] == ["top on a: layers=0.05 is left out of the joint test: a pilot."]
    everything = [{"budget": b, "reason": "a pilot"} for b in BUDGETS]
    found = verdicts(evidence({"top": -4.0}, texts=("a",), exclusions=everything))
    assert found["claims"] == [] and found["excluded"][0]["reason"].startswith("layers=0.05: a pilot; ")
    assert found["family"]["descriptive"] and "There is no claim to test" in found["notes"][0]
    each = verdicts(evidence({"top": -4.0}, texts=("a",), exclusions=gone, test="each"))
    assert [c["budget"] for c in each["claims"]] == list(BUDGETS[1:]) and each["excluded"][0]["budget"] == BUDGETS[0]


def test_a_control_that_an_arm_lacks_is_noted():
    given = evidence()
    given = change(given, "top", BUDGETS[0], chances=given.arms[0].chances[1:])
    given = change(given, "other", BUDGETS[1], chances=given.arms[4].chances[:1])
    found = verdicts(given)
    assert found["claims"][0]["budgets"] == list(BUDGETS[1:])
    assert found["notes"][0] == "top has no draws of matched at layers=0.05: no claim is made of it there."
    assert "other has no draws of permuted at layers=0.1: its verdict there stands without them." in found["notes"]
    arms = tuple(j if j.arm == "top" else dataclasses.replace(j, chances=j.chances[1:]) for j in evidence().arms)
    found = verdicts(dataclasses.replace(evidence(), arms=arms))
    assert {c["arm"] for c in found["claims"]} == {"top"}
    assert found["notes"] == ["other has no draws of matched: no claim is made of it there."]


def test_arms_that_are_declared_are_the_family():
    found = verdicts(evidence(arms=["other"]))
    assert {c["arm"] for c in found["claims"]} == {"other"} and {r["arm"] for r in found["comparisons"]} == {
        "top",
        "other",
    }


def test_one_budget_or_none_needs_no_family():
    for budgets in (BUDGETS[:1], (None,)):
        given = evidence({"top": -4.0}, controls=("shuffled",), budgets=budgets, texts=("a",))
        found = verdicts(given)
        values, drawn = outcomes(given, "top", "shuffled", "a")
        assert found["claims"][0]["p"] == inference.rank(values[0], drawn[0], "less").p
        assert found["claims"][0]["test"] == "rank" and found["claims"][0]["budget"] is None


def test_the_replica_counts_this_studys_settings():
    given = evidence()
    for row in verdicts(given)["replica"]:
        values, drawn = outcomes(given, row["arm"], row["control"], row["text"])
        assert row["settings"] == row["sign_test"]["total"] == 3
        assert row["sign_test"]["better"] == (values < np.median(drawn, axis=1)).sum()
        assert row["draw_count"]["better"] == (drawn < values[:, None]).sum() and row["draw_count"]["total"] == 297
        assert row["sign_test"]["label"] == row["draw_count"]["label"] == "assumes independence"


def test_headroom_stands_beside_the_claims():
    found = verdicts(evidence(headroom=True))
    assert len(found["headroom"]) == 2 * 3 * 2
    assert found["sentences"][0].count("of the way from chance to the oracle") == 3
    assert "At layers=0.05, it goes " in found["sentences"][0]


@pytest.mark.parametrize(
    ("analysis", "message"),
    [
        ({"control": "shuffled"}, "control 'shuffled' draws no nested families; declare `chain: true`"),
        ({"correction": "max-t"}, "arms do not share the draws of control 'matched'; declare a control whose law perm"),
        ({"control": "mached"}, "analysis.control names 'mached'.*did you mean 'matched'"),
        ({"arms": ["tip"]}, "analysis.arms names 'tip'.*did you mean 'top'"),
    ],
)
def test_what_cannot_be_tested_is_refused_with_what_to_declare(analysis, message):
    with pytest.raises(InputError, match=message):
        verdicts(evidence(**analysis))


def with_draws(given, arm, at, control, edit):
    """The evidence with one control's outcomes edited for one arm at one budget."""
    judged = next(j for j in given.arms if (j.arm, j.budget) == (arm, BUDGETS[at]))
    chances = tuple(
        dataclasses.replace(c, outcomes={t: edit(np.array(v)) for t, v in c.outcomes.items()})
        if c.control == control
        else c
        for c in judged.chances
    )
    return change(given, arm, BUDGETS[at], chances=chances)


def test_unlike_numbers_of_draws():
    short = with_draws(evidence(), "top", 1, "matched", lambda v: v[:50])
    with pytest.raises(
        InputError, match=r"unlike numbers of draws of 'matched': 99 at layers=0\.05, 50 at layers=0\.1"
    ):
        verdicts(short)
    each = dataclasses.replace(short, analysis=Analysis(control="matched", test="each"))
    assert verdicts(each)["family"]["draws"] == 50
    beside = dataclasses.replace(short, analysis=Analysis(control="permuted", test="joint"))
    assert verdicts(beside)["laws"][0]["tests"][0]["test"] == "bonferroni"  # a joint test of those draws there is not
    shared = evidence(control="permuted", correction="max-t", test="each")
    with pytest.raises(InputError, match="unlike numbers of draws of 'permuted': 50, 99"):
        verdicts(with_draws(shared, "top", 1, "permuted", lambda v: v[:50]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_named(bad):
    def spoil(row):
        row[7] = bad
        return row

    place = f"arm 'top' at layers=0.1, control 'shuffled', text 'wikitext2', draw 7: the outcome is {bad}"
    with pytest.raises(InputError, match=place):
        verdicts(with_draws(evidence(), "top", 1, "shuffled", spoil))
    with pytest.raises(InputError, match=f"arm 'top' at layers=0.1, text 'wikitext2': the outcome is {bad}"):
        verdicts(change(evidence(), "top", BUDGETS[1], outcomes=dict.fromkeys(TEXTS, bad)))


def test_what_is_missing_or_given_twice_is_named():
    with pytest.raises(InputError, match="no outcome on 'wikitext2'; did you mean 'wikitext'"):
        verdicts(change(evidence(), "top", BUDGETS[1], outcomes={"wikitext": 1.0}))
    given = evidence()
    with pytest.raises(InputError, match=r"arm 'top' was given twice at layers=0\.05"):
        verdicts(dataclasses.replace(given, arms=(*given.arms, given.arms[0])))
    with pytest.raises(InputError, match=r"budget 'layers=0\.2'; did you mean"):
        verdicts(dataclasses.replace(given, budgets=BUDGETS[:2]))
    with pytest.raises(InputError, match="nothing to judge"):
        verdicts(dataclasses.replace(given, arms=()))
    with pytest.raises(InputError, match="there is no draw"):
        verdicts(with_draws(given, "top", 0, "matched", lambda v: v[:0]))
    with pytest.raises(InputError, match="declares no headroom"):
        verdicts(dataclasses.replace(evidence(headroom=True), headroom=None))


def test_verdicts_load_neither_scipy_nor_torch():
    heavy = "[m for m in ('scipy', 'torch', 'pandas') if m in sys.modules]"
    code = f"import sys, toolkit.analysis.statistics.verdicts; print({heavy})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
