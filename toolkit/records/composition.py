"""One arm of a fine-tuning study, as a composition: its base, its protected layers, its adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from toolkit.errors import InputError
from toolkit.records.budget import Budget
from toolkit.records.io import Record
from toolkit.records.study import NAME

Name = Annotated[str, Field(pattern=NAME)]

MOST = 10_000
"""Seeds of an arm, draws of a grid, or repeats: more is a slip of the keyboard, and would fill the memory."""


class Choice(Record):
    """How an arm's layers are chosen, for protection or for adapters.

    Attributes:
        selector: key.
        budget: where the selector needs one; a matched selector takes its total from `like`.
        like: the arm whose choice of the same use is matched.
        draw: of a random selector: `each-seed`, a new draw for each run's draw seed; `once`, the draw of seed 0 for
            all runs, whose results hold for that draw only.
        draws: with `each-seed`, a declared grid: so many draws, each with every seed, draw as a random effect.
        calibration_rows: training rows of the run's task that a selector which asks for data is measured on.
    """

    selector: str
    budget: Budget | None = None
    like: str | None = None
    draw: Literal["each-seed", "once"] = "each-seed"
    draws: int | None = Field(default=None, gt=1, le=MOST)
    calibration_rows: int = Field(default=32, gt=0)

    @model_validator(mode="after")
    def _one(self) -> Choice:
        if self.draw == "once" and self.draws is not None:
            raise InputError("draw: once uses a single draw; leave out `draws`, or let each seed have its own")
        return self


class Composition(Record):
    """One arm: what its base, its protected layers and its adapters are. Every method is a composition.

    bf16 LoRA: `base: none`. DoRA: also `dora: true`. QLoRA: the defaults. rsLoRA: `scaler: rslora`. AQLoRA-q:
    `protect: {selector: top-error, budget: layers=0.2}`. AQLoRA-s: also `adapt: {selector: depth, budget:
    layers=0.85}`.

    Attributes:
        base: quantizer of the layers that are not protected.
        protect: which layers are protected; none where it is left out.
        protect_as: quantizer of the protected layers; `none` keeps their 16 bit.
        compute_dtype, range_guard: of the protected layers; see `toolkit.records.plan.LayerPlan`.
        initializer: of the layers that are not protected, where they have the adapter that it needs; see
            `toolkit.records.plan.Plan.protecting`. One that is calibrated needs the study's `calibration`.
        adapt: which layers get an adapter; all where it is left out.
        dataflow: how it computes and what it keeps for backward; it is no lever, and all levers hold for it.
        levers: for this arm only; each must be declared in the study's `factors`.
    """

    name: Name
    base: str = "nf4"
    protect: Choice | None = None
    protect_as: str = "none"
    compute_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    range_guard: bool = False
    adapt: Choice | None = None
    scaler: str = "lora"
    dora: bool = False
    initializer: str = "zero"
    dataflow: str = "stock"
    levers: dict[str, Any] = {}

    @model_serializer(mode="wrap")
    def _without_plain(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is plain is left out, so that the declaration of a study from before there was another stays itself."""
        data: dict[str, Any] = handler(self)
        for later in ("initializer", "dataflow"):
            if data.get(later) == type(self).model_fields[later].default:
                del data[later]
        return data
