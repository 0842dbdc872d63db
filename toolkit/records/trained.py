"""The report of a fine-tuning run: what was trained, how it went, and what it scored; rows lie beside it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from toolkit.records.dataflow import Flow
from toolkit.records.io import File, Record
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.records.profile import Reference
from toolkit.records.report import Provenance, Rows
from toolkit.records.selection import Selection

ROW = ["group", "row", "nll", "tokens", "options", "gold", "prediction", "score", "parsed"]
"""Columns of the rows file, one line a scored row: its set and its number in the source; the gold target's summed
negative log-likelihood (nats) and tokens; all options' summed negative log-likelihoods, or null; the gold option, or
null; the predicted option or the parsed answer; its score in [0, 1]; and whether the answer could be parsed."""

RUNS = "runs"
"""Folder of the runs' folders in a study's results."""

CURVE = "curve.csv"
"""Beside the report: step, loss, learning rate, gradient norm, target tokens, seconds."""


class Flag(Record):
    """A health check that did not pass: `fatal` ended the run, `flag` stands in the tables."""

    check: str
    severity: Literal["fatal", "flag"]
    reason: str
    step: int | None = None
    layer: str | None = None


class Data(Record):
    """The rows of one split: what was read, used and left out.

    Attributes:
        sha256: of the used rows' prompts and targets, in order.
        unusable: rows that the task cannot use; `cut`: rows whose target did not fit; both are not in `rows`.
        shortened: of `rows`, those whose prompt lost its beginning, to fit into the length.
    """

    source: str
    sha256: str
    found: int
    rows: int
    unusable: int = 0
    cut: int = 0
    shortened: int = 0


class Course(Record):
    """How the training went.

    Attributes:
        tokens: target tokens whose loss was taken, real tokens (no padding), and all tokens computed; all steps.
        losses: mean of the first and of the last tenth of the steps, nats a target token.
        seconds: of the steps alone, pauses left out.
        resumed: how often the run went on after it was stopped; `paused`: seconds that it waited.
        lowest: index of the lowest block with an adapter, below which no backward pass runs; None: it runs through all.
        scale: last loss scale under fp16.
    """

    steps: int
    planned: int
    examples: int
    target_tokens: int
    real_tokens: int
    computed_tokens: int
    first_loss: float | None = None
    last_loss: float | None = None
    seconds: float
    resumed: int = 0
    paused: float = 0.0
    lowest: int | None = None
    scale: float | None = None
    replayed: int = Field(default=0, description="micro-batches replayed as CUDA graphs")
    trainable: int = Field(description="parameters that were trained")

    @property
    def padding(self) -> float:
        """Share of computed tokens that are padding."""
        return 1 - self.real_tokens / self.computed_tokens if self.computed_tokens else 0.0


class Scores(Record):
    """One set's scores over its rows.

    Attributes:
        loss: of the gold target, nats a token: all rows' sums over all their target tokens.
        score: mean of the rows' scores, under the task's `metric`.
        chance: the larger of uniform guessing and the majority class of these rows; None where there are no options.
        constant: every row got the same prediction.
        unparsed: share of answers that could not be parsed.
    """

    rows: int
    loss: float
    metric: str
    score: float | None = None
    chance: float | None = None
    constant: bool = False
    unparsed: float = 0.0
    further: dict[str, float] = {}


class Begun(Record):
    """What the layers of a run started from, where an initializer was asked for.

    Attributes:
        folder: name of the folder of starts, in `starts` of the study's results.
        base: SHA-256 over every changed base: which model the adapter belongs to; null where none was changed.
        layers: how many layers do not start plainly.
        zero, residual: ‖W − Ŵ − s·BA‖_F/‖W‖_F of the zero start and of what was kept; plain means over these layers.
        changed: in how many of them another iterate than the zero start was kept.
        calibration: SHA-256 of the text; null where none was asked for.
        fallbacks: what was not done as asked for → in how many layers.
    """

    folder: str
    base: str | None = None
    layers: int
    zero: float
    residual: float
    changed: int
    calibration: str | None = None
    fallbacks: dict[str, int] = {}


class Trained(File):
    """One run of a fine-tuning study.

    Attributes:
        role: `arm`; `repeat`, the same under the same seeds (A/A); `tune`, a trial of the tuned lever; `untrained`,
            the baseline arm scored before any training (zero-shot), with a course of no steps.
        value: of the tuned lever, for a trial; `own`: an arm's run at the value that its trials chose.
        settings: hash of what all runs of a task share: model, data, rows, levers that are no factor, dtype, device.
        draws: which draw of a declared grid; None where there is none.
        start: what layers started from; None where all started plainly.
        dataflow: how the model computed; None where its data flow had no choice.
        finished: false where the run ended early, and then a fatal flag says why.
        scores: group → scores; "" holds all rows together.
    """

    kind: Literal["trained"] = "trained"
    study: str
    form: Literal["full", "small"]
    run: str
    role: Literal["arm", "repeat", "tune", "untrained"]
    arm: str
    task: str
    seeds: Seeds
    draw: int | None = None
    value: float | None = None
    own: bool = False
    levers: Levers
    model: str
    fingerprint: str
    reference: Reference
    settings: str
    lock: str | None = Field(default=None, description="hash of the locked analysis that the run was made under")
    plan: Plan
    protect: Selection | None = None
    adapt: Selection | None = None
    start: Begun | None = None
    dataflow: Flow | None = None
    finished: bool
    flags: list[Flag] = []
    labels: list[str] = []
    train: Data
    test: Data
    course: Course
    scores: dict[str, Scores] = {}
    adapter: str | None = Field(default=None, description="folder of the saved adapter, beside the report")
    rows: Rows | None = None
    provenance: Provenance
