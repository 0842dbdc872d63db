"""A study's results as plain data: every number of its table, and nothing about how it is printed."""

from __future__ import annotations

import math
import os
from typing import Any

from toolkit.analysis.certificates import locks
from toolkit.analysis.printing import entries
from toolkit.analysis.printing.effects import effects, errors
from toolkit.analysis.printing.likeness import likeness
from toolkit.analysis.reading import reports, windows
from toolkit.analysis.reading.evidence import Judged
from toolkit.analysis.reading.missing import missing
from toolkit.analysis.reading.report_file import Run
from toolkit.analysis.reading.reports import Results
from toolkit.analysis.reading.study_evidence import evidence
from toolkit.analysis.reading.windows import expect_losses
from toolkit.analysis.statistics import inference
from toolkit.errors import InputError
from toolkit.records.report import Score

SCHEMA = 1


def summary(study: str | os.PathLike[str] | Results, *, paired: bool = False) -> dict[str, Any]:
    """Everything that a study's table states, as plain JSON data.

    Args:
        study: a study's folder or file, its results or `--out` folder, or results already read.
        paired: also read the rows files: each arm's paired difference to the references, with its standard
            error over windows.

    Returns:
        `status` (confirmatory, or exploratory and why), `references` (the 16-bit and the base run), `arms` (one a
        budget and arm, with scores on each text and one entry a control), `verdicts` (null, with `untested`, where
        nothing that is declared was measured), `floor` (of the base measured twice), `effects` (of the sweep),
        `likeness`, `missing`, `notes`, and what was run. Losses and gaps are in nats a token; shares and
        mismatches are fractions.

    Raises:
        InputError: as `toolkit.analysis.reading.reports.read`; or results are called confirmatory, and a report's
            losses are not those that its rows add up to.
    """
    results = study if isinstance(study, Results) else reports.read(study)
    declared, analysis = results.study, results.study.analysis
    found = evidence(results)
    verdicts, untested, rows = entries.judged(found)
    status, floor = locks.status(results), _floor(results)
    if status.confirmatory:
        _unchanged(results)
    differences = {} if floor is None else floor["difference"]
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "table",
        "study": declared.name,
        "question": declared.question,
        "form": results.form,
        "status": {
            "confirmatory": status.confirmatory,
            "reasons": list(status.reasons),
            "lock": status.hash,
        },
        "model": results.model,
        "fingerprint": results.fingerprint,
        "reference": results.reference.model_dump(mode="json"),
        "base": declared.base,
        "protect": declared.protect,
        "seed": declared.seed,
        "settings": results.settings,
        "texts": {name: text.model_dump(mode="json") for name, text in results.texts.items()},
        "analysis": analysis.model_dump(mode="json"),
        "unit": found.unit,
        "reports": results.count,
        "references": [_reference(results, run) for run in _ordered_references(results)],
        "arms": [
            _arm(results, judged, paired) | {"controls": entries.controls(found, judged, rows, differences)}
            for judged in found.arms
        ],
        "verdicts": verdicts,
        "untested": untested,
        "floor": floor,
        "missing": missing(results),
    }
    data["effects"] = _effects(results)
    data["likeness"] = likeness(results)
    data["notes"] = _notes(results, data, entries.notes(found, [c for a in data["arms"] for c in a["controls"]]))
    return data


def _unchanged(results: Results) -> None:
    """Hold every report to its rows."""
    runs = [*results.references.values(), *results.arms.values(), *results.controls.values()]
    for run in [*runs, *results.oracles.values(), *results.sweeps.values()]:
        if run.rows is not None:  # draws of several reports have none
            expect_losses(run, results.texts)


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


def _arm(results: Results, judged: Judged, paired: bool) -> dict[str, Any]:
    run = results.arms[str(judged.budget), judged.arm]
    selection = run.selection
    assert selection is not None  # reports.read refuses an arm without one
    data: dict[str, Any] = {
        "run": run.name,
        "arm": run.arm,
        "budget": judged.budget,
        "selector": selection.selector,
        "layers": len(selection.layers),
        "roles": entries.roles(selection.layers),
        "parameters": selection.parameters,
        "bytes": selection.bytes,
        "share": selection.share,
        "scores": _scores(results, run),
    }
    if paired:
        data["paired"] = _paired(results, run)
    return data


def _floor(results: Results) -> dict[str, Any] | None:
    """The numerical floor: how far the base's outcome moves when it is computed otherwise."""
    first, second, outcome = results.base, results.repeat, results.study.analysis.outcome
    if first is None or second is None:
        return None
    return {
        "run": second.name,
        "how": list(second.labels),
        "difference": {
            text: abs(getattr(second.scores[text], outcome) - getattr(first.scores[text], outcome))
            for text in results.texts
        },
    }


def _effects(results: Results) -> dict[str, Any] | None:
    """Spearman's ρ of the measured single-layer effects and the profile's error; null without a sweep."""
    if not results.sweeps:
        return None
    try:
        error = errors(reports.profile_of(results), results.study.base)
    except InputError as reason:
        return {"reason": str(reason)}
    found = effects(results, error)
    return {
        "measure": "mse",
        "layers": len(error),
        "spearman": [{"text": e.text, "kind": e.kind, "rho": e.correlation} for e in found],
    }


def _paired(results: Results, run: Run) -> dict[str, Any]:
    """Text → reference → paired difference of summed losses, from the rows files."""
    mine = windows.by_window(run)
    found: dict[str, Any] = {}
    for kind, reference in (("16-bit", results.sixteen_bit), ("base", results.base)):
        if reference is None:
            continue
        other = windows.by_window(reference)
        for text, about in results.texts.items():
            a, b = mine.get(text, []), other.get(text, [])
            if not len(a) == len(b) == about.windows:
                raise InputError(
                    f"{run.path} and {reference.path} have rows of {len(a)} and {len(b)} windows of text {text!r}, and "
                    f"{about.windows} are stated"
                )
            tokens = [run.scores[text].tokens / about.windows] * about.windows
            pair = inference.paired(a, b, tokens, f"{run.name} and {reference.name}")
            found.setdefault(text, {})[kind] = {
                "difference": pair.difference,
                "standard_error": pair.standard_error,
                "windows": pair.windows,
            }
    return found


def _notes(results: Results, data: dict[str, Any], of_comparisons: list[str]) -> list[str]:
    """What a reader must know before the numbers are quoted."""
    notes = []
    if results.form == "small":
        notes.append("This is the small form of the study: fewer tokens, budgets and draws than the full one.")
    notes += entries.of_family(data["verdicts"], data["untested"]) + of_comparisons
    extra = sorted({f"{a} at {b}" for b, a in results.arms} - {f"{a['arm']} at {a['budget']}" for a in data["arms"]})
    if extra:
        notes.append(f"Reports of arms that the study does not declare are left out: {', '.join(extra)}.")
    return notes
