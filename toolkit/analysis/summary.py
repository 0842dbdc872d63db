"""A study's results as plain data: every number of its table, and nothing about how it is printed."""

from __future__ import annotations

import math
import os
from typing import Any

from toolkit import spec
from toolkit.analysis import inference, reports, windows
from toolkit.analysis.likeness import likeness
from toolkit.analysis.report_file import Run
from toolkit.analysis.reports import Results
from toolkit.errors import InputError
from toolkit.records.report import Law, Score
from toolkit.records.study import Control

SCHEMA = 1
TOLERANCE = 0.001
"""Draws whose totals lie further than this from their arm's are not matched on memory, unless their law says
with an option `within` that a wider window was asked for."""


def summary(study: str | os.PathLike[str] | Results, *, paired: bool = False) -> dict[str, Any]:
    """Everything that a study's table states, as plain JSON data.

    Args:
        study: a study's folder or file, its results or `--out` folder, or results already read.
        paired: also read the rows files: each arm's paired difference to the references, with its standard
            error over windows.

    Returns:
        `references` (the 16-bit and the base run), `arms` (one a budget and arm, with scores on each text and
        one entry a control), `likeness`, `missing`, `notes`, and what was run. Losses and gaps are in nats a
        token; shares and mismatches are fractions.

    Raises:
        InputError: as `toolkit.analysis.reports.read`.
    """
    results = study if isinstance(study, Results) else reports.read(study)
    declared, analysis = results.study, results.study.analysis
    missing = _missing(results)
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "table",
        "study": declared.name,
        "question": declared.question,
        "form": results.form,
        "model": results.model,
        "fingerprint": results.fingerprint,
        "reference": results.reference.model_dump(mode="json"),
        "base": declared.base,
        "protect": declared.protect,
        "seed": declared.seed,
        "settings": results.settings,
        "texts": {name: text.model_dump(mode="json") for name, text in results.texts.items()},
        "analysis": analysis.model_dump(mode="json"),
        "reports": results.count,
        "references": [_reference(results, run) for run in _ordered_references(results)],
        "arms": [
            _arm(results, budget, arm.label, paired)
            for budget in results.budgets
            for arm in declared.arms
            if (budget, arm.label) in results.arms
        ],
        "missing": missing,
    }
    data["likeness"] = likeness(results)
    data["notes"] = _notes(results, data)
    return data


def _ordered_references(results: Results) -> list[Run]:
    first = [run for run in (results.sixteen_bit, results.base) if run is not None]
    return first + [run for run in results.references.values() if run not in first]


def _reference(results: Results, run: Run) -> dict[str, Any]:
    kind = "16-bit" if run is results.sixteen_bit else "base" if run is results.base else "other"
    return {"run": run.name, "arm": run.arm, "kind": kind, "scores": _scores(results, run)}


def _scores(results: Results, run: Run) -> dict[str, dict[str, Any]]:
    return {text: _score(results, text, run.scores[text]) for text in results.texts}


def _score(results: Results, text: str, score: Score) -> dict[str, Any]:
    high, low = results.base, results.sixteen_bit
    share = None
    if high is not None and low is not None:
        share = inference.recovered(score.loss, high.scores[text].loss, low.scores[text].loss)
    return {
        "tokens": score.tokens,
        "loss": score.loss,
        "perplexity": math.exp(score.loss),
        "kl": score.kl,
        "agreement": score.agreement,
        "recovered": share,
    }


def _arm(results: Results, budget: str, label: str, paired: bool) -> dict[str, Any]:
    run = results.arms[budget, label]
    selection = run.selection
    assert selection is not None  # reports.read refuses an arm without one
    data: dict[str, Any] = {
        "run": run.name,
        "arm": label,
        "budget": budget,
        "selector": selection.selector,
        "layers": len(selection.layers),
        "parameters": selection.parameters,
        "bytes": selection.bytes,
        "share": selection.share,
        "scores": _scores(results, run),
        "controls": [
            _control(results, run, control, results.controls[budget, label, control.label])
            for control in results.study.controls
            if (budget, label, control.label) in results.controls
        ],
    }
    if paired:
        data["paired"] = _paired(results, run)
    return data


def _control(results: Results, arm: Run, control: Control, run: Run) -> dict[str, Any]:
    """One arm against the draws of one control."""
    analysis, draws, law = results.study.analysis, run.draws, run.law
    assert draws is not None and law is not None  # reports.read refuses a control without them
    assert arm.selection is not None
    mismatch = draws.parameters / arm.selection.parameters - 1
    low, high = float(mismatch.min()), float(mismatch.max())
    largest = high if abs(high) >= abs(low) else low
    texts = {}
    for text in results.texts:
        value = float(getattr(arm.scores[text], analysis.outcome))
        drawn = draws.outcomes[text][analysis.outcome]
        what = f"{arm.name} on text {text!r}"
        place = inference.rank(value, drawn, analysis.side, what)
        spread = inference.spread(drawn, what)
        texts[text] = {
            "outcome": value,
            "median": spread.median,
            "smallest": spread.smallest,
            "largest": spread.largest,
            "gap": inference.gap_to_median(value, drawn, what),
            "at_least_as_good": place.at_least_as_good,
            "p": place.p,
        }
    smallest = inference.smallest_p(len(draws))
    return {
        "control": control.label,
        "claim": control.label == analysis.control,
        "law": law_name(law),
        "like": law.like,
        "options": law.options,
        "draws": len(draws),
        "asked": control.draws,
        "feasible_subsets": law.feasible_subsets,
        "single_total": law.single_total,
        "exact": inference.exact(law.single_total),
        "smallest_p": smallest,
        "descriptive": smallest > analysis.level,
        "mismatch": {"mean": float(mismatch.mean()), "largest": largest},
        "matched": abs(largest) <= _tolerance(law) * (1 + 1e-9),
        "texts": texts,
    }


def law_name(law: Law) -> str:
    """The law's name: its selector with every option that is set, such as `within`; it is matched to the arm."""
    shown = {k: v for k, v in law.options.items() if v not in (None, False, "", [], {})}
    return spec.render(law.selector.partition("(")[0], shown)


def _tolerance(law: Law) -> float:
    try:
        return max(float(law.options.get("within", TOLERANCE)), 0.0)
    except (TypeError, ValueError):  # a stranger's option of that name means something else
        return TOLERANCE


def _paired(results: Results, run: Run) -> dict[str, Any]:
    """Text → reference → paired difference of summed losses, from the rows files."""
    mine = windows.by_window(run)
    found: dict[str, Any] = {}
    for kind, reference in (("16-bit", results.sixteen_bit), ("base", results.base)):
        if reference is None:
            continue
        other = windows.by_window(reference)
        for text in results.texts:
            a, b = mine[text], other[text]
            if a.windows != b.windows or a.tokens != b.tokens:
                raise InputError(
                    f"{run.path} and {reference.path} were not scored on the same windows of text {text!r}"
                )
            pair = inference.paired(a.nll, b.nll, a.tokens, f"{run.name} and {reference.name}")
            found.setdefault(text, {})[kind] = {
                "difference": pair.difference,
                "standard_error": pair.standard_error,
                "windows": pair.windows,
            }
    return found


def _missing(results: Results) -> list[str]:
    """What the study declares and no report tells of."""
    lost = []
    if results.sixteen_bit is None:
        lost.append("the 16-bit reference run")
    if results.base is None:
        lost.append("the base reference run")
    for budget in results.budgets:
        for arm in results.study.arms:
            if (budget, arm.label) not in results.arms:
                lost.append(f"arm {arm.label} at {budget}")
        for control in results.study.controls:
            for like in results.study.likes(control):
                run = results.controls.get((budget, like, control.label))
                if run is None:
                    lost.append(f"control {control.label} like {like} at {budget}")
                elif run.draws is not None and len(run.draws) < control.draws and not _exhausted(run):
                    lost.append(
                        f"{control.draws - len(run.draws)} of {control.draws} draws of control {control.label} like "
                        f"{like} at {budget}"
                    )
    return lost


def _exhausted(run: Run) -> bool:
    """Whether the draws are all the subsets that the law holds."""
    assert run.law is not None and run.draws is not None
    return run.law.feasible_subsets is not None and len(run.draws) >= run.law.feasible_subsets


def _notes(results: Results, data: dict[str, Any]) -> list[str]:
    """What a reader must know before the numbers are quoted."""
    analysis, notes = results.study.analysis, []
    if results.form == "small":
        notes.append("This is the small form of the study: fewer tokens, budgets and draws than the full one.")
    controls = [c for arm in data["arms"] for c in arm["controls"]]
    claims = [c for c in controls if c["claim"]]
    if claims and any(c["descriptive"] for c in claims):
        draws = min(c["draws"] for c in claims)
        notes.append(
            f"Descriptive: {draws} draws give no p below {inference.smallest_p(draws):.3f}, and the declared level is "
            f"{analysis.level:g}."
        )
    better = "lower" if analysis.side == "less" else "higher"
    notes.append(
        f"p = (1 + draws at least as good)/(draws + 1), one-sided: the claim is a {better} {analysis.outcome} than the "
        f"draws of {analysis.control}; ties count against it. Each p refers to the one law named beside it, and is "
        "exact only where all feasible subsets hold a single total; elsewhere it is a Monte Carlo value."
    )
    notes.append("Budgets of one model are nested: their p-values are not combined.")
    unmatched = sorted({c["control"] for c in controls if not c["matched"]})
    if unmatched:
        notes.append(
            f"Flawed control: the draws of {', '.join(unmatched)} do not hold their arm's memory (see the mismatch), "
            "so that their gaps mix how much is kept with which layers are kept."
        )
    if any(c["draws"] < c["asked"] and c["draws"] == c["feasible_subsets"] for c in controls):
        notes.append("Where fewer subsets exist than draws were asked for, all of them are used.")
    extra = sorted({f"{a} at {b}" for b, a in results.arms} - {f"{a['arm']} at {a['budget']}" for a in data["arms"]})
    if extra:
        notes.append(f"Reports of arms that the study does not declare are left out: {', '.join(extra)}.")
    return notes
