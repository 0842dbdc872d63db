"""The report of a run of a study of starts: every layer's residual and output error, and the model's scores."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat

from toolkit.records.io import File, Record
from toolkit.records.plan import Plan
from toolkit.records.profile import Reference
from toolkit.records.report import Provenance, Rows, Score, Text

COLUMNS = ["activations", "text", "nll", "kl", "top"]
"""Of the rows file: one line a rounding of inputs and text, with one number a window in each of the last three."""


class LayerOutcome(Record):
    """What one layer starts from; Ŵ as it is decoded to the compute dtype.

    Attributes:
        parameters: of its weight.
        zero: ‖W − Q(W)‖_F/‖W‖_F, of the plainly quantized base.
        residual: ‖W − Ŵ − s·BA‖_F/‖W‖_F, measured by the study, whatever the initializer says.
        output_zero, output: √(tr(E R Eᵀ)/tr(W R Wᵀ)) of E = W − Q(W) and E = W − Ŵ − s·BA, R the moments of the
            16-bit model's inputs on the calibration text, for every arm alike; null without such a text.
        residuals, kept: as the initializer tells them, one an iterate.
        notes: what the initializer says of this layer.
        seconds: it took.
    """

    role: str
    parameters: int
    zero: FiniteFloat
    residual: FiniteFloat
    output_zero: FiniteFloat | None = None
    output: FiniteFloat | None = None
    residuals: list[FiniteFloat] = []
    kept: int = 0
    notes: dict[str, Any] = {}
    seconds: FiniteFloat = 0.0


class Started(File):
    """One run: an arm at one scaling, or the 16-bit model.

    Attributes:
        role: `reference` (the 16-bit model) or `arm`.
        scaling: s; null where it plays no part (the start adds nothing, or there is no adapter): the run then stands
            for every s.
        settings: hash of what fixes the numbers, which runs of one study share.
        scores: text → quantizer that inputs are rounded by → score.
        texts: evaluated on; `calibration`: calibrated on.
        fallbacks: what was not done as asked for → in how many layers.
        seconds: the starts took, all layers together.
    """

    kind: Literal["started"] = "started"
    study: str
    form: Literal["full", "small"]
    run: str
    role: Literal["reference", "arm"]
    arm: str
    scaling: FiniteFloat | None = None
    model: str
    fingerprint: str
    reference: Reference
    settings: str
    lock: str | None = Field(default=None, description="hash of the locked analysis that the run was made under")
    seed: int = 0
    plan: Plan | None = None
    layers: dict[str, LayerOutcome] = {}
    fallbacks: dict[str, int] = {}
    seconds: FiniteFloat = 0.0
    labels: list[str] = []
    scores: dict[str, dict[str, Score]]
    texts: dict[str, Text]
    calibration: Text | None = None
    rows: Rows | None = None
    provenance: Provenance
