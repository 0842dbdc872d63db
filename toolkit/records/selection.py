"""The selection file: a set of layers with its provenance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from toolkit.errors import InputError
from toolkit.records.budget import Budget
from toolkit.records.io import File, Record, digest

MOST = 2**63 - 1
"""The largest total: sums of layers are kept in 64 bits."""


class MatchedTo(Record):
    """The selection that a draw was matched to."""

    selector: str
    hash: str = Field(description="`Selection.layers_hash` of the matched selection")
    layers: int = Field(description="how many layers it holds")
    parameters: int
    bytes: int


class Selection(File):
    """A set of layers, in model order, and where it comes from.

    Attributes:
        selector: the selector's key, and `options`, every option with its value.
        budget: as asked for; null where a matched selector took its target from another selection.
        parameters, bytes: totals of the chosen layers (bytes at 16 bit).
        of: the profile's totals, so that shares can be told without it.
        mismatch: (reached − target)/target, signed.
        feasible_subsets: how many subsets the draw could have been, an exact integer of any length.
        inclusion: each layer's probability of being drawn, in the profile's order; `inclusion_draws`, how many
            simulated draws it was estimated from (null: exact).
        draw: which of the draws of its law and seed it is, counted from 0.
        chain: hash of the matched selections that its family belongs to; null for a selection by itself.
    """

    kind: Literal["selection"] = "selection"
    selector: str
    options: dict[str, Any] = {}
    budget: Budget | None = None
    seed: int | None = None
    model: str
    fingerprint: str
    layers: list[str]
    parameters: int
    bytes: int
    of: dict[str, int] = Field(description="layers, parameters and bytes of the whole profile")
    matched_to: MatchedTo | None = None
    mismatch: float | None = None
    feasible_subsets: int | None = None
    inclusion: list[float] | None = None
    inclusion_draws: int | None = None
    single_total: bool | None = None
    draw: int | None = Field(default=None, ge=0)
    chain: str | None = None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What tells one selection from another, in one line: not its layers one by one."""
        yield "selector", self.selector
        yield "budget", self.budget and str(self.budget)
        yield "seed", self.seed
        yield "model", self.model
        yield "layers", len(self.layers)
        yield "parameters", self.parameters
        yield "matched_to", self.matched_to and self.matched_to.selector

    @model_validator(mode="after")
    def _distinct(self) -> Selection:
        if len(set(self.layers)) != len(self.layers):
            raise InputError("a layer stands twice in the selection")
        for what in ("parameters", "bytes"):
            total, whole = getattr(self, what), min(self.of.get(what, MOST), MOST)
            if not bool(self.layers) <= total <= whole or (total and not self.layers):
                raise InputError(f"{what} is {total!s:.40} for {len(self.layers)} layers, of {whole:,} in all")
        return self

    @property
    def layers_hash(self) -> str:
        """The set's identity: SHA-256 of the model's fingerprint and the names in model order."""
        return digest([self.fingerprint, self.layers])

    @property
    def share(self) -> float:
        """Selected parameters over the profile's."""
        return self.parameters / self.of["parameters"]
