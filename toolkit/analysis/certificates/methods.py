"""What a paper says about a certificate: a methods paragraph, a BibTeX entry, and an identifier made from the seal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from toolkit.analysis.certificates.locks import standing
from toolkit.analysis.printing.latex_table import escape
from toolkit.analysis.statistics.sentences import p_value
from toolkit.records.certificate import Certificate, CertifiedDraws
from toolkit.records.study import Control

IDENTIFIER_DIGITS = 12
SENTENCES = 2
"""More claims than these are told in brief."""
CORRECTIONS = {
    "holm": "Holm's correction",
    "max-t": "the max-T correction over shared draws",
    "none": "no correction",
}


def identifier(certificate: Certificate) -> str:
    """`control-` and the first 12 digits of the seal, such as `control-3f9a2c71d0b4`."""
    return f"control-{certificate.seal[:IDENTIFIER_DIGITS]}"


def paragraph(certificate: Certificate) -> str:
    """The methods and the verdict as one paragraph, every figure taken from the certificate."""
    parts = [_question(certificate), _chance(certificate)]
    parts += [_law(certificate, control) for control in certificate.study.controls]
    parts += [_test(certificate), _standing(certificate), *_verdict(certificate), _software(certificate)]
    return " ".join(part for part in parts if part)


def _question(certificate: Certificate) -> str:
    study, profile = certificate.study, certificate.profile
    texts = _and(
        f"{name} (SHA-256 {t.sha256[:12]}, {t.tokens:,} tokens, {_count(t.windows, 'window')} of {t.window})"
        for name, t in certificate.texts.items()
    )
    small = " (small form)" if study.form == "small" else ""
    chose = "chose" if len(study.arms) == 1 else "each chose"
    return (
        f"In study {study.name}{small}, {_and(arm.label for arm in study.arms)} {chose} the layers of "
        f"{profile.model} (weights {profile.fingerprint[:12]}; {len(profile):,} layers, {profile.parameters:,} "
        f"parameters; {_sentence_part(profile.reference.note)}) to protect (format {study.protect}; all others "
        f"{study.base}) at {_count(len(study.budgets), 'budget')} ({_and(map(str, study.budgets))}); outcomes were "
        f"measured on {texts}."
    )


def _chance(certificate: Certificate) -> str:
    laws = len(certificate.study.controls)
    return (
        f"Each was compared with chance under {_count(laws, 'law')}, drawn with seed {certificate.study.seed} for its "
        "own total:"
        if laws > 1
        else f"Each was compared with chance, drawn with seed {certificate.study.seed} for its own total:"
    )


def _law(certificate: Certificate, control: Control) -> str:
    """What one control matched, to what tolerance, among how many subsets, and how well."""
    items = [item for item in certificate.controls if item.control == control.label]
    last = control is certificate.study.controls[-1]
    end = "." if last else ";"
    if not items:
        return f"{control.label}, which has no results here{end}"
    law = items[0].law
    what = law.match or "parameters"
    matched = f"no tolerance on {what}"
    if law.within is not None:
        matched = f"{what} matched to within {_percent(law.within)}" if law.within else f"{what} matched exactly"
    holds = f", with the arm's {_and(law.holds)} held" if law.holds else ""
    named = control.label if control.label == law.selector else f"{control.label} ({law.selector})"
    largest = max(abs(item.mismatch["largest"]) for item in items)
    reached = "without mismatch"
    if largest:
        mean = _range([item.mismatch["mean"] for item in items])
        reached = f"reached mismatch {mean} on average and {_percent(largest)} at most"
    return f"{named}, {_drawn(items)}{_for(items, control)}, {matched}{holds}, among {_feasible(items)}, {reached}{end}"


def _drawn(items: Sequence[CertifiedDraws]) -> str:
    counts = sorted({len(item.hashes) for item in items})
    number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    law = items[0].law
    if law.shared:
        return f"{number} permutations of the layers, the same for all arms and budgets"
    if law.chain:
        return f"{number} nested families over {len(items[0].family or []):,} budgets"
    return f"{number} draws"


def _for(items: Sequence[CertifiedDraws], control: Control) -> str:
    if control.like:
        return f" for {_and(control.like)}"
    if items[0].law.shared:
        return ""
    return " for each arm" if items[0].law.chain else " for each arm and budget"


def _feasible(items: Sequence[CertifiedDraws]) -> str:
    counts = [item.law.feasible_subsets for item in items]
    if any(count is None for count in counts):
        return "subsets that were not counted"
    low, high = min(c for c in counts if c is not None), max(c for c in counts if c is not None)
    what = "families" if items[0].law.chain and not items[0].law.shared else "subsets"
    return f"{_large(low)} feasible {what}" if low == high else f"{_large(low)} to {_large(high)} feasible {what}"


def _test(certificate: Certificate) -> str:
    analysis, study = certificate.study.analysis, certificate.study
    draws = [len(item.hashes) for item in certificate.controls if item.control == analysis.control]
    outcome = {"loss": "mean loss (nats a token)", "kl": "divergence from the 16-bit model (nats a token)"}
    ranked = (
        "the mean over budgets of the gap divided by the standard deviation was ranked among whole families"
        if analysis.test == "joint"
        else "the outcome was ranked among the draws at each budget"
    )
    tests = certificate.verdicts.get("family", {}).get("tests")
    smallest = ""
    if draws:
        smallest = f"; {min(draws):,} draws give no p below {p_value(1 / (1 + min(draws)))}"
        if tests:
            smallest += f" (corrected, {p_value(analysis.reachable(tests, min(draws)))})"
    margin = f"; a gap below {analysis.margin:g} does not matter: {analysis.margin_reason}" if analysis.margin else ""
    family = f" over the family of {_count(tests, 'claim')}" if tests else ""
    excluded = "; excluded: " + _and(e.reason for e in analysis.exclusions) if analysis.exclusions else ""
    return (
        f"The primary outcome is the {outcome.get(analysis.outcome, analysis.outcome)}, and the declared contrast "
        f"{analysis.control}: {ranked}, one-sided ({'lower' if analysis.side == 'less' else 'higher'} is better), "
        f"p = (1 + draws at least as good)/(draws + 1), with {CORRECTIONS[analysis.correction]}{family} at level "
        f"{analysis.level:g}{smallest}{margin}{excluded}."
        + (
            f" Headroom was measured against reference selections at the arms' memory within "
            f"{_percent(float(study.headroom.within))}, fitted on the first half of the windows ({study.headroom.fit}) "
            "and scored on the second."
            if study.headroom is not None
            else ""
        )
    )


def _standing(certificate: Certificate) -> str:
    if certificate.exploratory:
        return f"The results are exploratory: {'; '.join(certificate.exploratory)}."
    assert certificate.lock is not None  # `verify` refuses a certificate without a lock that gives no reason
    locked = f"the analysis was locked on {certificate.lock.created} (lock {certificate.lock.hash[:12]}), "
    if called(certificate) == "descriptive":
        return f"The results are descriptive: {locked}before the first run, and the draws cannot reach its level."
    return f"The results are confirmatory: {locked}before the first run."


def called(certificate: Certificate) -> str:
    """`exploratory`, `descriptive` or `confirmatory`."""
    family = certificate.verdicts.get("family") or {}
    return standing(certificate.exploratory, bool(family.get("descriptive", True)))


def _verdict(certificate: Certificate) -> list[str]:
    """What was found: the sentences themselves where they are few, else each claim in brief; laws that disagree."""
    found = certificate.verdicts
    claims, sentences = found.get("claims", []), found.get("sentences", [])
    laws = [_stop(str(item["sentence"])) for item in found.get("laws", []) if not item.get("agree", True)]
    if len(sentences) <= SENTENCES:
        return [*(_stop(str(sentence)) for sentence in sentences), *laws]
    counts = Counter(str(claim["verdict"]) for claim in claims)
    tally = _and(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    listed = "; ".join(map(_brief, claims))
    unit = claims[0]["effect"]["unit"]
    told = f"Of {len(claims)} claims, {tally} (gap to the median draw in {unit}: {listed})."
    return [told, *_room(found.get("headroom", [])), *laws]


def _room(rooms: Sequence[dict[str, Any]]) -> list[str]:
    """Each arm's share of the way from chance to the oracle, where the oracle is separated from chance."""
    shares = [
        f"{room['arm']} on {room['text']} at {room['budget']} {room['headroom']:.2f}"
        + (f" ({room['low']:.2f} to {room['high']:.2f})" if room["low"] is not None else "")
        for room in rooms
        if room["separated"]
    ]
    told = []
    if shares:
        told.append(f"From chance (0) to the oracle (1), with 95% intervals over windows: {'; '.join(shares)}.")
    if len(shares) < len(rooms):
        told.append(
            f"In {len(rooms) - len(shares)} of {len(rooms)} comparisons the oracle is not separated from chance, and "
            "this study cannot rank selectors there."
        )
    return told


def _brief(claim: dict[str, Any]) -> str:
    at = f" at {claim['budget']}" if claim.get("budget") is not None else ""
    effect = claim["effect"]
    spread = "" if effect["standardized"] is None else f", {effect['standardized']:+.2f} sd"
    return (
        f"{claim['arm']} on {claim['text']}{at} {effect['gap']:+.2g}{spread}, p = {p_value(claim['p'])}, corrected "
        f"{p_value(claim['adjusted'])}"
    )


def _software(certificate: Certificate) -> str:
    about = certificate.provenance
    version, device = (_either(about.get(key)) for key in ("toolkit", "device"))
    dtype = _either(about.get("compute_dtype"))
    return (
        f"Losses were computed with toolkit {version} in {dtype} on {device}; every selection and draw can be made "
        f"again with toolkit {about.get('certified_with')} from certificate {identifier(certificate)} (toolkit verify)."
    )


def bibtex(certificate: Certificate) -> str:
    """An @misc entry that needs no package; text is escaped for LaTeX."""
    key = identifier(certificate)
    study, profile = certificate.study, certificate.profile
    started = certificate.provenance.get("started")
    last = str(started.get("last", "")) if isinstance(started, dict) else ""
    fields = {
        "title": f"{{Certificate of a random control: {escape(study.name)} on {escape(profile.model)}}}",
        "howpublished": escape(f"Certificate {key}, written by toolkit {certificate.provenance.get('certified_with')}"),
        "note": escape(f"SHA-256 {certificate.seal}; weights {profile.fingerprint[:12]}; {called(certificate)}"),
    }
    if last[:4].isdigit():
        fields["year"] = last[:4]
    lines = [f"  {name} = {{{value}}}" for name, value in fields.items()]
    return f"@misc{{{key},\n" + ",\n".join(lines) + "\n}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _and(items: Iterable[str]) -> str:
    listed = list(items)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}" if listed else "none"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _range(shares: Sequence[float]) -> str:
    """The smallest and the largest of signed shares."""
    low, high = (
        "0%" if not end else f"{100 * end:+.2g}%" if abs(end) < 0.995 else f"{100 * end:+,.0f}%"
        for end in (min(shares), max(shares))
    )
    return low if low == high else f"{low} to {high}"


def _large(number: int) -> str:
    """An integer of any length, in full up to seven digits."""
    digits = str(number)
    return f"{number:,}" if len(digits) < 8 else f"{digits[0]}.{digits[1:3]} × 10^{len(digits) - 1}"


def _either(value: Any) -> str:
    """One value, or all of several."""
    return _and(str(v) for v in value) if isinstance(value, list) else str(value)


def _sentence_part(text: str) -> str:
    return text.strip().rstrip(".")


def _stop(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
