"""The methods paragraph says what the certificate holds, figure by figure; its BibTeX entry parses."""

import json
import re

import pytest

from toolkit.analysis.certificates import methods
from toolkit.records.certificate import Certificate
from toolkit.records.study import Exclusion


@pytest.fixture(scope="module")
def certificate(certified):
    return Certificate.load(certified[1])


def changed(certificate, **study):
    return certificate.model_copy(update={"study": certificate.study.model_copy(update=study)})


def test_the_paragraph_states_what_was_done(certified, certificate):
    data = json.loads(certified[1].read_text())
    text = methods.paragraph(certificate)
    assert "\n" not in text and text.endswith(f"from certificate control-{data['seal'][:12]} (toolkit verify).")
    facts = [
        "top-error and bottom-error each chose the layers of SmolLM2-135M-Instruct (dequantized Q4_1)",
        "weights abababababab; 42 layers, 21,233,664 parameters",
        "2 budgets (layers=0.1 and layers=0.2)",
        "chance under 4 laws, drawn with seed 7",
        "matched (random-matched), 9 nested families over 2 budgets for each arm, parameters matched to within 0.1%",
        "permuted (random-permuted), 9 permutations of the layers, the same for all arms and budgets",
        "with the arm's roles and thirds held",
        "count-matched (random-count), 7 draws for top-error, layers matched exactly",
        "the mean over budgets of the gap divided by the standard deviation was ranked among whole families",
        "one-sided (lower is better), p = (1 + draws at least as good)/(draws + 1)",
        "Holm's correction over the family of 4 claims at level 0.05; 9 draws give no p below .100 (corrected, .400)",
        "a gap below 0.005 does not matter: half a percent of perplexity",
        "reference selections at the arms' memory within 0.1%, fitted on the first half of the windows (sweep)",
        "The results are descriptive: the analysis was locked on 2025-12-31T00:00:00Z",
        "before the first run, and the draws cannot reach its level.",
        "toolkit 0.1.0 in float32 on cpu",
    ]
    for name, about in data["texts"].items():
        facts.append(f"{name} (SHA-256 {about['sha256'][:12]}, 3,072 tokens, 6 windows of 512)")
    for claim in data["verdicts"]["claims"]:
        facts.append(f"{claim['arm']} on {claim['text']} {claim['effect']['gap']:+.2g}")
        p, corrected = (f"{claim[key]:.3f}".removeprefix("0") for key in ("p", "adjusted"))
        facts.append(f"p = {p}, corrected {corrected}")
    for fact in facts:
        assert fact in text, fact


def test_one_arm_chooses_and_large_mismatches_have_no_exponent(certificate):
    one = certificate.study.arms[:1]
    assert "top-error chose the layers of" in methods.paragraph(changed(certificate, arms=one))
    far = [c.model_copy(update={"mismatch": {"mean": 1.172, "largest": 4.62}}) for c in certificate.controls]
    text = methods.paragraph(certificate.model_copy(update={"controls": far}))
    assert "mismatch +117% on average and 462% at most" in text and "e+0" not in text.partition("The primary")[0]


def test_feasible_counts_are_the_laws(certificate):
    text = methods.paragraph(certificate)
    for name in ("matched", "permuted", "composition", "count-matched"):
        counts = [item.law.feasible_subsets for item in certificate.controls if item.control == name]
        for count in (min(counts), max(counts)):
            shown = (
                f"{count:,}" if count < 10**7 else rf"{str(count)[0]}\.{str(count)[1:3]} × 10\^{len(str(count)) - 1}"
            )
            assert re.search(shown, text), (name, count)


def test_few_claims_are_told_in_their_own_sentences(certificate):
    found = certificate.verdicts | {"sentences": ["One.", "Two"], "laws": []}
    text = methods.paragraph(certificate.model_copy(update={"verdicts": found}))
    assert "before the first run, and the draws cannot reach its level. One. Two. Losses" in text


def test_laws_that_disagree_are_told(certificate):
    laws = [{"agree": False, "sentence": "Laws differ"}, {"agree": True, "sentence": "All agree"}]
    text = methods.paragraph(certificate.model_copy(update={"verdicts": certificate.verdicts | {"laws": laws}}))
    assert "Laws differ." in text and "All agree" not in text


def test_headroom_is_told_only_where_the_oracle_is_separated(certificate):
    room = {"arm": "a", "text": "t", "budget": "b", "headroom": 0.25, "low": 0.1, "high": 0.4, "separated": True}
    rooms = [room, room | {"low": None, "high": None, "arm": "c"}, room | {"separated": False, "arm": "zz"}]
    text = methods.paragraph(certificate.model_copy(update={"verdicts": certificate.verdicts | {"headroom": rooms}}))
    assert "a on t at b 0.25 (0.10 to 0.40); c on t at b 0.25." in text and "zz on t" not in text
    assert "In 1 of 3 comparisons the oracle is not separated from chance, and this study cannot rank selectors" in text


def test_what_can_reach_its_level_is_confirmatory(certificate):
    family = certificate.verdicts["family"] | {"descriptive": False}
    enough = certificate.model_copy(update={"verdicts": certificate.verdicts | {"family": family}})
    assert "The results are confirmatory: the analysis was locked on " in methods.paragraph(enough)
    assert "; confirmatory}" in methods.bibtex(enough) and "; descriptive}" in methods.bibtex(certificate)


def test_what_is_exploratory_says_so(certificate):
    text = methods.paragraph(certificate.model_copy(update={"exploratory": ["no lock", "a change"]}))
    assert "The results are exploratory: no lock; a change." in text and "confirmatory" not in text


def test_other_declarations_are_told(certificate):
    analysis = certificate.study.analysis.model_copy(
        update={
            "side": "greater",
            "test": "each",
            "correction": "max-t",
            "outcome": "kl",
            "exclusions": [Exclusion(arm="top-error", reason="broken")],
        }
    )
    text = methods.paragraph(changed(certificate, analysis=analysis, headroom=None, form="small"))
    for fact in ("higher is better", "ranked among the draws at each budget", "max-T", "divergence from the 16-bit"):
        assert fact in text
    assert "excluded: broken" in text and "(small form)" in text and "reference selections" not in text


def test_a_control_without_results_is_told(certificate):
    left = [item for item in certificate.controls if item.control != "composition"]
    text = methods.paragraph(certificate.model_copy(update={"controls": left}))
    assert "composition, which has no results here" in text


def fields(entry):
    """A BibTeX entry by its grammar: @type{key, name = {balanced}, …}; the type, the key and the fields."""
    kind, key, rest = re.fullmatch(r"@(\w+)\{([\w:.+/-]+),\n(.*)\n\}", entry, re.S).groups()
    found, at = {}, 0
    while at < len(rest):
        head = re.compile(r"\s*(\w+) = \{").match(rest, at)
        assert head, rest[at:]
        depth, start = 1, head.end()
        at = start
        while depth:
            if rest[at] == "\\":
                at += 1
            elif rest[at] in "{}":
                depth += 1 if rest[at] == "{" else -1
            at += 1
        found[head[1]] = rest[start : at - 1]
        comma = re.compile(r",\n|$").match(rest, at)
        assert comma, rest[at:]
        at = comma.end()
    return kind, key, found


def test_the_bibtex_entry_parses(certificate):
    kind, key, found = fields(methods.bibtex(certificate))
    assert (kind, key) == ("misc", methods.identifier(certificate)) and found.keys() == {
        "title",
        "howpublished",
        "note",
        "year",
    }
    assert found["year"] == "2026" and certificate.seal in found["note"] and "descriptive" in found["note"]
    assert r"Q4\_1" in found["title"]


@pytest.mark.parametrize("name", ["a_b & 50% {x}", "}{", "\\end{document}", "x" * 300, '$#~^<>|[]`"', "–—’…"])
def test_the_bibtex_entry_survives_any_model_name(certificate, name):
    profile = certificate.profile.model_copy(update={"model": name})
    _, _, found = fields(methods.bibtex(certificate.model_copy(update={"profile": profile})))
    plain = re.sub(r"\\[a-z]+\d*\{\}|\\ensuremath\{[^}]*\}|\\.|\{.\}", "", found["title"][1:-1])
    assert not set(plain) & set("&%$#_{}~^\\")


def test_an_entry_without_a_date(certificate):
    _, _, found = fields(methods.bibtex(certificate.model_copy(update={"provenance": {}})))
    assert "year" not in found


def test_the_identifier_is_made_from_the_seal(certificate):
    assert re.fullmatch(r"control-[0-9a-f]{12}", methods.identifier(certificate))
    assert methods.identifier(certificate) == f"control-{certificate.seal[:12]}"
