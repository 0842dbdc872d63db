"""Timing sessions in tables: floors, margins, what is kept, and what is never called a gain."""

import json
import math
import re

import numpy as np
import pytest
import scipy.stats

from toolkit.analysis.printing.table import table
from toolkit.analysis.printing.trained.summary import summary
from toolkit.errors import InputError

ARMS = [{"name": "qlora"}, {"name": "fast"}, {"name": "same"}]


def speeds(base=(1.0, 1.002, 0.999), fast=1.1, same=1.001):
    """(arm, duplicate) → five rounds: the arm's speed, two slower rounds that the fastest half leaves out."""
    rounds = np.array([1.0, 0.9, 1.0, 0.8, 1.0])
    found = {("qlora", n): list(v * rounds) for n, v in enumerate(base)}
    found |= {("fast", 0): list(fast * rounds), ("fast", 1): list(fast * 1.001 * rounds)}
    return found | {("same", 0): list(same * rounds)}


@pytest.fixture
def timed(made):
    builder = made(arms=ARMS, seeds=1)
    return builder


def test_a_sessions_floor_and_margins_are_those_by_hand(timed):
    timed.session("s1", speeds())
    data = summary(timed.folder)["timing"]
    session = data["sessions"][0]
    logs = np.log([1.0, 1.002, 0.999])
    floor = math.expm1(scipy.stats.t.ppf(0.975, 2) * math.sqrt(2) * logs.std(ddof=1))
    assert session["floor"] == pytest.approx(floor) and session["kept"] is (floor < 0.03)
    assert session["single_gap"] == pytest.approx(0.002)
    fast = next(a for a in session["arms"] if (a["arm"], a["duplicate"]) == ("fast", 0))
    assert fast["fastest_half"] == pytest.approx(1.1)  # three of five rounds
    assert fast["median"] == pytest.approx(1.1) and fast["best"] == pytest.approx(1.1)
    assert fast["mean"] == pytest.approx(1.1 * 4.7 / 5)
    assert fast["tokens_per_second"] == pytest.approx(64 * 1.1)
    assert fast["faster"] == pytest.approx(1.1 / math.exp(logs.mean()) - 1)
    assert fast["paired_ratio"] == pytest.approx(1.1 / math.exp(logs.mean()))
    assert fast["verdict"] == "faster"
    same = next(a for a in session["arms"] if a["arm"] == "same")
    assert same["verdict"] == "within the floor"


def test_no_margin_inside_its_floor_is_printed_as_a_gain(timed):
    for name in ("s1", "s2"):
        timed.session(name, speeds())
    text = table(timed.folder)
    rows = [line for line in text.splitlines() if re.match(r"\|[^|]*\| same|\| same", line)]
    assert len(rows) >= 4  # over sessions, other estimators, two sessions
    assert all("+" not in line and "faster" not in line for line in rows if "within" in line)
    assert any("within the floor (0.1%)" in line for line in rows)
    assert "same is not told from qlora in speed" in text
    assert "fast is 10.0% faster than qlora over 2 sessions" in text


@pytest.mark.parametrize(("gap", "verdict"), [(0.004, "within the floor"), (0.02, "faster"), (-0.02, "slower")])
def test_a_verdict_is_the_margins_beside_the_floor(timed, gap, verdict):
    timed.session("s1", speeds(same=1 + gap))
    data = summary(timed.folder)["timing"]
    found = next(a for a in data["arms"] if a["arm"] == "same")
    assert found["verdict"] == verdict and (abs(found["faster"]) > data["sessions"][0]["floor"]) is (
        verdict != "within the floor"
    )


def test_sessions_at_or_above_the_limit_are_kept_out_but_shown(timed):
    timed.session("clean", speeds())
    timed.session("noisy", speeds(base=(1.0, 1.05, 0.97), fast=2.0))
    data, text = summary(timed.folder)["timing"], table(timed.folder)
    assert [s["kept"] for s in data["sessions"]] == [True, False] and data["kept"] == 1
    fast = next(a for a in data["arms"] if a["arm"] == "fast")
    assert (fast["sessions"], fast["kept_out"]) == (1, 1) and fast["faster"] == pytest.approx(0.0996, abs=1e-3)
    assert "Kept out, because the floor is not below 3%: noisy" in text and "session kept out" in text
    assert "how sessions spread is not known" in text


def test_one_gap_would_have_kept_a_session_that_the_bound_keeps_out(timed):
    """The first two runs agree by chance; the third does not."""
    timed.session("s1", speeds(base=(1.0, 1.001, 1.03)))
    session = summary(timed.folder)["timing"]["sessions"][0]
    assert session["single_gap"] < 0.03 <= session["floor"] and not session["kept"]


def test_where_no_session_is_kept_nothing_is_claimed(timed):
    timed.session("s1", speeds(base=(1.0, 1.05, 0.97)))
    assert "no session was kept, and nothing is claimed" in table(timed.folder)


@pytest.mark.parametrize(("count", "form"), [(1, "one"), (2, "range"), (3, "range"), (4, "t"), (5, "t")])
def test_few_sessions_are_a_range_and_four_or_more_an_interval(timed, count, form):
    margins = [0.10, 0.12, 0.09, 0.11, 0.13][:count]
    for n, value in enumerate(margins):
        timed.session(f"s{n}", speeds(base=(1.0, 1.0, 1.0), fast=1 + value))
    found = next(a for a in summary(timed.folder)["timing"]["arms"] if a["arm"] == "fast")
    assert found["form"] == form and found["faster"] == pytest.approx(np.mean(margins))
    if form == "one":
        assert found["low"] is None
    elif form == "range":
        assert (found["low"], found["high"]) == pytest.approx((min(margins), max(margins)))
    else:
        low, high = scipy.stats.t.interval(0.95, count - 1, np.mean(margins), scipy.stats.sem(margins))
        assert (found["low"], found["high"]) == pytest.approx((low, high))


def test_sessions_of_one_allocation_are_marked(timed, trained):
    from toolkit.records.session import Machine

    for name in ("s1", "s2"):
        timed.session(name, speeds(), machine=Machine(host="node", device="cpu", allocation="boot-1"))
    timed.session("s3", speeds())
    data, text = summary(timed.folder)["timing"], table(timed.folder)
    assert [s["independent"] for s in data["sessions"]] == [False, False, True] and data["allocations"] == 2
    assert not next(a for a in data["arms"] if a["arm"] == "fast")["independent"]
    assert "Not independent: sessions s1, s2 share an allocation" in text and "no: shares its allocation" in text


def test_memory_profile_throttling_and_other_load_are_shown(timed):
    path = timed.session("s1", speeds())
    data = json.loads(path.read_text())
    data["arms"][1]["samples"][2] |= {"throttled": ["thermal"], "load": ["python 4711"]}
    path.write_text(json.dumps(data))
    text = table(timed.folder)
    assert "throttled: thermal; other load: python 4711" in text
    assert "matrix products" in text and "60%" in text
    assert re.search(r"\| fast +\| +1.00 \| +2.00 \| +6.00 \| +9.00 \| +\+3.00 \|", text)


def test_the_cost_of_another_lever_is_named(made):
    """An arm with deterministic kernels, declared as a factor, stands beside the baseline with its lever."""
    arms = [*ARMS[:2], {"name": "same", "levers": {"deterministic": True}}]
    builder = made(arms=arms, seeds=1, factors=["deterministic"]).write()
    path = builder.session("s1", speeds(same=0.8))
    data = json.loads(path.read_text())
    data["arms"][-1]["levers"]["deterministic"] = True
    path.write_text(json.dumps(data))
    text = table(builder.folder)
    assert "slower; deterministic = True" in text  # of the session
    assert "| deterministic = True |" in text  # of the arm's runs
    assert "same is 20.0% slower than qlora" in text


def test_what_deterministic_kernels_cost_is_said(timed):
    path = timed.session("s1", speeds())
    data = json.loads(path.read_text())
    base = data["arms"][0]["samples"]
    for factor, said in (
        (1.25, "Deterministic kernels cost: qlora is 25.0% faster without them in session s1 (floor"),
        (1.0, "Deterministic kernels cost qlora no time beyond the floor of"),
    ):
        path.write_text(json.dumps(data | {"free": [s | {"seconds": s["seconds"] / factor} for s in base]}))
        assert said in table(timed.folder)
        found = summary(timed.folder)["timing"]["sessions"][0]["deterministic"]
        assert found["paired_ratio"] == pytest.approx(factor / (1.002 * 0.999) ** (1 / 3))
    path.write_text(json.dumps(data | {"free": base[:-1]}))
    with pytest.raises(InputError, match="need not be deterministic has rounds"):
        summary(timed.folder)


def test_a_session_of_another_declaration_is_labelled(timed):
    timed.session("s1", speeds(), declaration="0" * 64)
    assert "timed under another version of the study's file" in table(timed.folder)


def test_sessions_alone_make_a_table(timed):
    timed.session("s1", speeds())
    data = summary(timed.folder)
    assert data["arms"] == [] and data["timing"]["sessions"] and data["status"]["confirmatory"] is False
    for format in ("md", "latex", "csv", "json"):
        assert "fast" in table(timed.folder, format)


@pytest.mark.parametrize(("key", "value"), [("fingerprint", "0" * 64), ("form", "small")])
def test_sessions_of_other_weights_or_form_than_the_runs_are_refused(timed, key, value):
    timed.write().session("s1", speeds(), **{key: value})
    with pytest.raises(InputError, match="the timing sessions are of"):
        summary(timed.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(study="other"), "session of study 'other'"),
        (lambda d: d["arms"].pop(1), "has 2 runs, and a noise floor asks for three"),
        (lambda d: d["arms"][0]["samples"].pop(), r"arm 'qlora', duplicate 0, has rounds \[0, 1, 2, 3\]"),
        (lambda d: d["arms"].append(d["arms"][0]), "stands 2 times"),
        (lambda d: d["arms"][0]["samples"][0].update(seconds=float("inf")), "steps in inf seconds"),
        (lambda d: d["arms"][0]["samples"][0].update(seconds=-1), "seconds"),
        (lambda d: d["arms"][0]["samples"][0].update(steps=0), "0 steps"),
        (lambda d: d.update(schema=9), "schema 9"),
    ],
)
def test_a_session_that_does_not_fit_is_refused_by_name(timed, change, message):
    path = timed.session("s1", speeds())
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message) as caught:
        summary(timed.folder)
    assert "s1.json" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "other"),
        ("fingerprint", "0" * 64),
        ("form", "small"),
        ("task", "other"),
        ("batches", [{"examples": 1, "real": 1, "target": 1, "computed": 1}]),
    ],
)
def test_sessions_that_do_not_belong_together_are_refused(timed, key, value):
    for name in ("s1", "s2"):
        timed.session(name, speeds())
    timed.session("s3", speeds(), **{key: value})
    with pytest.raises(InputError, match=r"differ in .*s3\.json"):
        summary(timed.folder)
