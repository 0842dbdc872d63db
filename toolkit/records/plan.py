"""The plan file: the whole per-layer decision as data."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, FiniteFloat

from toolkit.errors import InputError
from toolkit.records.io import File, Record
from toolkit.records.selection import Selection


class Adapter(Record):
    """One adapter, x ↦ W₀x + s·BAx: rank, alpha, the scaler's key, and the s that it computed.

    With `dora`, x ↦ m ⊙ (W₀ + s·BA)x/‖W₀ + s·BA‖, the norm of each row, with m trained (Liu et al., 2024).
    """

    rank: int = Field(gt=0)
    alpha: FiniteFloat
    scaler: str
    scaling: FiniteFloat
    dora: bool = False


class LayerPlan(Record):
    """One layer's decision: quantizer key, compute dtype (null: the model's) and adapter (null: none).

    With `range_guard`, rows whose product could leave float16's range are computed scaled down and scaled back in
    float32 (`toolkit.runs.guard`); the layer then answers in float32.
    """

    quantizer: str
    compute_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    range_guard: bool = False
    adapter: Adapter | None = None


class Plan(File):
    """`default` holds for every layer of the model that `layers` does not name.

    The output head is no layer and stays in 16 bit unless it is named. `fingerprint` ties the plan to the
    weights it was made for; a plan without one (made by hand) fits any model that has its layers.
    """

    kind: Literal["plan"] = "plan"
    model: str | None = None
    fingerprint: str | None = None
    dataflow: str = "stock"
    default: LayerPlan
    layers: dict[str, LayerPlan] = {}

    @classmethod
    def protecting(
        cls,
        selection: Selection | None,
        base: str = "nf4",
        *,
        protect: str = "none",
        adapt: Selection | None = None,
        rank: int | None = None,
        alpha: float = 16.0,
        scaler: str = "lora",
        dora: bool = False,
        dataflow: str = "stock",
        compute_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        range_guard: bool = False,
    ) -> Plan:
        """Keep the selected layers in `protect` (16 bit) and quantize all others to `base`.

        Args:
            selection: the protected layers; None protects nothing.
            base: key of the quantizer of all other layers.
            protect: key of the quantizer of the selected layers.
            adapt: the layers that get an adapter; None adapts every layer where `rank` is given.
            rank, alpha, scaler, dora: of the adapters; without a rank there are none.
            compute_dtype, range_guard: of the protected layers.

        Raises:
            InputError: unknown quantizer or scaler, the two selections are of different models, or `adapt`
                without a rank.
        """
        from toolkit.registry import registry

        if adapt is not None and rank is None:
            raise InputError("a selection of layers to adapt needs a rank")
        if selection and adapt and selection.fingerprint != adapt.fingerprint:
            raise InputError(
                f"the protected layers are of {selection.model} and the adapted ones of {adapt.model}: "
                "their fingerprints differ"
            )
        base = registry.make("quantizer", base).key
        protect = registry.make("quantizer", protect).key
        adapter = None
        if rank is not None:
            scale = registry.make("scaler", scaler)
            if not math.isfinite(alpha) or alpha <= 0:
                raise InputError(f"the alpha of an adapter is {alpha}; a finite number above 0 is needed")
            adapter = Adapter(rank=rank, alpha=alpha, scaler=scale.key, scaling=scale(alpha, rank), dora=dora)
        protected = list(selection.layers) if selection else []
        adapted = set(adapt.layers) if adapt else None
        kept = {
            name: LayerPlan(
                quantizer=protect,
                compute_dtype=compute_dtype,
                range_guard=range_guard,
                adapter=adapter if adapted is None or name in adapted else None,
            )
            for name in protected
        }
        if adapt is not None:  # named one by one: the default carries no adapter
            kept |= {n: LayerPlan(quantizer=base, adapter=adapter) for n in adapt.layers if n not in kept}
        origin = selection or adapt
        return cls(
            model=origin.model if origin else None,
            fingerprint=origin.fingerprint if origin else None,
            dataflow=dataflow,
            default=LayerPlan(quantizer=base, adapter=adapter if adapt is None else None),
            layers=kept,
        )

    def of(self, name: str) -> LayerPlan:
        """The decision for one layer."""
        return self.layers.get(name, self.default)
