"""What was measured, asked one question at a time: arms against draws, budget by budget and together."""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.analysis.reading.evidence import Chance, Evidence, Judged
from toolkit.analysis.statistics import inference
from toolkit.analysis.statistics.inference import Side
from toolkit.analysis.statistics.joint import joint
from toolkit.errors import InputError, closest

TOLERANCE = 0.001
"""Draws whose parameters lie further than this from their arm's do not hold its memory, where their law promises no
tolerance of its own."""


LARGEST = 1e100
"""The largest outcome in size that is compared: squares and sums of larger ones would leave the range of float64."""


def matched(chance: Chance) -> bool:
    """Whether the draws hold the arm's memory, in the quantity that their law matches."""
    law = chance.law
    if law.match not in (None, "parameters", "layers"):
        return True
    tolerance = TOLERANCE if law.within is None or law.match == "layers" else law.within
    return abs(chance.mismatch[1]) <= tolerance * (1 + 1e-9)


def families(chance: Chance) -> bool:
    """Whether draw i of every budget goes together: drawn as a nested family, or as one change of all layers."""
    return chance.law.chain or chance.law.shared


class Comparisons:
    """The evidence, checked and indexed: arm → budget → what was measured, budgets in the study's order.

    Raises:
        InputError: an arm given twice, an unknown budget, a control or arm that the analysis names and nothing was
            measured for, an outcome that is missing or not finite.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.analysis = evidence.analysis
        self.side: Side = evidence.analysis.side
        self.other: Side = "greater" if self.side == "less" else "less"
        self.level = evidence.analysis.level
        self.arms: dict[str, dict[str | None, Judged]] = {}
        for judged in evidence.arms:
            at = self.arms.setdefault(judged.arm, {})
            if judged.budget in at:
                raise InputError(f"arm {judged.arm!r} was given twice at {judged.budget or 'no budget'}")
            at[judged.budget] = judged
        order = list(evidence.budgets)
        for arm, at in self.arms.items():
            for budget in at:
                if budget not in order:
                    raise InputError(f"arm {arm!r} has budget {budget!r}; {closest(str(budget), map(str, order))}")
            self.arms[arm] = {b: at[b] for b in order if b in at}
        self.controls = list(dict.fromkeys(c.control for j in evidence.arms for c in j.chances))
        _check(evidence, self.arms, self.controls)

    def chance(self, arm: str, budget: str | None, control: str) -> Chance | None:
        """An arm's draws of a control at a budget; None where there are none."""
        return next((c for c in self.arms[arm][budget].chances if c.control == control), None)

    def rows(self) -> list[dict[str, Any]]:
        """One comparison an arm, budget, control and text."""
        rows = []
        for arm, at in self.arms.items():
            for budget, judged in at.items():
                for chance in judged.chances:
                    rows += [self._comparison(arm, budget, judged, chance, text) for text in self.evidence.texts]
        return rows

    def _comparison(self, arm: str, budget: str | None, judged: Judged, chance: Chance, text: str) -> dict[str, Any]:
        value, drawn = judged.outcomes[text], np.asarray(chance.outcomes[text], dtype=np.float64)
        what = f"{arm} at {budget} on {text}"
        place, spread = inference.rank(value, drawn, self.side, what), inference.spread(drawn, what)
        return {
            "arm": arm,
            "budget": budget,
            "control": chance.control,
            "text": text,
            "outcome": float(value),
            "median": spread.median,
            "smallest": spread.smallest,
            "largest": spread.largest,
            "mean": float(drawn.mean()),
            "sd": float(drawn.std(ddof=1)) if len(drawn) > 1 else None,
            "gap": inference.gap_to_median(value, drawn, what),
            "at_least_as_good": place.at_least_as_good,
            "draws": place.draws,
            "asked": chance.asked,
            "p": place.p,
            "smallest_p": place.smallest_p,
            "exact": inference.exact(chance.law.single_total),
            "matched": matched(chance),
            "descriptive": place.smallest_p > self.level,
        }

    def joints(self) -> list[dict[str, Any]]:
        """One joint test an arm, control and text, where the control's draws go together over two budgets or more."""
        rows = []
        for arm in self.arms:
            for control in self.controls:
                budgets, chances = self.budgets(arm, control)
                if len(budgets) < 2 or not joinable(chances):
                    continue
                for text in self.evidence.texts:
                    test = self.test(arm, text, budgets, control)
                    rows.append({"arm": arm, "control": control, "text": text} | test)
        return rows

    def budgets(self, arm: str, control: str, left_out: tuple[str, ...] = ()) -> tuple[list[str | None], list[Chance]]:
        """The budgets at which an arm has draws of a control, and those draws."""
        found = {b: self.chance(arm, b, control) for b in self.arms[arm] if b is None or b not in left_out}
        kept = {b: c for b, c in found.items() if c is not None}
        return list(kept), list(kept.values())

    def chances(self, arm: str, budgets: list[str | None], control: str) -> list[Chance]:
        """An arm's draws of a control at those budgets."""
        return [c for c in (self.chance(arm, b, control) for b in budgets) if c is not None]

    def test(self, arm: str, text: str, budgets: list[str | None], control: str) -> dict[str, Any]:
        """One arm over some budgets against one control: its rank on both sides and its effect.

        `test` is `rank` at one budget, `joint` over families, and `bonferroni` over budgets whose draws do not go
        together: the smallest of their p times their number, valid under any dependence.
        """
        values = np.array([self.arms[arm][b].outcomes[text] for b in budgets], dtype=np.float64)
        chances = self.chances(arm, budgets, control)
        drawn = [np.asarray(c.outcomes[text], dtype=np.float64) for c in chances]
        what = f"{arm} on {text} under {control}"
        gaps = [inference.gap_to_median(v, d, what) for v, d in zip(values, drawn, strict=True)]
        draws = min(len(d) for d in drawn)
        flat: tuple[int, ...] = ()
        if len(budgets) == 1 or joinable(chances):
            ours, theirs = (joint(values, np.stack(drawn), side, what) for side in (self.side, self.other))
            p, opposite, standardized, flat = ours.p, theirs.p, ours.statistic, ours.flat
            kind, smallest, better = "rank" if len(budgets) == 1 else "joint", ours.smallest_p, ours.at_least_as_good
        else:
            sides = [
                [inference.rank(v, d, side, what).p for v, d in zip(values, drawn, strict=True)]
                for side in (self.side, self.other)
            ]
            p, opposite = (min(1.0, len(budgets) * min(ps)) for ps in sides)
            effects = [joint([v], d[None], self.side, what).statistic for v, d in zip(values, drawn, strict=True)]
            known = [e for e in effects if e is not None]
            standardized = float(np.mean(known)) if known else None
            kind, better = "bonferroni", None
            smallest = min(1.0, len(budgets) * inference.smallest_p(max(len(d) for d in drawn)))
        return {
            "budgets": budgets,
            "test": kind,
            "effect": {"gap": float(np.mean(gaps)), "standardized": standardized, "unit": self.evidence.unit},
            "gaps": gaps,
            "flat": [budgets[at] for at in flat],
            "at_least_as_good": better,
            "draws": draws,
            "p": p,
            "smallest_p": smallest,
            "opposite": {"p": opposite},
            "exact": all(inference.exact(c.law.single_total) for c in chances),
        }


def joinable(chances: list[Chance]) -> bool:
    """Whether a joint test over these budgets' draws can be made."""
    return all(families(c) for c in chances) and len({len(c) for c in chances}) == 1


def _check(evidence: Evidence, arms: dict[str, Any], controls: list[str]) -> None:
    """Everything that is named exists, and every outcome is a finite number."""
    analysis = evidence.analysis
    if not evidence.texts or not arms:
        raise InputError("there is nothing to judge: no arm, or no text")
    if analysis.control not in controls:
        raise InputError(
            f"analysis.control names {analysis.control!r}, and nothing was drawn from it; "
            + closest(analysis.control, controls)
        )
    for name in analysis.arms or []:
        if name not in arms:
            raise InputError(f"analysis.arms names {name!r}, and it was not measured; {closest(name, arms)}")
    for judged in evidence.arms:
        place = f"arm {judged.arm!r}" + (f" at {judged.budget}" if judged.budget is not None else "")
        for text in evidence.texts:
            _finite(judged.outcomes, text, place)
            for chance in judged.chances:
                _finite(chance.outcomes, text, f"{place}, control {chance.control!r}")


def _finite(outcomes: Any, text: str, place: str) -> None:
    if text not in outcomes:
        raise InputError(f"{place}: there is no outcome on {text!r}; {closest(text, outcomes)}")
    row = np.atleast_1d(np.asarray(outcomes[text], dtype=np.float64))
    if not len(row):
        raise InputError(f"{place}, text {text!r}: there is no draw; a comparison needs at least one")
    bad = np.flatnonzero(~(np.abs(row) <= LARGEST))
    if len(bad):
        draw = f", draw {int(bad[0])}" if "control" in place else ""
        allowed = "finite ones" if not np.isfinite(row[bad[0]]) else f"ones up to {LARGEST:g} in size"
        raise InputError(f"{place}, text {text!r}{draw}: the outcome is {row[bad[0]]}; only {allowed} can be compared")
