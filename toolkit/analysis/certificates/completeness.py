"""What a whole certificate holds beside its draws: scored windows, texts, reports, and a lock older than its runs."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator

from toolkit.analysis.reading.missing import named, windows_of
from toolkit.records.certificate import Certificate, CertifiedArm, CertifiedRoom
from toolkit.records.report import ANTI, ORACLE
from toolkit.records.study import split

AGREES = 1e-9
"""Difference of two sums over the same windows, nats a token, that another order of summing may make."""


def complaints(certificate: Certificate) -> Iterator[str]:
    """What a certificate leaves out or states twice in different ways; its draws and verdicts are checked elsewhere."""
    for name, text in certificate.texts.items():
        if text.windows < 1 or text.window < 2:
            yield f"text {name!r} has {text.windows} windows of {text.window} tokens"
            return
    counts = {(c.arm, c.budget, c.control): len(c.hashes) for c in certificate.controls}
    for arm in certificate.arms:
        draws = counts.get((arm.arm, arm.budget, certificate.study.analysis.control), 0)
        yield from _rooms(certificate, arm, draws)
    yield from _reports(certificate)
    yield from _younger(certificate)


def _rooms(certificate: Certificate, arm: CertifiedArm, draws: int) -> Iterator[str]:
    """The scored windows of an arm: one room a text where the study declares headroom, and none elsewhere."""
    study, where = certificate.study, named(arm.arm, arm.budget)
    control = next(c for c in study.controls if c.label == study.analysis.control)
    declared = study.headroom is not None and arm.arm in (study.headroom.arms or [arm.arm])
    declared = declared and arm.arm in study.likes(control)  # chance is that control's draws
    excused = {f"{name} of {arm.arm} at {arm.budget}" for name in (ORACLE, ANTI)}
    excused |= {named(arm.arm, arm.budget, study.analysis.control), windows_of(arm.arm, str(arm.budget))}
    texts = {name: text.windows - split(text.windows) for name, text in certificate.texts.items()} if declared else {}
    if not arm.headroom and excused & set(certificate.missing):
        return
    for name, scored in texts.items():
        if scored > 0 and name not in arm.headroom:
            yield f"{where} lacks its scored windows of text {name!r}, and the study declares headroom"
    for name, room in arm.headroom.items():
        if texts.get(name, 0) < 1:
            yield f"{where} holds scored windows of {name!r}, for which the study declares no headroom"
        else:
            yield from _room(room, texts[name], certificate.texts[name].window - 1, draws, f"{where}, text {name!r}")


def _room(room: CertifiedRoom, windows: int, tokens: int, draws: int, where: str) -> Iterator[str]:
    """What one text's scored windows say that the text, the draws or each other contradict."""
    for key in ("tokens", "chance", "arm", "oracle", "anti"):
        if len(getattr(room, key)) != windows:
            yield f"{where}: {len(getattr(room, key))} {key} windows, and {windows} are scored"
            return
    if any(each != tokens for each in room.tokens):
        yield f"{where}: a window scores {tokens} tokens, and others are stated"
    elif len(room.draws) != draws:
        yield f"{where}: the scored windows are of {len(room.draws)} draws, and the control has {draws}"
    elif draws:
        mean, chance = math.fsum(room.draws) / draws, math.fsum(room.chance) / (windows * tokens)
        if not math.isclose(mean, chance, rel_tol=AGREES, abs_tol=AGREES):
            yield f"{where}: the mean of the draws is {mean:.9g}, and their windows add up to {chance:.9g}"


def _reports(certificate: Certificate) -> Iterator[str]:
    """Numbers of no report: every arm, control and reference selection left one at least."""
    for run, found in certificate.reports.items():
        if not re.fullmatch("[0-9a-f]{64}", found):
            yield f"report {run} has hash {found:.40}, which is no SHA-256"
    least = len(certificate.arms) + len(certificate.controls) + 2 * sum(bool(arm.headroom) for arm in certificate.arms)
    if len(certificate.reports) < least:
        yield f"it names {len(certificate.reports)} reports, and its numbers are of {least} runs at least"


def _younger(certificate: Certificate) -> Iterator[str]:
    """A lock that was made after the first run had started, in a certificate that calls itself confirmatory."""
    if certificate.lock is None or certificate.exploratory:
        return
    started = certificate.provenance.get("started")
    first = started.get("first") if isinstance(started, dict) else None
    try:
        times = [datetime.datetime.fromisoformat(text) for text in (certificate.lock.created, first)]
        created, begun = (t if t.tzinfo else t.replace(tzinfo=datetime.UTC) for t in times)
    except (TypeError, ValueError):
        yield f"its lock was made {certificate.lock.created!s:.40}, and its first run started {first!s:.40}: no times"
        return
    if begun < created.replace(microsecond=0):
        yield f"its lock is younger than its first run: made {certificate.lock.created}, and started {first}"
