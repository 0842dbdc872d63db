"""The lock file: a study's analysis, sealed before its first run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from toolkit.records.io import File
from toolkit.records.study import Analysis

LOCK = "lock.json"


class Lock(File):
    """What was declared, with which code, on which weights and texts, and when; `hash` is what reports carry.

    Attributes:
        declaration: `Study.declaration` of the whole study, seeds, draws and arms included.
        code: what computes the results: versions, and a hash of the sources.
        texts: name → SHA-256 of the text.
        created: UTC, ISO 8601.
    """

    kind: Literal["lock"] = "lock"
    study: str
    form: Literal["full", "small"]
    analysis: Analysis
    declaration: str
    code: dict[str, str]
    model: str
    fingerprint: str
    texts: dict[str, str] = Field(min_length=1)
    created: str
