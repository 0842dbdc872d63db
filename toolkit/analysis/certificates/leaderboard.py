"""Selectors between chance (0) and oracle (1), per model and text, from certificates alone."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.analysis.certificates import verification
from toolkit.analysis.certificates.methods import identifier
from toolkit.analysis.printing.markdown_table import escape, table
from toolkit.analysis.statistics import bootstrap
from toolkit.analysis.statistics.comparisons import LARGEST
from toolkit.analysis.statistics.headroom import CANNOT_RANK
from toolkit.analysis.statistics.inference import sign_over_models
from toolkit.errors import InputError, closest
from toolkit.records.certificate import Certificate, CertifiedArm, CertifiedRoom
from toolkit.records.io import digest

FORMATS = ("md", "json", "csv")
COLUMNS = (
    *("selector", "arm", "model", "fingerprint", "text", "text_sha256"),
    *("placed", "low", "high", "budgets", "of_budgets"),
    *("p", "adjusted", "smallest_p", "verdict", "effect", "models", "exploratory", "certificate", "file"),
)


def leaderboard(folder: str | os.PathLike[str], *, verify: bool = False) -> dict[str, Any]:
    """Every judged selector of every certificate in a folder, as plain data.

    A selector's place is Σ_b(chance − selector)/Σ_b(chance − oracle) over the budgets b at which the oracle is
    separated from chance, with an interval by the block bootstrap over the scored windows that its study declares.
    p is that of the joint test against the declared control, or of its only budget. The sign test's unit is the
    model: one number each, the mean over texts and certificates of the standardized gap.

    Args:
        folder: its `*.json` files are certificates.
        verify: verify each in full, and not by its seal alone.

    Returns:
        `rows`, best place first within a model and text; `signs`, for selectors of two models or more; `unplaced`,
        where the oracle is not separated from chance or was not measured; `refused`, files that are damaged, are no
        certificates, or repeat another; `certificates`; `verified`, `seal` or `full`.

    Raises:
        InputError: there is no such folder, or no JSON file in it.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        what = "holds no certificate (*.json)" if folder.is_dir() else "is no folder of certificates"
        raise InputError(f"{folder} {what}; toolkit certify STUDY -o {folder / 'control.json'} makes one")
    kept, refused = _read(paths, verify)
    rows: list[dict[str, Any]] = []
    unplaced: list[dict[str, Any]] = []
    for name, certificate in list(kept.items()):
        try:
            found, lacking = _of(name, certificate)
        except (LookupError, TypeError, ValueError, AttributeError, InputError) as error:  # a seal proves no content
            refused.append({"file": name, "reason": f"its verdicts or windows are not what certify writes: {error}"})
            del kept[name]
            continue
        rows += found
        unplaced += lacking
    models: dict[str, set[str]] = {}
    for row in rows:
        models.setdefault(row["selector"], set()).add(row["fingerprint"])
    for row in rows:
        row["models"] = len(models[row["selector"]])
    rows.sort(key=lambda r: (r["model"], r["text"], r["placed"] is None, -(r["placed"] or 0.0), r["selector"]))
    return {
        "rows": rows,
        "signs": _signs(rows),
        "unplaced": unplaced,
        "refused": refused,
        "certificates": [
            {
                "file": name,
                "certificate": identifier(one),
                "study": one.study.name,
                "model": one.profile.model,
                "exploratory": list(one.exploratory),
            }
            for name, one in kept.items()
        ],
        "verified": "full" if verify else "seal",
    }


def _read(paths: Sequence[Path], verify: bool) -> tuple[dict[str, Certificate], list[dict[str, str]]]:
    """The sound certificates by file name, no two made of the same reports; and why each other file is refused."""
    kept: dict[str, Certificate] = {}
    refused = []
    seen: dict[str, str] = {}
    for path in paths:
        try:
            certificate = verification.verify(path).certificate if verify else verification.sealed(path)
        except InputError as error:
            refused.append({"file": path.name, "reason": str(error).replace(f"{path.parent}{os.sep}", "")})
            continue
        key = digest(certificate.reports)
        if key in seen:
            refused.append({"file": path.name, "reason": f"it is made of the same reports as {seen[key]}"})
            continue
        seen[key] = path.name
        kept[path.name] = certificate
    return kept, refused


def _of(file: str, certificate: Certificate) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A certificate's rows, one an arm and text, and what it cannot place."""
    rows, unplaced = [], []
    study, profile = certificate.study, certificate.profile
    arms: dict[str, list[CertifiedArm]] = {}
    for arm in certificate.arms:
        arms.setdefault(arm.arm, []).append(arm)
    for label in study.analysis.arms or list(arms):
        judged = arms.get(label, [])
        for text in certificate.texts if judged else ():
            head = {
                "selector": _selector(judged[0]),
                "arm": label,
                "model": profile.model,
                "fingerprint": profile.fingerprint,
                "text": text,
                "text_sha256": certificate.texts[text].sha256,
            }
            tail = {
                "exploratory": bool(certificate.exploratory),
                "certificate": identifier(certificate),
                "file": file,
            }
            told = {
                room["budget"]: room
                for room in certificate.verdicts["headroom"]
                if (room["arm"], room["text"]) == (label, text)
            }
            separated = [a for a in judged if a.budget in told and told[a.budget]["separated"]]
            for arm in judged:
                if arm not in separated:
                    reason = _text(told[arm.budget]["reason"]) if arm.budget in told else "the oracle was not measured"
                    unplaced.append(head | {"budget": arm.budget, "reason": reason} | tail)
            place = _place([a.headroom[text] for a in separated], certificate)
            place |= {"of_budgets": len(judged), "measured": bool(told)}
            rows.append(head | place | _tested(certificate, label, text) | tail)
    return rows, unplaced


def _selector(arm: CertifiedArm) -> str:
    return arm.selector if arm.total_of is None else f"{arm.selector}, given the total of {arm.total_of}"


def _place(rooms: Sequence[CertifiedRoom], certificate: Certificate) -> dict[str, Any]:
    """Where a selector stands over these budgets' rooms, which share their windows."""
    settings = certificate.study.headroom
    if not rooms or settings is None:
        return {"placed": None, "low": None, "high": None, "budgets": 0}
    gain = np.sum([np.subtract(room.chance, room.arm) for room in rooms], axis=0)
    possible = np.sum([np.subtract(room.chance, room.oracle) for room in rooms], axis=0)
    found = bootstrap.ratio(gain, possible, block=min(settings.block, len(gain)), resamples=settings.resamples)
    return {"placed": found.value, "low": found.low, "high": found.high, "budgets": len(rooms)}


def _tested(certificate: Certificate, arm: str, text: str) -> dict[str, Any]:
    """p and effect of an arm on a text against the declared control: the joint test's, or its only claim's."""
    found, control = certificate.verdicts, certificate.study.analysis.control
    claims = [c for c in found["claims"] if (c["arm"], c["text"]) == (arm, text)]
    joint = [j for j in found["joint"] if (j["arm"], j["text"], j["control"]) == (arm, text, control)]
    one = (claims if len(claims) == 1 else joint)[:1]
    effects = [_number(c["effect"]["standardized"]) for c in one or claims]
    known = [effect for effect in effects if effect is not None]
    sign = 1.0 if certificate.study.analysis.side == "less" else -1.0
    return {
        "p": _number(one[0]["p"]) if one else None,
        "adjusted": _number(one[0].get("adjusted")) if one else None,
        "smallest_p": _number(one[0]["smallest_p"]) if one else None,
        "verdict": _text(one[0].get("verdict")) if one else None,
        "effect": sign * float(np.mean(known)) if known else None,
    }


def _number(value: Any) -> float | None:
    """A number of a certificate's verdicts, which only `verify` computes again."""
    if value is None or (type(value) in (int, float) and abs(value) <= LARGEST):
        return value
    raise TypeError(f"{value!s:.40} stands where a number is asked for")


def _text(value: Any) -> str | None:
    """A text of a certificate's verdicts."""
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{value!s:.40} stands where a text is asked for")


def _signs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sign test over models of every selector that was judged on two or more; below zero is better than chance."""
    by_selector: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["effect"] is not None:
            by_selector.setdefault(row["selector"], {}).setdefault(row["fingerprint"], []).append(row["effect"])
    return [
        {"selector": selector, **asdict(sign_over_models({m: float(np.mean(e)) for m, e in models.items()}))}
        for selector, models in sorted(by_selector.items())
        if len(models) > 1
    ]


def render(data: dict[str, Any], format: str = "md") -> str:
    """The leaderboard as Markdown, JSON or CSV (its rows alone).

    Raises:
        InputError: another format.
    """
    if format not in FORMATS:
        raise InputError(f"no format is called {format!r}; {closest(format, FORMATS)}")
    if format == "json":
        return json.dumps(data, indent=1, ensure_ascii=False)
    if format == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(data["rows"])
        return out.getvalue().rstrip("\n")
    return _markdown(data)


def _markdown(data: dict[str, Any]) -> str:
    how = "verified in full" if data["verified"] == "full" else "checked by seal (--verify makes every draw again)"
    held = len(data["certificates"])
    parts = [
        f"{held} certificate{'' if held == 1 else 's'}, {how}. 0 is chance, 1 the oracle; intervals are 95%, over "
        "windows.",
        table(
            ["model", "text", "selector", "placed", "interval", "budgets", "p", "smallest p", "models", "certificate"],
            [
                [
                    f"{row['model']} ({row['fingerprint'][:8]})",
                    row["text"],
                    row["selector"],
                    _placed(row),
                    "–" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}",
                    f"{row['budgets']} of {row['of_budgets']}",
                    "–" if row["p"] is None else f"{row['p']:.3g}",
                    "–" if row["smallest_p"] is None else f"{row['smallest_p']:.3g}",
                    str(row["models"]),
                    row["certificate"] + (" (exploratory)" if row["exploratory"] else ""),
                ]
                for row in data["rows"]
            ],
        ),
    ]
    if data["signs"]:
        parts += ["Sign test over models (two-sided; one number a model):"]
        signs = [[s["selector"], f"{s['below']} of {s['models']}", f"{s['p']:.3g}"] for s in data["signs"]]
        parts.append(table(["selector", "models better than chance", "p"], signs))
    if data["unplaced"]:
        lines = [
            f"- {escape(u['arm'])} on {escape(u['text'])} of {escape(u['model'])} at {u['budget']}: "
            f"{escape(u['reason'])} ({u['file']})"
            for u in data["unplaced"]
        ]
        parts += ["Cannot rank:", "\n".join(lines)]
    exploratory = [c for c in data["certificates"] if c["exploratory"]]
    if exploratory:
        lines = [f"- {c['certificate']} ({c['file']}): {escape('; '.join(c['exploratory']))}" for c in exploratory]
        parts += ["Exploratory:", "\n".join(lines)]
    if data["refused"]:
        parts += ["Refused:", "\n".join(f"- {r['file']}: {escape(r['reason'])}" for r in data["refused"])]
    return "\n\n".join(parts)


def _placed(row: dict[str, Any]) -> str:
    if row["placed"] is not None:
        return f"{row['placed']:.2f}"
    return CANNOT_RANK if row["measured"] else "no oracle was measured"
