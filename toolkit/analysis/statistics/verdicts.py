"""Verdicts: the only place where claims are made. From `Evidence` to plain data that a table or certificate shows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from toolkit.analysis.reading.evidence import Evidence
from toolkit.analysis.statistics import headroom as rooms
from toolkit.analysis.statistics import multiplicity, replica, sentences
from toolkit.analysis.statistics.comparisons import Comparisons, families, matched
from toolkit.analysis.statistics.inference import Side
from toolkit.analysis.statistics.joint import statistics
from toolkit.errors import InputError

SCHEMA = 1
BETTER, SMALL, NOT, WORSE = "better", "better, below the margin", "not separated", "worse"


def verdicts(evidence: Evidence) -> dict[str, Any]:
    """Comparisons, joint tests, the declared family of claims, verdicts under every law, headroom and sentences.

    A claim is `better` where its corrected p is at most the level and its gap reaches the margin, `better, below
    the margin` where it does not, `worse` where the corrected p of the opposite side is at most the level (the
    opposite side is a family of its own, at the same level), else `not separated`.

    Returns:
        `comparisons`, `joint`, `claims`, `excluded`, `family`, `laws`, `headroom`, `replica`, `sentences` (one a
        claim, in their order) and `notes`: numbers, strings, lists, dictionaries and None, equal for equal
        evidence. Gaps are signed as measured, in the evidence's unit.

    Raises:
        InputError: an outcome that is missing or not finite, named by arm, budget, control, text and draw; a
            control or arm that the analysis names and nothing was measured for; a joint test whose control draws
            no families; max-t over draws that arms do not share.
    """
    return _Judge(evidence).everything()


class _Judge:
    """One pass over the evidence; notes gather as it goes."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.analysis = evidence.analysis
        self.measured = Comparisons(evidence)
        self.arms, self.controls = self.measured.arms, self.measured.controls
        self.side, self.other = self.measured.side, self.measured.other
        self.level = evidence.analysis.level
        self.notes: list[str] = []

    def everything(self) -> dict[str, Any]:
        claims, excluded = self._claims()
        family = self._family(claims)
        self._correct(claims)
        headroom = self._headroom()
        found = {
            "schema": SCHEMA,
            "comparisons": self.measured.rows(),
            "joint": self.measured.joints(),
            "claims": claims,
            "excluded": excluded,
            "family": family,
            "laws": [self._laws(claim) for claim in claims],
            "headroom": headroom,
            "replica": self._replica(),
        }
        found["sentences"] = [sentences.claim(c, family, _rooms_of(c, headroom)) for c in claims]
        return found | {"notes": self.notes}

    # what is claimed

    def _claims(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The declared family, uncorrected, and the claims that are left out."""
        analysis, claims, excluded = self.analysis, [], []
        for arm in analysis.arms or list(self.arms):
            drawn = [b for b in self.arms[arm] if self.measured.chance(arm, b, analysis.control) is not None]
            lost = [b for b in self.arms[arm] if b not in drawn]
            if lost:
                place = f" at {', '.join(map(str, lost))}" if drawn else ""
                self.notes.append(f"{arm} has no draws of {analysis.control}{place}: no claim is made of it there.")
            for text in self.evidence.texts:
                for budget, budgets, reason in self._places(arm, text, drawn):
                    head = {"arm": arm, "text": text, "budget": budget, "control": analysis.control}
                    if reason is not None:
                        excluded.append(head | {"reason": reason})
                    else:
                        claims.append(head | self._claim(arm, text, budgets))
        return claims, excluded

    def _places(
        self, arm: str, text: str, drawn: list[str | None]
    ) -> list[tuple[str | None, list[str | None], str | None]]:
        """The claims on an arm and a text: the claim's budget, the budgets it is tested over, why it is left out."""
        analysis = self.analysis
        if analysis.test == "each":
            return [(b, [b], analysis.excluded(arm, text, b)) for b in drawn]
        if not drawn:
            return []
        reason = analysis.excluded(arm, text)
        if reason is not None:
            return [(None, drawn, reason)]
        reasons = {b: analysis.excluded(arm, text, b) for b in drawn}
        kept = [b for b, why in reasons.items() if why is None]
        left_out = {b: why for b, why in reasons.items() if why is not None}
        if not kept:
            return [(None, drawn, "; ".join(f"{b}: {why}" for b, why in left_out.items()))]
        for budget, why in left_out.items():
            self.notes.append(f"{arm} on {text}: {budget} is left out of the joint test: {why.rstrip('.')}.")
        return [(None, kept, None)]

    def _claim(self, arm: str, text: str, budgets: list[str | None]) -> dict[str, Any]:
        control = self.analysis.control
        chances = self.measured.chances(arm, budgets, control)
        if len(budgets) > 1 and not all(families(c) for c in chances):
            raise InputError(
                f"analysis.test is 'joint', and control {control!r} draws no nested families; declare `chain: true` "
                "for it, or a control whose law permutes layers, or `test: each`"
            )
        if len({len(c) for c in chances}) > 1:
            counts = ", ".join(f"{len(c)} at {b}" for b, c in zip(budgets, chances, strict=True))
            raise InputError(
                f"analysis.test is 'joint', and {arm!r} has unlike numbers of draws of {control!r}: {counts}; a family "
                "has a draw at every budget: finish the draws, or declare `test: each`"
            )
        return self.measured.test(arm, text, budgets, control) | {"law": chances[0].law.selector}

    def _family(self, claims: list[dict[str, Any]]) -> dict[str, Any]:
        analysis = self.analysis
        draws = min((c["draws"] for c in claims), default=0)
        reachable = analysis.reachable(len(claims), draws) if claims else None
        if not claims:
            self.notes.append(f"There is no claim to test: no arm has draws of {analysis.control}.")
        return {
            "outcome": analysis.outcome,
            "unit": self.evidence.unit,
            "control": analysis.control,
            "side": self.side,
            "test": analysis.test,
            "tests": len(claims),
            "correction": analysis.correction,
            "level": self.level,
            "margin": analysis.margin,
            "margin_reason": analysis.margin_reason,
            "draws": draws,
            "reachable": reachable,
            "descriptive": reachable is None or reachable > self.level,
        }

    def _correct(self, claims: list[dict[str, Any]]) -> None:
        """Corrected p of both sides, and the verdict."""
        ours, theirs = self._adjusted(claims, self.side), self._adjusted(claims, self.other)
        for claim, p, opposite in zip(claims, ours, theirs, strict=True):
            claim["adjusted"], claim["opposite"]["adjusted"] = p, opposite
            claim["verdict"] = self._verdict(p, opposite, claim["effect"]["gap"])

    def _adjusted(self, claims: list[dict[str, Any]], side: Side) -> list[float]:
        ps = [c["p"] if side == self.side else c["opposite"]["p"] for c in claims]
        if self.analysis.correction == "none" or not claims:
            return ps
        if self.analysis.correction == "holm":
            return [float(p) for p in multiplicity.holm(ps)]
        rows = [self._row(claim) for claim in claims]
        counts = sorted({len(row) - 1 for row in rows})
        if len(counts) > 1:
            raise InputError(
                f"analysis.correction is 'max-t', and arms have unlike numbers of draws of {self.analysis.control!r}: "
                f"{', '.join(map(str, counts))}; finish the draws, or declare `correction: holm`"
            )
        found = multiplicity.max_t([row[0] for row in rows], np.stack([row[1:] for row in rows]), side)
        return [max(p, float(q)) for p, q in zip(ps, found, strict=True)]

    def _row(self, claim: dict[str, Any]) -> np.ndarray:
        """The arm's statistic and its draws', (n + 1,), of a claim whose draws are shared with the others."""
        arm, text, control = claim["arm"], claim["text"], claim["control"]
        chances = self.measured.chances(arm, claim["budgets"], control)
        if not all(c.law.shared for c in chances):
            raise InputError(
                f"analysis.correction is 'max-t', and arms do not share the draws of control {control!r}; declare a "
                "control whose law permutes layers, or `correction: holm`"
            )
        values = np.array([self.arms[arm][b].outcomes[text] for b in claim["budgets"]], dtype=np.float64)
        drawn = np.stack([np.asarray(c.outcomes[text], dtype=np.float64) for c in chances])
        return np.append(values, drawn[0]) if len(values) == 1 else statistics(values, drawn)

    def _verdict(self, p: float, opposite: float, gap: float) -> str:
        if p <= self.level:
            good = -gap if self.side == "less" else gap
            return BETTER if self.analysis.margin == 0 or good >= self.analysis.margin else SMALL
        return WORSE if opposite <= self.level else NOT

    # every law's answer to the same question

    def _laws(self, claim: dict[str, Any]) -> dict[str, Any]:
        """One claim's comparison under every control, at the uncorrected level.

        Those agree, or not, whose draws hold the arm's memory and are enough to reach the level; better by more and by
        less than the margin is one answer.
        """
        arm, text = claim["arm"], claim["text"]
        tests = []
        for control in self.controls:
            left_out = tuple(b for b in self.arms[arm] if b is not None and b not in claim["budgets"])
            budgets, chances = self.measured.budgets(arm, control, left_out)
            if not budgets:
                continue
            if budgets != claim["budgets"]:
                lacking = ", ".join(str(b) for b in claim["budgets"] if b not in budgets)
                self._note(f"{arm} has no draws of {control} at {lacking}: its verdict there stands without them.")
            test = self.measured.test(arm, text, budgets, control)
            tests.append(
                {"control": control, "law": chances[0].law.selector, "holds": list(chances[0].law.holds)}
                | test
                | {
                    "verdict": self._verdict(test["p"], test["opposite"]["p"], test["effect"]["gap"]),
                    "counts": all(matched(c) for c in chances),
                }
            )
        telling = [t for t in tests if t["counts"] and t["smallest_p"] <= self.level]
        entry = {key: claim[key] for key in ("arm", "text", "budget", "budgets", "control")}
        entry |= {
            "level": self.level,
            "corrected": False,
            "tests": tests,
            "agree": len({_direction(t) for t in telling}) <= 1,
        }
        composition = not entry["agree"] and _by_composition(telling)
        return entry | {"composition": composition, "sentence": sentences.law_sentence(entry, composition)}

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # beside the claims

    def _headroom(self) -> list[dict[str, Any]]:
        settings, rows = self.evidence.headroom, []
        for arm, at in self.arms.items():
            for budget, judged in at.items():
                for text, room in judged.headroom.items():
                    if settings is None:
                        raise InputError(f"{arm} has reference selections, and the study declares no headroom")
                    what = f"{arm} at {budget} on {text}"
                    head = {"arm": arm, "budget": budget, "text": text}
                    rows.append(head | rooms.headroom(room, self.level, settings, what))
        return rows

    def _replica(self) -> list[dict[str, Any]]:
        """The paper's two tests over this study's settings; better is on the declared side."""
        sign = 1.0 if self.side == "less" else -1.0
        rows = []
        for arm in self.arms:
            for control in self.controls:
                budgets, chances = self.measured.budgets(arm, control)
                if not budgets:
                    continue
                for text in self.evidence.texts:
                    pairs = [
                        (sign * self.arms[arm][b].outcomes[text], sign * np.asarray(c.outcomes[text], dtype=np.float64))
                        for b, c in zip(budgets, chances, strict=True)
                    ]
                    signs = replica.sign_test([v - float(np.median(d)) for v, d in pairs])
                    beaten = sum(int((d < v).sum()) for v, d in pairs)
                    count = replica.draw_count(beaten, sum(len(d) for _, d in pairs))
                    head = {"arm": arm, "control": control, "text": text, "settings": len(pairs)}
                    rows.append(head | {"sign_test": asdict(signs), "draw_count": asdict(count)})
        return rows


def _direction(test: dict[str, Any]) -> str:
    """A verdict without its size: laws do not disagree over a margin."""
    return BETTER if test["verdict"] == SMALL else test["verdict"]


def _by_composition(tests: list[dict[str, Any]]) -> bool:
    """Whether verdicts differ only between a law and one that holds strictly more than it."""
    for at, first in enumerate(tests):
        for second in tests[:at]:
            if _direction(first) != _direction(second):
                one, two = set(first["holds"]), set(second["holds"])
                if not (one < two or two < one):
                    return False
    return True


def _rooms_of(claim: dict[str, Any], headroom: list[dict[str, Any]]) -> list[dict[str, Any]]:
    same = [h for h in headroom if h["arm"] == claim["arm"] and h["text"] == claim["text"]]
    return [h for h in same if h["budget"] in claim["budgets"]]
