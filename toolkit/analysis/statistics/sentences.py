"""Verdicts in plain English, from the plain data of `verdicts`; no number is computed here."""

from __future__ import annotations

from typing import Any

COMPOSITION = "composition, and not ranking, explains the difference"


def claim(found: dict[str, Any], family: dict[str, Any], headroom: list[dict[str, Any]]) -> str:
    """One claim: verdict, where and how large, p and corrected p, what p could have been, law, headroom."""
    head = f"{found['arm']} {VERB[found['verdict']]}{_placed(found, family)}"
    rows = [f"{head}: {size(found, family)} ({_ps(found, family)})."]
    if found["verdict"] == "better, below the margin":
        reason = str(family["margin_reason"]).rstrip(".")
        rows.append(f"The gap is less than the margin of {number(family['margin'])} (declared because: {reason}).")
    if family["descriptive"]:
        claims = f"{family['tests']} claims" if family["tests"] > 1 else "1 claim"
        rows.append(
            f"This is descriptive: {claims} and {family['draws']} draws give no corrected p below "
            f"{p_value(family['reachable'])}, and the level is {family['level']:g}."
        )
    rows.append(f"The law is {found['law']}; {'p is exact' if found['exact'] else 'p is a Monte Carlo value'}.")
    for item in headroom:
        rows.append(f"{'At ' + item['budget'] if item['budget'] else 'On held-out windows'}, {item['sentence']}.")
    return " ".join(rows)


VERB = {
    "better": "is better than chance",
    "better, below the margin": "is better than chance, below the margin,",
    "not separated": "is not separated from chance",
    "worse": "is worse than chance",
}


def where(found: dict[str, Any]) -> str:
    """The budgets and the text of a claim."""
    budgets = [b for b in found["budgets"] if b is not None]
    if len(budgets) > 1:
        return f"over {len(budgets)} budgets of {found['text']}"
    return f"at {budgets[0]} of {found['text']}" if budgets else f"on {found['text']}"


def _placed(found: dict[str, Any], family: dict[str, Any]) -> str:
    """The budgets and the text; scores of a file stand under their metric's name, which `size` gives."""
    if found["text"] != family["outcome"]:
        return f" {where(found)}"
    budgets = [b for b in found["budgets"] if b is not None]
    return f" over {len(budgets)} budgets" if len(budgets) > 1 else f" at {budgets[0]}" if budgets else ""


def size(found: dict[str, Any], family: dict[str, Any]) -> str:
    """The effect in the outcome's unit and in standard deviations of the draws."""
    gap = found["effect"]["gap"]
    side = "above" if gap > 0 else "below"
    mean = ", the mean over budgets" if len(found["budgets"]) > 1 else ""
    level = f"equals the median draw of {found['control']}{mean}"
    if gap:
        distance = f"{number(abs(gap))} {found['effect']['unit']}"
        level = f"is {distance} {side} the median draw of {found['control']}{mean}"
    spread = found["effect"]["standardized"]
    deviations = f", {signed(spread)} standard deviations of the draws" if spread is not None else ""
    return f"its {family['outcome']} {level}{deviations}"


def law_sentence(entry: dict[str, Any], composition: bool) -> str:
    """What the laws say of one claim, each at the uncorrected level."""
    tests = [t for t in entry["tests"] if t["counts"]]
    telling = [t for t in tests if t["smallest_p"] <= entry["level"]]
    shown = "; ".join(f"{t['verdict']} under {_law(t)} ({_p(t)})" for t in telling or tests)
    place = f"{entry['arm']} {where(entry)}"
    left_out = [t["control"] for t in entry["tests"] if not t["counts"]]
    holding = "do" if len(left_out) > 1 else "does"
    end = f" {' and '.join(left_out)} {holding} not hold the arm's memory and cannot tell." if left_out else ""
    end = (
        "".join(
            f" {t['control']} cannot tell: its draws give no p below {p_value(t['smallest_p'])}."
            for t in tests
            if telling and t not in telling
        )
        + end
    )
    if not tests:
        return f"{place}: no control holds the arm's memory.{end}"
    if not telling:
        return f"{place}: no law has the draws to reach the level {entry['level']:g}: {shown}.{end}"
    if entry["agree"]:
        if len(telling) == 1:
            return f"{place}: {shown}, the only law it was judged by.{end}"
        return f"{place}: every law gives the same verdict: {shown}.{end}"
    if composition:
        return f"{place}: {COMPOSITION}: {shown}.{end}"
    return f"{place}: the verdict differs between laws: {shown}; declared is {entry['control']}.{end}"


def _law(test: dict[str, Any]) -> str:
    return f"{test['control']}, which holds {' and '.join(test['holds'])}" if test["holds"] else test["control"]


def _p(test: dict[str, Any]) -> str:
    if test["verdict"] == "worse":
        return f"p of the other side = {p_value(test['opposite']['p'])}"
    return f"p = {p_value(test['p'])}"


def _ps(found: dict[str, Any], family: dict[str, Any]) -> str:
    shown = found["opposite"] if found["verdict"] == "worse" else found
    text = _p(found)
    if family["correction"] != "none":
        text += f", corrected {p_value(shown['adjusted'])}"
    return f"{text}; the smallest that {found['draws']} draws give is {p_value(found['smallest_p'])}"


def p_value(p: float) -> str:
    """Three decimals without the leading zero; more digits below .001, so that no p reads as zero."""
    if p >= 0.9995:
        return "1.000"
    if p >= 0.001:
        return f"{p:.3f}".removeprefix("0")
    return f"{p:.2g}"


def percent(fraction: float) -> str:
    """A percentage without decimals; a real minus, and none before zero."""
    text = f"{100 * fraction:.0f}"
    return ("0" if float(text) == 0 else text).replace("-", "−") + "%"


def signed(value: float) -> str:
    """Two decimals with a sign; a real minus."""
    return f"{value:+.2f}".replace("-", "−")


def number(value: float) -> str:
    """Two significant digits and at least four decimals where it is small; plain, without an exponent."""
    magnitude = abs(value)
    if magnitude >= 0.001 or magnitude == 0:
        return f"{value:.4f}"
    return f"{value:.2g}"
