"""Certificates: made from results, verified from nothing but themselves, and refused after any edit, which is named."""

import copy
import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.analysis.certificates.certifying import certify
from toolkit.analysis.certificates.draw_check import draw_complaints
from toolkit.analysis.certificates.verification import verify
from toolkit.cli import main
from toolkit.errors import InputError
from toolkit.records.certificate import Certificate, CertifiedDraws, render, seal_of, tied
from toolkit.records.report import Law
from toolkit.registry import register, registry


@pytest.fixture(scope="module")
def data(certified):
    return json.loads(certified[1].read_text())


@pytest.fixture
def edited(data, tmp_path):
    """Apply a change to the certificate's plain data; `reseal` makes a forgery whose seal and bytes are right."""

    def make(change, reseal=True):
        forged = copy.deepcopy(data)
        change(forged)
        if reseal:
            forged["seal"] = seal_of(forged)
        path = tmp_path / "control.json"
        path.write_text(render(forged))
        return path

    return make


@pytest.fixture
def folder(certified, tmp_path):
    """A copy of the study that may be changed."""
    return shutil.copytree(certified[0].folder, tmp_path / "study")


def control(data, name="matched", arm="top-error", budget="layers=0.1"):
    return next(c for c in data["controls"] if (c["control"], c["arm"], c["budget"]) == (name, arm, budget))


def arm(data, name="top-error", budget="layers=0.2"):
    return next(a for a in data["arms"] if (a["arm"], a["budget"]) == (name, budget))


def canonical(value):
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def refused(path, *said, results=None):
    with pytest.raises(InputError) as error:
        verify(path, results)
    for part in said:
        assert part in str(error.value), str(error.value)
    return str(error.value)


# what is in it


def test_a_certificate_is_verified(certified):
    made, path = certified
    found = verify(path, made.folder)
    assert (found.arms, found.controls) == (4, 14) and found.draws == 12 * 9 + 2 * 7
    assert found.numbers > 500 and found.rounded == 0 and found.reports == len(list(made.results.glob("*/report.json")))
    assert not found.certificate.exploratory and not found.certificate.missing


def test_its_numbers_are_those_of_the_reports(certified, data):
    made, _ = certified
    for item in data["controls"]:
        run = f"{item['budget'].replace('=', '-')}--{item['arm']}--{item['control']}"
        report = json.loads((made.results / run / "report.json").read_text())
        for text, values in item["outcomes"].items():
            assert values == [draw["scores"][text]["loss"] for draw in report["draws"]]
        assert item["law"] == report["law"] and item["seed"] == report["seed"] == 7
        for at, draw in enumerate(report["draws"]):
            names = [n for bit, n in enumerate(made.names) if int(draw["mask"], 16) >> bit & 1]
            outcomes = {text: values[at] for text, values in item["outcomes"].items()}
            layers = canonical([made.profile.fingerprint, names])
            assert item["hashes"][at] == canonical([layers, outcomes])[:16]
        off = (
            np.array([draw["parameters"] for draw in report["draws"]])
            / arm(data, item["arm"], item["budget"])["parameters"]
        )
        assert item["mismatch"]["mean"] == pytest.approx((off - 1).mean(), abs=1e-15)
    for item in data["arms"]:
        report = json.loads(
            (made.results / f"{item['budget'].replace('=', '-')}--{item['arm']}" / "report.json").read_text()
        )
        assert item["outcomes"] == {text: score["loss"] for text, score in report["scores"].items()}
    for run, sha in data["reports"].items():
        assert hashlib.sha256((made.results / run / "report.json").read_bytes()).hexdigest() == sha


def test_its_seal_is_the_hash_of_all_the_rest(data):
    assert data["seal"] == canonical({k: v for k, v in data.items() if k != "seal"})


def test_its_verdicts_count_its_own_numbers(data):
    for row in data["verdicts"]["comparisons"]:
        drawn = control(data, row["control"], row["arm"], row["budget"])["outcomes"][row["text"]]
        value = arm(data, row["arm"], row["budget"])["outcomes"][row["text"]]
        assert row["p"] == (1 + sum(d <= value for d in drawn)) / (1 + len(drawn))
        assert row["gap"] == pytest.approx(value - np.median(drawn), abs=1e-15)


def test_its_windows_add_up(certified, data):
    for item in data["arms"]:
        for room in item["headroom"].values():
            assert len(room["arm"]) == 3 and set(room["tokens"]) == {511}
            drawn = control(data, "matched", item["arm"], item["budget"])
            assert np.mean(room["draws"]) == pytest.approx(sum(room["chance"]) / sum(room["tokens"]), rel=1e-12)
            assert len(room["draws"]) == len(drawn["hashes"])


def test_one_file_gives_one_text(certified, tmp_path):
    made, path = certified
    certify(made.results, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    loaded = Certificate.load(path)
    assert render(loaded.to_json()) == path.read_text() and loaded.sealed() == loaded


def test_a_certificate_of_17000_draws_stays_below_4_megabytes(data):
    big = copy.deepcopy(data)
    item = control(big)
    hashes = [f"{at:016x}" for at in range(499)]
    outcomes = {text: (np.random.default_rng(0).normal(3, 0.1, 499)).tolist() for text in item["outcomes"]}
    law = item["law"] | {"inclusion": np.random.default_rng(1).random(210).tolist(), "feasible_subsets": 10**70 + 1}
    big["controls"] = [item | {"hashes": hashes, "outcomes": outcomes, "law": law}] * 35
    text = render(big)
    assert json.loads(text) == big and 35 * 499 > 17_000
    assert len(text.encode()) < 4e6
    assert max(map(len, text.splitlines())) < 60_000  # one control a line


# draws


@pytest.mark.parametrize("reseal", [False, True])
@pytest.mark.parametrize("name", ["matched", "permuted", "composition", "count-matched"])
@pytest.mark.parametrize("at", [0, 3, -1])
def test_an_altered_score_is_laid_to_its_draw(edited, name, at, reseal):
    def change(data):
        control(data, name)["outcomes"]["wikitext2"][at] += 1e-9

    number = at % (7 if name == "count-matched" else 9)
    refused(edited(change, reseal), f"draw {number} of control {name} of top-error at layers=0.1 was altered")


@pytest.mark.parametrize("reseal", [False, True])
@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_missing_draw_is_named(edited, at, reseal):
    def change(data):
        item = control(data)
        for row in (item["hashes"], *item["outcomes"].values()):
            del row[at]

    message = refused(edited(change, reseal), f"draw {at} of control matched of top-error at layers=0.1 is missing")
    assert "altered" not in message and message.count("draw ") == 1


def test_several_missing_draws_are_named(edited):
    def change(data):
        item = control(data)
        for row in (item["hashes"], *item["outcomes"].values()):
            row[:] = row[2:5] + row[6:]

    message = refused(edited(change), "draw 0 of", "draw 1 of", "draw 5 of")
    assert message.count("is missing") == 3 and "altered" not in message


@pytest.mark.parametrize("place", [0, 5, 9])
def test_an_additional_draw_is_named(edited, data, place):
    layers = canonical([data["profile"]["fingerprint"], [data["profile"]["layers"][0]["name"]]])

    def change(forged):
        item = control(forged)
        for values in item["outcomes"].values():
            values.insert(place, 2.5)
        item["hashes"].insert(place, tied(layers, dict.fromkeys(item["outcomes"], 2.5)))

    message = refused(
        edited(change), "control matched of top-error at layers=0.1 has an additional draw", f"place {place}"
    )
    assert "missing" not in message and "altered" not in message


def test_a_draw_that_stands_twice_is_named(edited):
    def change(data):
        item = control(data)
        for row in (item["hashes"], *item["outcomes"].values()):
            row.append(row[2])

    refused(edited(change), "additional draw", "draw 2 stands again at place 9")


def test_draws_in_another_order_are_found(edited):
    def change(data):
        item = control(data)
        for row in (item["hashes"], *item["outcomes"].values()):
            row[1], row[6] = row[6], row[1]

    message = refused(edited(change), "the draws were put in another order")
    assert "missing" not in message and "altered" not in message


def test_a_resealed_forgery_with_another_set_is_named(edited, data):
    """A draw that its law does not give, its hash and the seal made right, as a forger would."""
    names = [row["name"] for row in data["profile"]["layers"]]
    layers = canonical([data["profile"]["fingerprint"], names[:4]])

    def change(forged):
        item = control(forged)
        item["hashes"][5] = tied(layers, {text: values[5] for text, values in item["outcomes"].items()})

    refused(edited(change), "draw 5 of control matched of top-error at layers=0.1 was altered")


def test_a_hash_or_an_outcome_alone_cannot_go(edited):
    refused(edited(lambda d: control(d)["hashes"].pop(3)), "draw 3 of control matched", "lacks its hash or an outcome")
    refused(edited(lambda d: control(d)["outcomes"]["wikitext2"].pop()), "draw 8 of", "8 outcomes on wikitext2")


def test_draws_of_another_seed_are_others_as_a_whole(edited):
    def change(data):
        data["study"]["seed"] = 8
        data["lock"] = None
        data["exploratory"] = ["no lock"]
        for item in data["controls"]:
            item["seed"] = 8

    refused(
        edited(change), "the 9 draws of control matched of top-error at layers=0.1 are not those that its law gives"
    )


LAW = Law(selector="x", options={}, like="arm")
LAYERS = [hashlib.sha256(str(at).encode()).hexdigest() for at in range(12)]


def drawn(order, values, forged=()):
    outcomes = {"text": [values[at] for at in order]}
    hashes = ["f" * 16 if place in forged else tied(LAYERS[at], {"text": values[at]}) for place, at in enumerate(order)]
    fields = {
        "control": "c",
        "arm": "arm",
        "law": LAW,
        "seed": 0,
        "asked": 12,
        "mismatch": {"mean": 0.0, "largest": 0.0},
    }
    return CertifiedDraws(**fields, hashes=hashes, outcomes=outcomes)


@settings(deadline=None)
@given(
    gone=st.sets(st.integers(0, 11), max_size=4),
    altered=st.sets(st.integers(0, 11), max_size=4),
    values=st.lists(st.floats(0, 9, allow_nan=False), min_size=12, max_size=12),
)
def test_every_missing_and_altered_draw_is_told_apart(gone, altered, values):
    """Any draws taken out, any others altered; of an altered one beside a gap, which it was cannot be told."""
    order = [at for at in range(12) if at not in gone]
    altered = {at for at in altered - gone if not {at - 1, at + 1} & gone and not {at - 1, at + 1} & altered}
    said = list(draw_complaints(drawn(order, values, {order.index(at) for at in altered}), LAYERS, "C"))
    missing = {int(s.split()[1]) for s in said if s.endswith("is missing")}
    changed = {int(s.split()[1]) for s in said if "was altered" in s}
    assert (missing, changed) == (gone, altered) and len(said) == len(gone) + len(altered)


@settings(deadline=None)
@given(order=st.permutations(range(12)))
def test_an_order_is_kept(order):
    said = list(draw_complaints(drawn(order, [float(at) for at in range(12)]), LAYERS, "C"))
    assert (not said) is (order == sorted(order))
    assert all("another order" in s for s in said)


# everything else


@pytest.mark.parametrize("reseal", [False, True])
def test_an_altered_arm_is_named(edited, reseal):
    def outcome(data):
        arm(data)["outcomes"]["wikitext2"] -= 0.01

    def window(data):
        arm(data)["headroom"]["wikitext2"]["oracle"][1] += 1

    def layers(data):
        arm(data)["mask"] = hex(int(arm(data)["mask"], 16) ^ 1)

    def selector(data):
        arm(data)["selector"] = "bottom-error"

    refused(edited(outcome, reseal), "arm top-error at layers=0.2 was altered: its outcomes or scored windows")
    refused(edited(window, reseal), "arm top-error at layers=0.2 was altered: its outcomes or scored windows")
    refused(edited(layers, reseal), "arm top-error at layers=0.2 was altered: its mask is 0x")
    refused(edited(selector, reseal), "arm top-error at layers=0.2 was altered: its selector is bottom-error")


def test_arms_and_controls_are_those_declared(edited):
    refused(edited(lambda d: d["arms"].pop()), "arm bottom-error at layers=0.2 is missing")
    refused(edited(lambda d: d["arms"].append(d["arms"][0])), "arm top-error at layers=0.1 stands twice")
    refused(edited(lambda d: arm(d).update(arm="other")), "arm other at layers=0.2 is additional")
    gone = edited(lambda d: d["controls"].remove(control(d, "composition")))
    refused(gone, "control composition of top-error at layers=0.1 is missing")
    refused(edited(lambda d: control(d)["outcomes"].pop("wikitext2")), "has outcomes on python-topics")
    refused(edited(lambda d: d["texts"].pop("wikitext2")), "the study declares python-topics, wikitext2")


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda law: law.update(feasible_subsets=law["feasible_subsets"] + 1), "feasible subsets"),
        (lambda law: law["inclusion"].__setitem__(4, law["inclusion"][4] + 1e-6), "inclusion"),
        (lambda law: law["expected"].update(q_proj=3.0), "expected count per role"),
        (lambda law: law.update(chain=not law["chain"]), "chain"),
        (lambda law: law.update(shared=True), "shared"),
        (lambda law: law.update(holds=["everything"]), "holds"),
        (lambda law: law.update(like="bottom-error"), "like"),
        (lambda law: law.update(selector="random-count"), "selector"),
        (lambda law: law["options"].update(within="0.5"), "options"),
        (lambda law: law.update(single_total=not law["single_total"]), "single total"),
    ],
)
def test_an_altered_law_is_named(edited, change, said):
    refused(
        edited(lambda d: change(control(d)["law"])),
        f"control matched of top-error at layers=0.1 was altered: its {said} is",
    )


def test_an_altered_mismatch_seed_or_family_is_named(edited):
    where = "control count-matched of top-error at layers=0.1 was altered: its "
    refused(edited(lambda d: control(d, "count-matched")["mismatch"].update(mean=0.0)), f"{where}mismatch is")
    refused(edited(lambda d: control(d, "count-matched").update(seed=3)), f"{where}seed is 3, and the study declares 7")
    refused(edited(lambda d: control(d, "count-matched").update(asked=3)), f"{where}asked is 3")
    refused(edited(lambda d: control(d).update(family=["layers=0.1"])), "its family is ['layers=0.1']")


def test_a_changed_profile_is_named(edited, data):
    def row(forged):
        forged["profile"]["layers"][7]["norm"] += 1.0

    refused(edited(row), "the profile is not the one that the certificate was made with")

    def forged_whole(forged):  # the largest error of all: another layer is ranked first
        forged["profile"]["layers"][7]["error"]["nf4"]["mse"] = 1.0
        forged["profile_hash"] = canonical(forged["profile"])

    refused(edited(forged_whole), "arm top-error at layers=0.1 was altered: its mask")


def test_a_changed_declaration_is_named(edited):
    refused(edited(lambda d: d["study"]["analysis"].update(level=0.1)), "level was 0.05 and is now 0.1")
    refused(edited(lambda d: d["study"].update(question="?")), "the study was changed after it was locked")
    refused(edited(lambda d: d.pop("lock")), "it holds no lock, and states no reason to be exploratory")
    refused(edited(lambda d: d["lock"].update(fingerprint="cd" * 32)), "the weights are not those that were locked")
    refused(edited(lambda d: d["texts"]["wikitext2"].update(sha256="00" * 32)), "text 'wikitext2' is not the one")
    refused(edited(lambda d: d["study"]["controls"][0].update(draws=8)), "its asked is 9, and the study declares 8")


def sound_but(edited, change):
    """A forgery of which everything that is computed is right: hashes, verdicts, seal."""
    from toolkit.analysis.certificates.certifying import evidence_of, scored
    from toolkit.analysis.statistics.verdicts import verdicts
    from toolkit.records.io import parse

    def forge(data):
        change(data)
        for item, made in zip(data["arms"], parse(Certificate, data, "it").arms, strict=True):
            item["scored"] = scored(made.hash, made.outcomes, made.headroom)
        data["verdicts"] = json.loads(json.dumps(verdicts(evidence_of(parse(Certificate, data, "it")))))

    return edited(forge)


def room(data):
    return arm(data)["headroom"]["wikitext2"]


def shortened(data):
    for key in ("tokens", "chance", "arm", "oracle", "anti"):
        del room(data)[key][-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: arm(d).update(headroom={}), "layers=0.2 lacks its scored windows of text 'python-topics', and the"),
        (lambda d: arm(d)["headroom"].pop("wikitext2"), "lacks its scored windows of text 'wikitext2'"),
        (lambda d: arm(d)["headroom"].update(more=room(d)), "holds scored windows of 'more', for which the study"),
        (shortened, "are scored"),
        (lambda d: room(d)["tokens"].__setitem__(0, 1), "and others are stated"),
        (lambda d: room(d)["draws"].pop(), "the scored windows are of 8 draws, and the control has 9"),
        (lambda d: room(d)["chance"].__setitem__(0, 5.0), "the mean of the draws is"),
        (lambda d: room(d)["draws"].__setitem__(0, 5.0), "the mean of the draws is"),
        (lambda d: d["texts"]["wikitext2"].update(windows=0), "text 'wikitext2' has 0 windows"),
        (lambda d: d["reports"].clear(), "it names 0 reports, and its numbers are of"),
        (lambda d: d["reports"].update({next(iter(d["reports"])): "none"}), "has hash none, which is no SHA-256"),
        (lambda d: d["lock"].update(created="2999-01-01T00:00:00+00:00"), "its lock is younger than its first run"),
        (lambda d: d["lock"].update(created="once"), "its lock was made once, and its first run started"),
        (lambda d: d["provenance"].update(started=None), "its first run started None: no times"),
    ],
)
def test_what_a_whole_certificate_holds_cannot_go(edited, change, said):
    refused(sound_but(edited, change), said)


def test_windows_too_large_to_be_squared_are_named(edited):
    path = edited(lambda d: room(d)["arm"].__setitem__(0, 1e308))
    refused(path, "number 0 of the arm windows on wikitext2 is 1e+308")


def test_a_forgery_without_a_change_is_the_certificate(edited, certified):
    assert sound_but(edited, lambda d: None).read_text() == certified[1].read_text()


def test_an_altered_verdict_is_named(edited):
    def p(data):
        data["verdicts"]["claims"][0]["p"] = 0.001

    def sentence(data):
        data["verdicts"]["sentences"][1] = "top-error is better."

    refused(edited(p), "verdicts.claims.0 (top-error, matched, python-topics).p was altered: 0.001 is stated")
    refused(edited(sentence), "verdicts.sentences.1 was altered: top-error is better.")
    refused(edited(lambda d: d["verdicts"]["claims"].pop()), "verdicts.claims has 3 items, and 4 are computed")
    refused(edited(lambda d: d["verdicts"].pop("laws")), "verdicts.laws is missing")
    refused(edited(lambda d: d["verdicts"].update(more=1)), "verdicts.more is additional")
    refused(edited(lambda d: d["verdicts"]["family"].update(descriptive=1)), "verdicts.family.descriptive was altered")


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_integer_beyond_every_float_is_named(edited, value):
    refused(edited(lambda d: d["verdicts"]["claims"][0].update(p=value)), "p was altered")
    refused(edited(lambda d: d["verdicts"]["comparisons"][0].update(median=value)), "median was altered")


def test_what_only_the_seal_covers(edited, data):
    changed = [
        lambda d: d["reports"].update({next(iter(d["reports"])): "0" * 64}),
        lambda d: d["provenance"].update(device="another"),
        lambda d: d.update(settings="0" * 64),
        lambda d: d.update(seal="0" * 64),
    ]
    for change in changed:
        refused(edited(change, reseal=False), "it was edited after it was sealed")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_scores_that_are_no_numbers_are_named(edited, text):
    def score(data):
        control(data, "permuted")["outcomes"]["wikitext2"][2] = float(text)

    def own(data):
        arm(data)["outcomes"]["wikitext2"] = float(text)

    def window(data):
        arm(data)["headroom"]["wikitext2"]["chance"][1] = float(text)

    refused(
        edited(score, reseal=False), "draw 2 of control permuted of top-error at layers=0.1: its outcome on wikitext2"
    )
    refused(edited(own, reseal=False), "arm top-error at layers=0.2: its outcome on wikitext2 is")
    refused(edited(window, reseal=False), "number 1 of the chance windows on wikitext2")
    refused(edited(lambda d: d["verdicts"]["claims"][0].update(p=float(text)), reseal=False), "p was altered")
    refused(edited(lambda d: d["profile"]["layers"][0].update(norm=float(text)), reseal=False), "the profile is not")
    refused(edited(lambda d: d["provenance"].update(device=float(text)), reseal=False), "that no certificate holds")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": 2, "kind": "certificate"}', "\x00"]
)
def test_no_certificates(tmp_path, content):
    path = tmp_path / "control.json"
    path.write_text(content)
    refused(path, str(path))


def test_another_text_of_the_same_content_is_refused(certified, tmp_path):
    path = tmp_path / "control.json"
    plain = certified[1].read_text()
    others = [
        plain.rstrip("\n"),
        plain + "\n",
        json.dumps(json.loads(plain)),
        plain.replace("\n", "\r\n"),
        "\ufeff" + plain,
    ]
    others.append(plain.replace("{\n", '{\n"settings":"another, and then its own",\n', 1))
    for text in others:
        path.write_bytes(text.encode())
        refused(path, "its bytes were edited, although it still says the same")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(edit=st.data())
def test_one_edited_byte_anywhere_is_refused(certified, tmp_path_factory, edit):
    content = bytearray(certified[1].read_bytes())
    at = edit.draw(st.integers(0, len(content) - 1), label="place")
    how = edit.draw(st.sampled_from(["other", "digit", "removed", "doubled", "bit"]), label="how")
    if how == "removed":
        del content[at]
    elif how == "doubled":
        content.insert(at, content[at])
    elif how == "bit":
        content[at] ^= 1 << edit.draw(st.integers(0, 7))
    else:
        pool = b"0123456789" if how == "digit" else bytes(range(256))
        content[at] = edit.draw(st.sampled_from([b for b in pool if b != content[at]]))
    path = tmp_path_factory.getbasetemp() / "byte.json"
    path.write_bytes(bytes(content))
    refused(path, str(path))


# results that give none


def test_missing_runs_are_named(folder, tmp_path):
    shutil.rmtree(folder / "results" / "layers-0.2--top-error--matched")
    shutil.rmtree(folder / "results" / "layers-0.1--bottom-error--anti-oracle")
    shutil.rmtree(folder / "results" / "repeat--base")
    out = tmp_path / "control.json"
    with pytest.raises(
        InputError, match=r"lacks 3 runs of the study: the base once more, anti-oracle of bottom-error at "
    ):
        certify(folder, out)
    assert not out.exists()


def test_a_partial_certificate_is_exploratory(folder, tmp_path):
    shutil.rmtree(folder / "results" / "layers-0.2--bottom-error--composition")
    shutil.rmtree(folder / "results" / "layers-0.1--bottom-error--permuted")
    out = tmp_path / "control.json"
    made = certify(folder, out, partial=True)
    assert "control composition of bottom-error at layers=0.2" in made.missing and len(made.missing) == 2
    assert "the study is incomplete: 2 of its runs are missing" in made.exploratory[-1]
    assert verify(out, folder).controls == 12
    forged = json.loads(out.read_text())
    forged["missing"] = []
    out.write_text(render(forged | {"seal": seal_of(forged)}))
    refused(out, "control composition of bottom-error at layers=0.2 is missing")


def test_draws_whose_arm_left_no_run_are_not_certified_and_not_asked_for(folder, tmp_path):
    shutil.rmtree(folder / "results" / "layers-0.1--bottom-error")
    out = tmp_path / "control.json"
    made = certify(folder, out, partial=True)
    assert made.missing == ["arm bottom-error at layers=0.1"]
    assert not [item for item in made.controls if (item.arm, item.budget) == ("bottom-error", "layers=0.1")]
    verify(out, folder)


def test_draws_that_the_law_does_not_give_are_not_certified(builder, tmp_path):
    made = builder(draws=5, budgets=("layers=0.1",), count_matched=False)
    made.write(rows=True)
    with pytest.raises(InputError, match="would not be sound, and was not written"):
        certify(made.folder, tmp_path / "control.json", partial=True)
    assert not (tmp_path / "control.json").exists()


def edit_report(path, change):
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))


def test_a_study_without_a_lock_is_certified_as_exploratory(folder, tmp_path):
    (folder / "results" / "lock.json").unlink()
    made = certify(folder, tmp_path / "control.json")
    assert made.lock is None and "lock.json is missing" in made.exploratory[0]
    assert verify(tmp_path / "control.json", folder).certificate.exploratory
    assert main(["verify", str(tmp_path / "control.json")]) == 0


def test_nan_scores_mixed_models_and_other_profiles_give_no_certificate(folder, tmp_path):
    path = folder / "results" / "layers-0.1--top-error--matched" / "report.json"
    kept = path.read_text()
    edit_report(path, lambda r: r["draws"][3]["scores"]["wikitext2"].update(loss=float("nan")))
    with pytest.raises(InputError, match=r"report\.json"):
        certify(folder, tmp_path / "control.json")
    path.write_text(kept)
    edit_report(path, lambda r: r.update(fingerprint="cd" * 32))
    with pytest.raises(InputError, match="differ in weights fingerprint"):
        certify(folder, tmp_path / "control.json")
    path.write_text(kept)
    profile = folder / "results" / "profile.json"
    edit_report(profile, lambda p: p.update(fingerprint="cd" * 32))
    with pytest.raises(InputError, match="whose weights have changed since"):
        certify(folder, tmp_path / "control.json")
    profile.unlink()
    with pytest.raises(InputError, match=r"there is no profile\.json"):
        certify(folder, tmp_path / "control.json")


@pytest.mark.parametrize("run", ["layers-0.1--top-error--matched", "layers-0.1--top-error"])
def test_a_report_that_its_rows_contradict_gives_no_certificate(folder, tmp_path, run):
    def change(report):
        scores = report["draws"][3]["scores"] if report.get("draws") else report["scores"]
        scores["wikitext2"]["loss"] += 0.01

    edit_report(folder / "results" / run / "report.json", change)
    with pytest.raises(InputError, match=rf"{run}/report\.json: .*text 'wikitext2': the loss is .*rows\.jsonl\.gz"):
        certify(folder, tmp_path / "control.json")
    assert not (tmp_path / "control.json").exists()


def test_a_profile_whose_errors_changed_gives_no_certificate(folder, tmp_path):
    edit_report(folder / "results" / "profile.json", lambda p: p["layers"][7]["error"]["nf4"].update(mse=1.0))
    with pytest.raises(InputError, match=r"arm top-error at layers=0\.1 was altered: its mask"):
        certify(folder, tmp_path / "control.json")


def test_reports_are_compared(certified, folder):
    path = certified[1]
    report = folder / "results" / "layers-0.1--top-error--matched" / "report.json"
    kept = report.read_text()
    report.write_text(kept + " ")
    refused(path, "report layers-0.1--top-error--matched in", "is another", results=folder)
    report.write_text(kept)
    shutil.copytree(report.parent, report.parent.with_name("more"))
    refused(path, "report more in", "is additional", results=folder)
    shutil.rmtree(report.parent.with_name("more"))
    shutil.rmtree(report.parent)
    refused(path, "report layers-0.1--top-error--matched is missing", results=folder)


def test_invented_losses_are_found_with_the_reports_alone(certified, edited, tmp_path):
    """The limit that `verify` states: losses that were never measured, everything else made right."""
    from toolkit.analysis.certificates.certifying import evidence_of, scored
    from toolkit.analysis.statistics.verdicts import verdicts
    from toolkit.records.io import parse

    def change(data):
        item = arm(data)
        item["outcomes"]["wikitext2"] -= 0.05
        made = parse(Certificate, data, "it")
        one = next(a for a in made.arms if (a.arm, a.budget) == ("top-error", "layers=0.2"))
        item["scored"] = scored(one.hash, one.outcomes, one.headroom)
        data["verdicts"] = json.loads(json.dumps(verdicts(evidence_of(made))))

    path = edited(change)
    assert "This does not show that the losses were measured as stated" in verify(path).text
    refused(path, "say otherwise: arms.2 (top-error, layers=0.2).outcomes.wikitext2", results=certified[0].folder)


def test_a_plug_in_that_is_not_installed_is_named(builders, tmp_path):
    from toolkit import RankingSelector

    @register
    class Strange(RankingSelector):
        """Widest first."""

        name = "strange-widest"

        def score(self, profile):
            return profile["out_features"]

    name = f"{Strange.__module__}.{Strange.__qualname__}:inline"
    try:
        study = builders.make_full_study(
            budgets=("layers=0.1",),
            test="each",
            headroom=None,
            repeat=False,
            controls=[{"selector": "random-matched", "name": "matched", "draws": 5}],
            extra_arms=("strange-widest",),
        )
        made = builders.Builder(tmp_path / "study", study, real=True, blocks=4)
        made.write(rows=True)
        certify(made.folder, tmp_path / "control.json")
        verify(tmp_path / "control.json")
    finally:
        registry.manager.unregister(name=name)
        registry._found.clear()
    refused(tmp_path / "control.json", "'strange-widest', which is not installed here (it came from", "Strange")


def test_the_commands(certified, tmp_path, capsys):
    made, path = certified
    out = tmp_path / "control.json"
    assert main(["certify", str(made.folder), "-o", str(out)]) == 0
    name = f"control-{json.loads(path.read_text())['seal'][:12]}"
    assert capsys.readouterr().out == f"{name}\n"
    assert main(["verify", str(out), "--results", str(made.folder)]) == 0
    said = capsys.readouterr().out
    for part in (f"{name} is sound", "122 draws of 14 controls", "@misc{" + name, "measured as stated", "In study "):
        assert part in said
    out.write_text(out.read_text().replace("0", "1", 1))
    assert main(["verify", str(out)]) == 2
    assert main(["certify", str(tmp_path / "nothing"), "-o", str(out)]) == 2
    assert main(["certify", str(made.folder), "-o", str(tmp_path)]) == 2


def test_verifying_needs_no_torch(certified):
    code = (
        "import sys; from toolkit.cli import main; assert main(['verify', sys.argv[1]]) == 0; "
        "bad = {'torch', 'transformers', 'bitsandbytes', 'scipy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, str(certified[1])], check=True, capture_output=True)


def test_a_certificate_of_another_version(edited):
    """Its sentences may be worded otherwise, and those of this version are shown; its numbers may not differ."""

    def reworded(data):
        data["provenance"]["certified_with"] = "0.0.9"
        data["verdicts"]["sentences"][0] = "top-error is wonderful."

    found = verify(edited(reworded))
    assert (
        found.reworded == 1
        and "1 of the sentences are worded otherwise" in found.text
        and "wonderful" not in found.text
    )

    def number(data):
        reworded(data)
        data["verdicts"]["claims"][0]["p"] = 0.001

    refused(edited(number), "p was altered", "(it was certified with toolkit 0.0.9, and this is 0.1.0)")
