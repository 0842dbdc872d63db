"""What a table says of each arm under each law: the verdicts' comparisons, with what the law is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from toolkit import spec
from toolkit.analysis.reading.evidence import Chance, Evidence, Judged
from toolkit.analysis.statistics.comparisons import Comparisons
from toolkit.analysis.statistics.verdicts import verdicts
from toolkit.errors import InputError
from toolkit.records.report import Law

Key = tuple[str, str | None, str, str]
"""Arm, budget, control, text."""


def judged(evidence: Evidence) -> tuple[dict[str, Any] | None, str | None, dict[Key, dict[str, Any]]]:
    """The verdicts without their comparisons, or why there are none; and the comparisons by their key.

    Results that are not complete may hold nothing that the analysis declares; what is there is compared all the
    same.
    """
    reason = None
    try:
        found = verdicts(evidence)
        rows = found.pop("comparisons")
    except InputError as error:
        found, reason, rows = None, str(error), _rows(evidence)
    return found, reason, {(r["arm"], r["budget"], r["control"], r["text"]): r for r in rows}


def _rows(evidence: Evidence) -> list[dict[str, Any]]:
    """The comparisons of evidence that lacks what its analysis names."""
    there = next((c.control for arm in evidence.arms for c in arm.chances), None)
    if there is None:
        return []
    analysis = evidence.analysis.model_copy(update={"control": there, "arms": None})
    return Comparisons(replace(evidence, analysis=analysis)).rows()


def controls(
    evidence: Evidence, arm: Judged, rows: dict[Key, dict[str, Any]], floor: dict[str, float]
) -> list[dict[str, Any]]:
    """One entry a control of an arm; `floor` marks gaps that computing otherwise alone would make."""
    return [_control(evidence, arm, chance, rows, floor) for chance in arm.chances]


def _control(
    evidence: Evidence, arm: Judged, chance: Chance, rows: dict[Key, dict[str, Any]], floor: dict[str, float]
) -> dict[str, Any]:
    law = chance.law
    texts = {text: rows[arm.arm, arm.budget, chance.control, text] for text in evidence.texts}
    one = next(iter(texts.values()))
    mean, largest = chance.mismatch
    shown = ("outcome", "median", "smallest", "largest", "mean", "sd", "gap", "at_least_as_good", "p")
    return {
        "control": chance.control,
        "claim": chance.control == evidence.analysis.control,
        "law": law_name(law),
        "like": law.like,
        "options": law.options,
        "holds": law.holds,
        "chain": law.chain,
        "shared": law.shared,
        "draws": one["draws"],
        "asked": one["asked"],
        "feasible_subsets": law.feasible_subsets,
        "expected": law.expected,
        "inclusion_draws": law.inclusion_draws,
        "single_total": law.single_total,
        "exact": one["exact"],
        "smallest_p": one["smallest_p"],
        "descriptive": one["descriptive"],
        "mismatch": {"mean": mean, "largest": largest},
        "matched": one["matched"],
        "texts": {
            text: {name: row[name] for name in shown} | {"below_floor": abs(row["gap"]) <= floor.get(text, -1.0)}
            for text, row in texts.items()
        },
    }


def law_name(law: Law) -> str:
    """The law's name: its selector with every option that is set, such as `within`; it is matched to the arm."""
    shown = {k: v for k, v in law.options.items() if v not in (None, False, "", [], {})}
    return spec.render(law.selector.partition("(")[0], shown)


def roles(layers: Iterable[str]) -> dict[str, int]:
    """Role → layers of it: the last part of a layer's path, without the number of an expert."""
    return dict(Counter(name.rpartition(".")[2].partition("[")[0] for name in layers))


def notes(evidence: Evidence, controls: list[dict[str, Any]]) -> list[str]:
    """What a reader must know of the comparisons before any is quoted."""
    analysis, said = evidence.analysis, []
    better = "lower" if analysis.side == "less" else "higher"
    said.append(
        f"p = (1 + draws at least as good)/(draws + 1), one-sided: the claim is a {better} {analysis.outcome} than the "
        f"draws of {analysis.control}; ties count against it. Each p refers to the one law named beside it, and is "
        "exact only where all feasible subsets hold a single total; elsewhere it is a Monte Carlo value."
    )
    if len(evidence.budgets) > 1:
        said.append(
            "Budgets of one model are nested: their p-values are not combined; the joint test ranks families of draws "
            "over all budgets."
        )
    unmatched = sorted({c["control"] for c in controls if not c["matched"]})
    if unmatched:
        said.append(
            f"Flawed control: the draws of {', '.join(unmatched)} do not hold their arm's memory (see the mismatch), "
            "so that their gaps mix how much is kept with which layers are kept."
        )
    if any(c["draws"] < c["asked"] and c["draws"] == c["feasible_subsets"] for c in controls):
        said.append("Where fewer subsets exist than draws were asked for, all of them are used.")
    return said


def of_family(found: dict[str, Any] | None, reason: str | None) -> list[str]:
    """What the declared family of claims is, and whether it can reach its level; or why nothing is tested."""
    if found is None:
        return [f"No claim is tested: {reason}."] if reason else []
    family = found["family"]
    if not family["tests"]:
        return []
    claims = f"{family['tests']} claim{'s' if family['tests'] > 1 else ''}"
    by = "uncorrected" if family["correction"] == "none" else f"corrected by {family['correction']}"
    margin = f", margin {family['margin']:g} ({family['margin_reason'].rstrip('.')})" if family["margin"] else ""
    said = [f"Declared family: {claims} against {family['control']}, {by}, level {family['level']:g}{margin}."]
    if family["descriptive"]:
        said.append(
            f"Descriptive: {family['draws']} draws give no corrected p below {family['reachable']:.3f} for {claims}, "
            f"and the declared level is {family['level']:g}."
        )
    return said + found["notes"]
