"""`judge`: the same tests, table, figure and sentences for scores that any runner computed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from toolkit.analysis.printing import entries
from toolkit.analysis.printing.drawing import kind_of
from toolkit.analysis.printing.formats import known, rendered
from toolkit.analysis.reading.evidence import Evidence
from toolkit.analysis.reading.score_evidence import evidence
from toolkit.analysis.reading.scores_file import Scores, read_scores, write_template
from toolkit.analysis.reading.selection_files import Arm, Chosen, grouped, read_selections
from toolkit.errors import InputError, closest
from toolkit.records.io import parse, read_bytes
from toolkit.records.study import Analysis

SCHEMA = 1


def judge(
    selections: str | os.PathLike[str],
    results: str | os.PathLike[str],
    format: str = "md",
    *,
    side: Literal["less", "greater"] = "less",
    test: Literal["each", "joint"] | None = None,
    level: float = 0.05,
    correction: Literal["holm", "max-t", "none"] = "holm",
    margin: float = 0.0,
    margin_reason: str | None = None,
    control: str | None = None,
    metrics: Sequence[str] = (),
    unit: str = "units",
    figure: str | os.PathLike[str] | None = None,
) -> str:
    """The table of scores computed anywhere, as text without a last line break.

    Arms are the selections that are matched to none; their draws are those that are matched to them, by law, seed
    and family. A metric plays the part of a text; a value is the mean over seeds and rows. The claims are one an
    arm, metric and budget, or one an arm and metric where budgets are tested together.

    Args:
        selections: a folder of selection files, as `toolkit select … -o` writes them.
        results: a CSV file, as `toolkit.analysis.reading.scores_file` reads it.
        format: `md`, `json`, `csv` or `latex`.
        side: `less`: the claim is that the arm's score is lower than its draws'.
        test: as `toolkit.records.study.Analysis`; left out, `joint` where the draws are families over several
            budgets, else `each`.
        control: the name of the law that claims are made against, needed where there are several.
        metrics: those that are judged; all where it is left out.
        unit: of the scores, for sentences.
        figure: also draw the strips to this file.

    Raises:
        InputError: an unknown format, option or control; and as `read_selections`, `grouped`, `read_scores`,
            `averaged` and `verdicts`.
    """
    known(format)
    if figure is not None:
        kind_of(figure)
    data, found = judgement(
        selections,
        results,
        side=side,
        test=test,
        level=level,
        correction=correction,
        margin=margin,
        margin_reason=margin_reason,
        control=control,
        metrics=metrics,
        unit=unit,
    )
    if figure is not None:
        from toolkit.analysis.printing.figure import strips_figure

        draws = {(a.budget, a.arm, c.control): c.outcomes for a in found.arms for c in a.chances}
        strips_figure(data, draws, figure)
    return rendered(data, format)


def judgement(
    selections: str | os.PathLike[str],
    results: str | os.PathLike[str],
    *,
    control: str | None = None,
    test: str | None = None,
    metrics: Sequence[str] = (),
    unit: str = "units",
    **analysis: Any,
) -> tuple[dict[str, Any], Evidence]:
    """What `judge` states, as plain JSON data, and the evidence that it comes from."""
    files = read_selections(selections)
    arms = grouped(files)
    declared = _declared(arms, control, test, analysis)
    scores = read_scores(results, metrics)
    if len(scores.metrics) == 1:
        declared = declared.model_copy(update={"outcome": scores.metrics[0]})
    found = evidence(files, arms, scores, declared, unit)
    verdicts, untested, rows = entries.judged(found)
    if untested is not None:
        raise InputError(untested)
    chosen = {(arm.label, arm.chosen.budget): arm.chosen for arm in arms}
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "judgement",
        "status": {
            "confirmatory": False,
            "reasons": ["scores of a file, and no analysis that was locked before they were made"],
            "lock": None,
        },
        "model": files[0].model,
        "fingerprint": files[0].fingerprint,
        "selections": len(files),
        "scores": _about(scores),
        "texts": {metric: {} for metric in scores.metrics},
        "analysis": declared.model_dump(mode="json"),
        "unit": unit,
        "arms": [
            _arm(chosen[judged.arm, judged.budget], judged.arm)
            | {"controls": entries.controls(found, judged, rows, {}), "outcomes": judged.outcomes}
            for judged in found.arms
        ],
        "verdicts": verdicts,
    }
    controls = [c for arm in data["arms"] for c in arm["controls"]]
    data["notes"] = entries.of_family(verdicts, None) + entries.notes(found, controls)
    return data, found


def _declared(arms: Sequence[Arm], control: str | None, test: str | None, analysis: dict[str, Any]) -> Analysis:
    """The analysis, its control and test named."""
    names = list(dict.fromkeys(group.control for arm in arms for group in arm.groups))
    if control is None:
        if len(names) > 1:
            raise InputError(
                f"there are draws of several laws ({', '.join(names)}): name the one to judge by "
                f"(--control {names[0]}, for example)"
            )
        control = names[0]
    if control not in names:
        raise InputError(f"there are no draws of control {control!r}; {closest(control, names)}")
    groups = [group for arm in arms for group in arm.groups if group.control == control]
    several = len({arm.chosen.budget for arm in arms if any(group.control == control for group in arm.groups)}) > 1
    if test is None:
        test = "joint" if several and all(group.law.chain for group in groups) else "each"
    return parse(Analysis, {"outcome": "score", "control": control, "test": test} | analysis, "the analysis", {})


def _about(scores: Scores) -> dict[str, Any]:
    rows = [row for row in scores.rows if row]
    return {
        "file": scores.path.name,
        "sha256": hashlib.sha256(read_bytes(scores.path)).hexdigest(),
        "lines": len(scores.values),
        "metrics": scores.metrics,
        "seeds": sorted(scores.seeds),
        "part": scores.part if rows else None,
        "rows": len(rows) or None,
    }


def _arm(chosen: Chosen, label: str) -> dict[str, Any]:
    return {
        "arm": label,
        "budget": chosen.budget,
        "selector": chosen.selector,
        "file": chosen.name,
        "hash": chosen.hash,
        "layers": chosen.layers,
        "roles": chosen.roles,
        "parameters": chosen.parameters,
    }


def template(
    selections: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    metric: str = "loss",
    seeds: Sequence[int] = (0,),
) -> Path:
    """A scores file to fill in: one line a set of layers and seed, under its hash; never over another file.

    Raises:
        InputError: as `read_selections` and `grouped`; or a file is there already.
    """
    files = read_selections(selections)
    grouped(files)
    arms = {c.hash: c.budget for c in files if c.matched_to is None}
    lines = {c.hash: c.budget or (arms.get(c.matched_to) if c.matched_to else None) or "" for c in reversed(files)}
    order = dict.fromkeys(c.hash for c in sorted(files, key=lambda c: c.matched_to is not None))
    return write_template(out, [(digest, lines[digest]) for digest in order], files[0].model, metric, seeds)
