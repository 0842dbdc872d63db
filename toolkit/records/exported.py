"""The export file: what a folder that was exported holds, and what was changed on the way."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import FiniteFloat

from toolkit.records.io import File, Record


class Survival(Record):
    """How much of an adapter's change ΔW a merge kept, of what the layer holds before and after, W₀ and W₁.

    Attributes:
        share: ⟨W₁ − W₀, ΔW⟩/‖ΔW‖², 1 where all of it arrived; null for an adapter that changes nothing.
        norm: ‖W₁ − W₀‖/‖ΔW‖; what exceeds the share is rounding noise. Null as above.
        change: ‖ΔW‖/‖W₀‖.
    """

    share: FiniteFloat | None = None
    norm: FiniteFloat | None = None
    change: FiniteFloat


class ExportedLayer(Record):
    """One layer of the exported model.

    Attributes:
        quantizer: of what is written; null in 16 or 32 bit.
        base: `quantized` from the dense weight, `start` as an initializer left it, `rescaled` under a shared scale,
            `merged` and quantized again, `dense`.
        rescaled: ‖Ŵ₁ − Ŵ₀‖/‖Ŵ₀‖ of sharing a scale; null where nothing was.
        differing: weights that the format's own library decodes to another bfloat16 number than this toolkit.
        merged: what survived of a merged adapter; null where none was.
    """

    quantizer: str | None = None
    base: Literal["dense", "quantized", "start", "rescaled", "merged"] = "dense"
    rescaled: FiniteFloat | None = None
    differing: int | None = None
    merged: Survival | None = None


class Exported(File):
    """`export.json` of an exported folder; written last, so that a folder with it is whole.

    Attributes:
        form: peft, bnb, compressed-tensors or merged; `layout` as the format's library calls it.
        model, fingerprint: of the dense weights.
        plan: SHA-256 of the plan; `plan_base` of what it says of the base alone.
        start: digest of the bases that initializers changed; null where none did.
        adapter: SHA-256 of the adapter's file; null where none went in.
        onto: what an adapter was merged onto: `base`, the decoded base that it was trained on, or `dense`, the
            original weights; null without a merge.
        dtype: of what is not packed.
        merged: of all merged layers together.
        checked: what the written files were compared with after writing; empty where nothing was.
        notes: what a reader has to know.
    """

    kind: Literal["export"] = "export"
    form: Literal["peft", "bnb", "compressed-tensors", "merged"]
    layout: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    plan: str
    plan_base: str
    start: str | None = None
    adapter: str | None = None
    onto: Literal["base", "dense"] | None = None
    dtype: str | None = None
    layers: dict[str, ExportedLayer] = {}
    merged: Survival | None = None
    checked: list[str] = []
    notes: list[str] = []
    packages: dict[str, Any] = {}
