"""A study's reports as evidence: the outcomes of arms and draws, and the scored windows of the reference selections."""

from __future__ import annotations

import numpy as np

from toolkit.analysis.reading import windows
from toolkit.analysis.reading.evidence import Chance, Evidence, Judged, Room, mismatch
from toolkit.analysis.reading.report_file import Run
from toolkit.analysis.reading.reports import Results
from toolkit.errors import InputError
from toolkit.records.report import ANTI, ORACLE
from toolkit.records.study import Control, split


def evidence(results: Results) -> Evidence:
    """What a study's verdicts are computed from.

    Arms come in the order of budgets, then of the study. Where the study declares headroom, the rows files are
    read: the second half of each text's windows scores, and chance is the mean over the draws of
    `analysis.control`, window by window. An arm that lacks one of the runs for it has no headroom.

    Raises:
        InputError: rows are damaged, or of other windows than the reports state.
    """
    study = results.study
    judged = []
    for budget in results.budgets:
        for arm in study.arms:
            run = results.arms.get((budget, arm.label))
            if run is not None:
                judged.append(_judged(results, budget, run))
    return Evidence(
        texts=tuple(results.texts),
        budgets=tuple(results.budgets),
        arms=tuple(judged),
        analysis=study.analysis,
        headroom=study.headroom,
    )


def _judged(results: Results, budget: str, run: Run) -> Judged:
    assert run.selection is not None  # reports.read refuses an arm without one
    outcome = results.study.analysis.outcome
    chances = [
        _chance(results, run, control, results.controls[budget, run.arm, control.label])
        for control in results.study.controls
        if (budget, run.arm, control.label) in results.controls
    ]
    return Judged(
        arm=run.arm,
        budget=budget,
        selector=run.selection.selector,
        parameters=run.selection.parameters,
        outcomes={text: float(getattr(run.scores[text], outcome)) for text in results.texts},
        chances=tuple(chances),
        headroom=_headroom(results, budget, run),
    )


def _chance(results: Results, arm: Run, control: Control, run: Run) -> Chance:
    assert arm.selection is not None and run.law is not None and run.draws is not None
    return Chance(
        control=control.label,
        law=run.law,
        asked=control.draws,
        mismatch=mismatch(run.draws.parameters, arm.selection.parameters),
        outcomes={text: run.draws.outcomes[text][results.study.analysis.outcome] for text in results.texts},
    )


def _headroom(results: Results, budget: str, arm: Run) -> dict[str, Room]:
    """Text → its scored windows, where all runs for it are there."""
    study = results.study
    if study.headroom is None or arm.arm not in (study.headroom.arms or [arm.arm]):
        return {}
    oracle = results.oracles.get((budget, arm.arm, ORACLE))
    anti = results.oracles.get((budget, arm.arm, ANTI))
    chance = results.controls.get((budget, arm.arm, study.analysis.control))
    runs = [run for run in (arm, oracle, anti, chance) if run is not None]
    if len(runs) < 4 or any(run.rows is None for run in runs):
        return {}
    assert oracle is not None and anti is not None and chance is not None
    single = {run.name: windows.by_window(run) for run in (arm, oracle, anti)}
    drawn = windows.draws_by_window(chance)
    found = {}
    for text, about in results.texts.items():
        fitting = split(about.windows)
        scored = about.windows - fitting
        if scored < 1:
            continue
        tokens = np.full(scored, arm.scores[text].tokens / about.windows)
        nll = drawn.get(text, np.empty((0, 0)))
        _expect(chance, text, nll.shape[1], about.windows)
        columns = {}
        for run in (arm, oracle, anti):
            values = single[run.name].get(text, [])
            _expect(run, text, len(values), about.windows)
            columns[run.name] = np.asarray(values[fitting:], dtype=np.float64)
        scoring = nll[:, fitting:]
        found[text] = Room(
            tokens=tokens,
            chance=scoring.mean(axis=0),
            arm=columns[arm.name],
            oracle=columns[oracle.name],
            anti=columns[anti.name],
            draws=scoring.sum(axis=1) / tokens.sum(),
        )
    return found


def _expect(run: Run, text: str, found: int, stated: int) -> None:
    if found != stated:
        raise InputError(f"the rows of {run.path} hold {found} windows of text {text!r}, and {stated} are stated")
