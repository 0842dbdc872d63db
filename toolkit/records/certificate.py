"""The certificate file: a control as one file that anyone can verify without a GPU."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from toolkit.records.io import File, Record, digest
from toolkit.records.lock import Lock
from toolkit.records.profile import Profile
from toolkit.records.report import Law, Text
from toolkit.records.study import Analysis, Headroom


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
    """A judged selection: how it is made again, what it is, and what it scored."""

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


class CertifiedDraws(Record):
    """The draws of one control for one arm at one budget, as one hash and one outcome a text each.

    `hashes[i]` are the first 16 digits of the SHA-256 of draw i's `layers_hash` and its outcomes.
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
        exploratory: why the results are exploratory; empty where they are confirmatory.
        reports: run → SHA-256 of the report that its numbers were taken from.
        verdicts: what the analysis found; `toolkit verify` computes all of it again.
    """

    kind: Literal["certificate"] = "certificate"
    study: str
    question: str
    form: Literal["full", "small"]
    profile: Profile
    base: str
    protect: str
    texts: dict[str, Text]
    budgets: list[str]
    analysis: Analysis
    headroom: Headroom | None = None
    lock: Lock | None = None
    exploratory: list[str] = []
    settings: str
    arms: list[CertifiedArm]
    controls: list[CertifiedDraws]
    reports: dict[str, str]
    provenance: dict[str, Any] = Field(description="toolkit, packages, device, compute dtype, dates")
    verdicts: dict[str, Any]
    seal: str = ""

    def sealed(self) -> Certificate:
        """The same certificate with its seal."""
        return self.model_copy(update={"seal": self.expected_seal})

    @property
    def expected_seal(self) -> str:
        """SHA-256 of everything but the seal, as canonical JSON."""
        data = self.to_json()
        data.pop("seal", None)
        return digest(data)
