"""The report file: everything needed to recompute a study's tables without a GPU or the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from toolkit.records.budget import Budget
from toolkit.records.io import File, Record
from toolkit.records.plan import Plan
from toolkit.records.profile import Reference
from toolkit.records.selection import Selection

REPORT = "report.json"
PARTIAL = "draws.partial.jsonl"
"""Beside it: the draws of a control that is being measured."""
ROWS = "rows.jsonl.gz"

SIXTEEN_BIT, BASE = "16-bit", "base"
"""The reference runs: every layer protected, and none."""
RESTORE, QUANTIZE = "restore", "quantize"
"""The sweeps: each layer alone restored to 16 bit, and each alone quantized."""
ORACLE, ANTI = "oracle-additive", "anti-oracle"
"""The reference selections: the best and the worst set at an arm's memory, as far as effects add up."""


class Score(Record):
    """One evaluation of one text: sums over all scored tokens, divided by their number.

    Attributes:
        tokens: scored tokens.
        loss: mean negative log-likelihood, nats a token; perplexity = exp(loss).
        kl: mean KL(16-bit ‖ arm), nats a token.
        agreement: share of tokens whose most likely next token is the 16-bit arm's.
    """

    tokens: int
    loss: float
    perplexity: float
    kl: float
    agreement: float


class Text(Record):
    """What was read, and how it was cut into windows."""

    source: str
    sha256: str
    characters: int
    tokens: int = Field(description="tokens used, all windows together")
    windows: int
    window: int
    stride: int
    bos: bool = Field(description="whether each window starts with a beginning-of-text token added to it")


class Draw(Record):
    """One random selection of a control and what it scored.

    `mask` is the set as a hexadecimal number: bit i (of least weight first) is the profile's layer i.
    """

    index: int
    mask: str
    layers: int
    parameters: int
    bytes: int
    mismatch: float
    scores: dict[str, Score]


class Law(Record):
    """The distribution that a control's draws come from."""

    selector: str
    options: dict[str, Any]
    like: str = Field(description="the arm that the draws are matched to")
    match: str | None = Field(default=None, description="the quantity held equal; null: not stated")
    within: float | None = Field(default=None, description="its tolerance, a fraction; null: none is promised")
    holds: list[str] = Field(default=[], description="what each draw shares with the arm besides its total")
    chain: bool = Field(default=False, description="draw i of every budget belongs to one family")
    shared: bool = Field(default=False, description="draw i of every arm is one random change of all layers")
    feasible_subsets: int | None = None
    inclusion: list[float] | None = None
    inclusion_draws: int | None = Field(
        default=None, description="simulated draws that the inclusion was estimated from; null: exact"
    )
    expected: dict[str, float] | None = Field(default=None, description="role → expected layers in a draw")
    single_total: bool | None = None


class Rows(Record):
    """Per-window outcomes in a file beside the report: ids and numbers, never the text."""

    file: str
    sha256: str
    count: int
    columns: list[str]


class Provenance(Record):
    """Where and with what a run was made."""

    toolkit: str
    python: str
    packages: dict[str, str]
    platform: str
    device: str
    threads: int
    compute_dtype: str
    commit: str | None = Field(default=None, description="git commit of the working folder; null outside a repository")
    dirty: bool | None = None
    started: str = Field(description="UTC, ISO 8601")
    seconds: float
    peak_memory: dict[str, int] = Field(
        description="bytes: base and peak; allocated and reserved on a GPU, resident on a CPU"
    )
    fallbacks: dict[str, int] = Field(default={}, description="what was not done as planned, and how often")


Role = Literal["reference", "arm", "control", "sweep", "oracle", "repeat"]


class Report(File):
    """One run of a study: a reference arm, a judged arm, a control with all of its draws, or what calibrates them.

    Attributes:
        role: `reference` (nothing or everything protected); `arm`; `control`; `sweep` (each layer alone, the arm is
            `restore` or `quantize`, draw i is layer i); `oracle` (a reference selection at the arm's memory, named
            by `control`); `repeat` (the base once more, otherwise computed: the numerical floor).
        settings: hash of what fixes the numbers (model, base, texts, windows, dtype); runs of one study share it.
        labels: what must be said beside the results: a small form, or draws that cannot reach the declared level.
        scores: text name → score; empty for a control, whose draws carry theirs.
    """

    kind: Literal["report"] = "report"
    study: str
    form: Literal["full", "small"]
    run: str
    role: Role
    arm: str
    control: str | None = None
    budget: Budget | None = None
    model: str
    fingerprint: str
    reference: Reference
    settings: str
    lock: str | None = Field(default=None, description="hash of the locked analysis that the run was made under")
    seed: int
    plan: Plan | None = None
    selection: Selection | None = None
    law: Law | None = None
    layers: list[str] | None = Field(default=None, description="all layers in profile order, for the draws' masks")
    labels: list[str] = []
    scores: dict[str, Score] = {}
    draws: list[Draw] = []
    texts: dict[str, Text]
    rows: Rows | None = None
    provenance: Provenance


def mask(chosen: set[str] | frozenset[str], names: list[str]) -> str:
    """A set of layers as a hexadecimal bit mask over `names`, bit 0 the first name."""
    return hex(sum(1 << at for at, name in enumerate(names) if name in chosen))


def unmask(text: str, names: list[str]) -> list[str]:
    """The names of a mask, in order."""
    bits = int(text, 16)
    return [name for at, name in enumerate(names) if bits >> at & 1]
