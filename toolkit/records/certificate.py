"""The certificate file: a control as one file that anyone can verify without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from toolkit.records.io import File, Record, atomic, digest
from toolkit.records.lock import Lock
from toolkit.records.profile import Profile
from toolkit.records.report import Law, Text
from toolkit.records.study import Study

DIGITS = 16
"""Hexadecimal digits of the hashes of single draws and arms: 64 bits, so that 10⁵ of them do not meet by chance."""


def tied(*parts: Any) -> str:
    """The first 16 digits of the SHA-256 of plain data as canonical JSON: a set of layers tied to what it scored."""
    return digest(list(parts))[:DIGITS]


class CertifiedRoom(Record):
    """One text's scored windows: summed negative log-likelihoods (nats) that the headroom is computed from.

    `chance` is the mean over the draws; `draws` are their losses (nats a token) on these windows.
    """

    tokens: list[int]
    chance: list[float]
    arm: list[float]
    oracle: list[float]
    anti: list[float]
    draws: list[float]


class CertifiedArm(Record):
    """A judged selection: how it is made again, what it is, and what it scored.

    `scored` is the first 16 digits of the SHA-256 of `hash`, the outcomes and the scored windows (`tied`), so that an
    altered score is laid to its arm.
    """

    arm: str
    budget: str | None = None
    selector: str
    seed: int | None = None
    total_of: str | None = Field(default=None, description="the arm whose total is this one's budget")
    mask: str
    hash: str = Field(description="`Selection.layers_hash`")
    parameters: int
    bytes: int
    outcomes: dict[str, float]
    headroom: dict[str, CertifiedRoom] = {}
    scored: str


class CertifiedDraws(Record):
    """The draws of one control for one arm at one budget, as one hash and one outcome a text each.

    `hashes[i]` are the first 16 digits of the SHA-256 of draw i's `layers_hash` and its outcomes (`tied`).
    """

    control: str
    arm: str
    budget: str | None = None
    law: Law
    seed: int
    family: list[str] | None = Field(default=None, description="the budgets of one family, where draws are nested")
    asked: int
    mismatch: dict[str, float] = Field(description="mean and largest, signed, of the parameters")
    hashes: list[str]
    outcomes: dict[str, list[float]]


class Certificate(File):
    """A control: profile, laws, draws, locked analysis, outcomes and verdicts; `seal` is the hash of all the rest.

    Attributes:
        study: as declared (analysis, arms, controls, seed), less its small form; a lock seals this very declaration.
        exploratory: why the results are exploratory; empty where they are confirmatory.
        missing: declared runs that left no report; with any, the results are exploratory.
        reports: run → SHA-256 of the report that its numbers were taken from.
        verdicts: what the analysis found; `toolkit verify` computes all of it again.
    """

    kind: Literal["certificate"] = "certificate"
    study: Study
    profile: Profile
    profile_hash: str = Field(description="`Profile.hash`: of all the rows, whereas the fingerprint is of the weights")
    texts: dict[str, Text]
    lock: Lock | None = None
    exploratory: list[str] = []
    missing: list[str] = []
    settings: str
    arms: list[CertifiedArm]
    controls: list[CertifiedDraws]
    reports: dict[str, str]
    provenance: dict[str, Any] = Field(description="toolkit, packages, device, compute dtype, dates")
    verdicts: dict[str, Any]
    seal: str = ""

    def sealed(self) -> Certificate:
        """The same certificate with its seal."""
        return self.model_copy(update={"seal": seal_of(self.to_json())})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the certificate, atomically: compact, one arm, control or layer a line."""
        with atomic(path) as temporary:
            temporary.write_text(render(self.to_json()), encoding="utf-8")
        return Path(path)


def seal_of(data: dict[str, Any]) -> str:
    """SHA-256 of a certificate's plain data but its seal, as canonical JSON."""
    return digest({key: value for key, value in data.items() if key != "seal"})


def render(data: dict[str, Any]) -> str:
    """The one text of a certificate's plain data: any other text of it was edited."""
    return _broken(data, 2) + "\n"


def _broken(value: Any, depth: int) -> str:
    """JSON with a line for each key of the outer two levels, and for each item of their lists of mappings."""
    if depth and isinstance(value, dict) and value:
        items = [f"{json.dumps(key, ensure_ascii=False)}: {_broken(item, depth - 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n}"
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(_compact(item) for item in value) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
