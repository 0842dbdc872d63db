"""The start file: what every layer of a plan starts from, and how it was found; the tensors lie beside it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, FiniteFloat

from toolkit.records.io import File, Record
from toolkit.records.report import Provenance


class LayerStart(Record):
    """One layer's start.

    Attributes:
        initializer, quantizer: keys.
        rank, scaling: of the adapter; rank is null where there is none.
        residuals: ‖W − Ŵ − s·BA‖_F/‖W‖_F of each iterate; the first is the zero start's.
        kept: which of them was kept.
        notes: fall-backs, damping, dead channels, stated errors.
        seconds: it took.
        base: SHA-256 of the packed base's tensors; null where the base is the quantizer's own.
    """

    initializer: str
    quantizer: str
    rank: int | None = None
    scaling: FiniteFloat = 1.0
    residuals: list[FiniteFloat] = Field(min_length=1)
    kept: int = 0
    notes: dict[str, Any] = {}
    seconds: FiniteFloat = 0.0
    base: str | None = None


class CalibrationText(Record):
    """What layers were calibrated on.

    Attributes:
        source, sha256: of the text, as other reports name it.
        windows, window, tokens: how many windows, of how many tokens, and how many tokens in all.
        activations: key of the quantizer that inputs were rounded by.
    """

    source: str
    sha256: str
    windows: int
    window: int
    tokens: int
    activations: str = "none"


class StartFile(File):
    """`start.json` of a folder of starts; it is written last, so that a folder with it is whole.

    Attributes:
        model, fingerprint: of the dense weights.
        reference: what is known of these, such as that they are dequantized 4-bit values; null where nothing is.
        plan: SHA-256 of the plan that was asked for.
        seed: of the adapters.
        dtype: what bases are decoded to.
        base: SHA-256 over every changed base: which model an adapter trained on this start belongs to.
        calibration: the text; null where no layer asked for one.
        layers: layer name → its start.
        seconds, peak_bytes: of the whole pass; memory above what was held before it.
        provenance: versions, device, commit.
    """

    kind: Literal["start"] = "start"
    model: str | None = None
    fingerprint: str
    reference: str | None = None
    plan: str
    seed: int = 0
    dtype: str
    base: str
    calibration: CalibrationText | None = None
    layers: dict[str, LayerStart]
    seconds: FiniteFloat = 0.0
    peak_bytes: int | None = None
    provenance: Provenance | None = None
