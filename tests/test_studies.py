"""The committed study: its certificate verifies against its own reports, and its README says what they hold."""

import json
import re
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.records.certificate import Certificate

STUDY = Path(__file__).parent.parent / "studies" / "ranking-control"


@pytest.mark.slow
def test_the_committed_certificate_verifies():
    """Every draw made again, every number computed again, every report hashed."""
    found = tk.verify(STUDY / "control.json", STUDY / "results")
    assert found.draws == 17_049 and found.reports == 92
    assert found.certificate.exploratory == []


def test_four_laws_families_and_headroom_are_in_it():
    certificate = Certificate.load(STUDY / "control.json")
    laws = {c.law.selector: c.law for c in certificate.controls}
    assert set(laws) >= {
        "random-matched",
        "random-matched(thirds=true,roles=true)",
        "random-permuted",
        "random-shuffle-matched",
    }
    assert laws["random-matched"].chain and laws["random-permuted"].shared
    assert all(c.law.expected and c.law.feasible_subsets for c in certificate.controls)
    assert {(h["arm"], h["text"]) for h in certificate.verdicts["headroom"]} == {
        (arm.label, text) for arm in certificate.study.arms for text in certificate.texts
    }


def test_the_readmes_numbers_are_those_of_the_certificate():
    """The p-values and headrooms that the study's README quotes."""
    text = " ".join((STUDY / "README.md").read_text(encoding="utf-8").split())
    verdicts = json.loads((STUDY / "control.json").read_text(encoding="utf-8"))["verdicts"]
    claims = {(c["arm"], c["text"]): c for c in verdicts["claims"]}
    shown = re.search(r"joint p (\.\d+) \(WikiText-2\) and (\.\d+) \(help texts\)", text)
    assert [f"{claims['top-error', t]['p']:.3f}"[1:] for t in ("wikitext2", "python-topics")] == list(shown.groups())
    depth = re.search(r"p = (\.\d+) on WikiText-2, (\.\d+) after correction for eight claims", text)
    found = claims["depth", "wikitext2"]
    assert [f"{found['p']:.3f}"[1:], f"{found['adjusted']:.3f}"[1:]] == list(depth.groups())
    worse = re.search(r"corrected p of the other side (\.\d+)", text)
    assert f"{claims['bottom-error', 'python-topics']['opposite']['adjusted']:.3f}"[1:] == worse[1]
    rooms = [h["headroom"] for h in verdicts["headroom"] if h["arm"] == "top-error"]
    low, high = re.search(r"`top-error` goes −(\d+)% to −(\d+)% of the way", text).groups()
    assert (round(-100 * min(rooms)), round(-100 * max(rooms))) == (int(low), int(high))
    assert all(h["separated"] and h["oracle_test"]["p"] == 1 / 500 for h in verdicts["headroom"])
    gains = [h["losses"]["chance"] - h["losses"]["oracle"] for h in verdicts["headroom"]]
    least, most = re.search(r"every arm, budget and text, by (\.\d+) to (\.\d+) nats", text).groups()
    assert (f"{min(gains):.2f}"[1:], f"{max(gains):.2f}"[1:]) == (least, most)
