"""The plan file: the whole per-layer decision as data."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, FiniteFloat

from toolkit.errors import InputError
from toolkit.records.io import File, Record
from toolkit.records.selection import Selection

ANY_SHAPE = (2**31, 2**31)
"""Of a layer that is not known yet: nothing is refused for being too small for a rank."""


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
    """One layer's decision: quantizer key, compute dtype (null: the model's), adapter (null: none) and initializer.

    With `range_guard`, rows whose product could leave float16's range are computed scaled down and scaled back in
    float32 (`toolkit.runs.guard`); the layer then answers in float32.
    """

    quantizer: str
    compute_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    range_guard: bool = False
    adapter: Adapter | None = None
    initializer: str = "zero"


class Plan(File):
    """`default` holds for every layer of the model that `layers` does not name.

    The output head is no layer and stays in 16 bit unless it is named. `fingerprint` ties the plan to the
    weights it was made for; a plan without one (made by hand) fits any model that has its layers. `start`, of a built
    model, is the digest over the bases that initializers changed (`toolkit.runs.starts`); null where none did.
    """

    kind: Literal["plan"] = "plan"
    model: str | None = None
    fingerprint: str | None = None
    dataflow: str = "stock"
    start: str | None = None
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
        initializer: str = "zero",
    ) -> Plan:
        """Keep the selected layers in `protect` (16 bit) and quantize all others to `base`.

        Args:
            selection: the protected layers; None protects nothing.
            base: key of the quantizer of all other layers.
            protect: key of the quantizer of the selected layers.
            adapt: the layers that get an adapter; None adapts every layer where `rank` is given.
            rank, alpha, scaler, dora: of the adapters; without a rank there are none.
            dataflow: key of how the model computes.
            compute_dtype, range_guard: of the protected layers.
            initializer: of every layer that is quantized to `base`, where it has what the initializer needs (an
                adapter, for most); protected layers start plainly.

        Raises:
            InputError: unknown quantizer, scaler, initializer or data flow, the two selections are of different models,
                `adapt` without a rank, or an initializer that fits an adapter without one, or cannot start such a base.
        """
        from toolkit.registry import registry

        if adapt is not None and rank is None:
            raise InputError("a selection of layers to adapt needs a rank")
        if selection and adapt and selection.fingerprint != adapt.fingerprint:
            raise InputError(
                f"the protected layers are of {selection.model} and the adapted ones of {adapt.model}: "
                "their fingerprints differ"
            )
        quantizer = registry.make("quantizer", base)
        base = quantizer.key
        protect = registry.make("quantizer", protect).key
        adapter = None
        if rank is not None:
            scale = registry.make("scaler", scaler)
            if not math.isfinite(alpha) or alpha <= 0:
                raise InputError(f"the alpha of an adapter is {alpha}; a finite number above 0 is needed")
            adapter = Adapter(rank=rank, alpha=alpha, scaler=scale.key, scaling=scale(alpha, rank), dora=dora)
        begin = registry.make("initializer", initializer)
        if begin.needs_rank and rank is None:
            raise InputError(f"initializer {begin.key} fits an adapter, and the plan has none: give a rank")
        begin.check(ANY_SHAPE, quantizer, rank)

        def started(adapter: Adapter | None) -> str:
            plain = LayerPlan.model_fields["initializer"].default
            return begin.key if adapter is not None or not begin.needs_rank else plain

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
            kept |= {
                n: LayerPlan(quantizer=base, adapter=adapter, initializer=started(adapter))
                for n in adapt.layers
                if n not in kept
            }
        unnamed = adapter if adapt is None else None
        origin = selection or adapt
        return cls(
            model=origin.model if origin else None,
            fingerprint=origin.fingerprint if origin else None,
            dataflow=registry.make("dataflow", dataflow).key,
            default=LayerPlan(quantizer=base, adapter=unnamed, initializer=started(unnamed)),
            layers=kept,
        )

    def of(self, name: str) -> LayerPlan:
        """The decision for one layer."""
        return self.layers.get(name, self.default)
