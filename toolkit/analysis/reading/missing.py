"""What a study declares and no report tells of."""

from __future__ import annotations

from toolkit.analysis.reading.report_file import Run
from toolkit.analysis.reading.reports import Results
from toolkit.records.report import ANTI, ORACLE, QUANTIZE, RESTORE


def missing(results: Results) -> list[str]:
    """Every declared run that left no report, and draws that a control lacks, in words and in the study's order."""
    study, headroom = results.study, results.study.headroom
    lost = []
    if results.sixteen_bit is None:
        lost.append("the 16-bit reference")
    if results.base is None:
        lost.append("the base reference")
    if study.repeat and results.repeat is None:
        lost.append("the base once more")
    if headroom is not None and headroom.fit == "sweep":
        lost += [f"the {kind} sweep" for kind in (RESTORE, QUANTIZE) if kind not in results.sweeps]
    for budget in results.budgets:
        for arm in study.arms:
            if (budget, arm.label) not in results.arms:
                lost.append(named(arm.label, budget))
            if headroom is not None and arm.label in (headroom.arms or [arm.label]):
                absent = [name for name in (ORACLE, ANTI) if (budget, arm.label, name) not in results.oracles]
                lost += [f"{name} of {arm.label} at {budget}" for name in absent]
                runs = [results.arms.get((budget, arm.label))]
                runs += [results.oracles.get((budget, arm.label, name)) for name in (ORACLE, ANTI)]
                runs += [results.controls.get((budget, arm.label, study.analysis.control))]
                if all(run is not None for run in runs) and any(run.rows is None for run in runs if run is not None):
                    lost.append(windows_of(arm.label, budget))
        for control in study.controls:
            for label in study.likes(control):
                run, where = results.controls.get((budget, label, control.label)), named(label, budget, control.label)
                if run is None:
                    lost.append(where)
                elif run.draws is not None and len(run.draws) < control.draws and not _exhausted(run):
                    lost.append(f"{control.draws - len(run.draws)} of {control.draws} draws of {where}")
    return lost


def windows_of(arm: str, budget: str) -> str:
    """An arm's windows, which draws of several reports have not, in words."""
    return f"windows of {arm} at {budget}"


def named(arm: str, budget: str | None, control: str | None = None) -> str:
    """An arm, or a control of it, in words."""
    of = f"control {control} of {arm}" if control is not None else f"arm {arm}"
    return of if budget is None else f"{of} at {budget}"


def _exhausted(run: Run) -> bool:
    """Whether the draws may be all that the law gives: it has no more sets, or does not say how many it can draw."""
    assert run.law is not None and run.draws is not None
    law = run.law
    return law.feasible_subsets is None or law.inclusion_draws is not None or len(run.draws) >= law.feasible_subsets
