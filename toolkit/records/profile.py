"""The profile file: a table, one row a layer, of what one pass over the weights measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field, FiniteFloat, model_validator

from toolkit.errors import InputError, closest
from toolkit.records.io import File, Record, digest

PROFILE = "profile.json"
"""The profile, kept beside a study's runs."""

MEASURES = ("mse", "mae", "relative", "max")


class LayerErrors(Record):
    """Errors of one layer under one quantizer, and the bytes that it then takes; see `toolkit.interfaces.Errors`."""

    mse: float
    mae: float
    relative: float
    max: float
    bytes: int | None = Field(default=None, gt=0, description="packed, scales and constants included")


class LayerProfile(Record):
    """One frozen linear projection.

    Attributes:
        name: module path in the model that transformers builds, without `.weight`; an expert ends in `[3]`.
        tensor: the checkpoint tensor(s) it was read from.
        role: last part of the module path (`q_proj`, `qkv_proj`, `gate_up_proj` …).
        block: index of its transformer block, or null outside the blocks.
        shape: (out_features, in_features), whatever way round the checkpoint stores it.
        bytes: at 16 bit, 2 a parameter.
        norm: ‖W‖_F.
        density: ‖W‖₁/n, the mean absolute weight. The paper (AQLoRA §7.1, §7.3) names a density score and
            gives no formula; this choice is ours.
        error: quantizer key → errors.
    """

    name: str
    tensor: str | list[str]
    role: str
    block: int | None = None
    shape: tuple[int, int]
    parameters: int = Field(gt=0)
    bytes: int = Field(gt=0)
    norm: float
    density: float
    error: dict[str, LayerErrors] = {}


class Reference(Record):
    """Which weights the errors are measured against.

    Attributes:
        dtype: how the checkpoint stores them.
        lattice: true where every sampled run of 32 weights holds at most 16 distinct values: weights that
            were quantized to 4 bit and dequantized, so that errors are errors on already rounded weights.
        note: one sentence for reports and captions.
    """

    dtype: str
    lattice: bool = False
    note: str


class Statistic(Record):
    """What a selector measured on data: one number a layer, and on what.

    Attributes:
        values: in the profile's order.
        rows, batches, tokens: examples, batches and predicted tokens that it was measured on.
        loss: of the dense model on them, nats a predicted token.
        sha256: of the rows: their token ids and which of them are to be predicted, in order.
        task: key of the task that the rows are of, and `source`, where they came from, where these are known.
        dtype: of the model's weights and activations when it was measured.
        unreached: layers that no gradient reached, an expert without a token for one; their value is 0.
    """

    values: list[FiniteFloat]
    rows: int = Field(gt=0)
    batches: int = Field(gt=0)
    tokens: int = Field(gt=0)
    loss: FiniteFloat
    sha256: str
    task: str | None = None
    source: str | None = None
    dtype: str
    unreached: list[str] = []


class Profile(File):
    """What one pass over a model's weights measured.

    `profile["parameters"]` gives one column in layer order: any field of a row, `in_features`,
    `out_features`, or `error.<quantizer>.<measure>`.
    """

    kind: Literal["profile"] = "profile"
    model: str = Field(description="the model id or directory that was read")
    fingerprint: str = Field(description="hash of the layers' names, shapes and float32 values")
    reference: Reference
    head: str | None = Field(default=None, description="module path of the output embedding")
    blocks: int = Field(ge=0, description="number of transformer blocks")
    other_parameters: int = Field(
        default=0, description="parameters outside the rows: embeddings, norms, routers, the head"
    )
    fallbacks: dict[str, int] = Field(
        default={}, description="what was not done as it should be, and for how many layers"
    )
    layers: list[LayerProfile]
    statistics: dict[str, Statistic] | None = Field(
        default=None, description="a selector's key (less its rounding) → what it measured on data"
    )

    @model_validator(mode="after")
    def _names(self) -> Profile:
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise InputError(f"layer {twice!r} stands twice in the profile")
        for layer in self.layers:
            where, (rows, columns) = f"layer {layer.name!r}", layer.shape
            if rows < 1 or layer.parameters != rows * columns or layer.bytes != 2 * layer.parameters:
                raise InputError(
                    f"{where} of shape {rows}×{columns} has {layer.parameters:,} parameters and {layer.bytes:,} bytes: "
                    "these do not agree (2 bytes a parameter)"
                )
            if layer.block is not None and not 0 <= layer.block < self.blocks:
                raise InputError(f"{where} lies in block {layer.block}, and the profile tells of {self.blocks} blocks")
            if layer.error.keys() != self.layers[0].error.keys():
                raise InputError(
                    f"{where} has errors under {', '.join(layer.error) or 'no quantizer'}, and the first layer under "
                    f"{', '.join(self.layers[0].error) or 'none'}: all layers are measured alike"
                )
        for key, statistic in (self.statistics or {}).items():
            if len(statistic.values) != len(self.layers):
                raise InputError(
                    f"statistic {key!r} holds {len(statistic.values)} values, and the profile has "
                    f"{len(self.layers)} layers"
                )
        return self

    @property
    def names(self) -> list[str]:
        """Layer names in model order."""
        return [layer.name for layer in self.layers]

    @property
    def parameters(self) -> int:
        """Parameters of all rows together."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def bytes(self) -> int:
        """16-bit bytes of all rows together."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def quantizers(self) -> list[str]:
        """Keys of the quantizers that were measured."""
        return list(self.layers[0].error) if self.layers else []

    def __len__(self) -> int:
        return len(self.layers)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What tells one profile from another, in one line: not its hundreds of rows."""
        yield "model", self.model
        yield "fingerprint", self.fingerprint[:12]
        yield "layers", len(self)
        yield "parameters", self.parameters
        yield "quantizers", self.quantizers

    def __getitem__(self, column: str) -> np.ndarray:
        if column.startswith("error."):
            quantizer, _, measure = column.removeprefix("error.").rpartition(".")
            return self.errors(quantizer, measure)
        if column == "out_features":
            return np.array([layer.shape[0] for layer in self.layers], dtype=np.int64)
        if column == "in_features":
            return np.array([layer.shape[1] for layer in self.layers], dtype=np.int64)
        if column not in LayerProfile.model_fields or column == "error":
            allowed = [f for f in LayerProfile.model_fields if f != "error"]
            allowed += ["in_features", "out_features", "error.<quantizer>.<measure>"]
            raise InputError(f"a profile has no column {column!r}; {closest(column, allowed)}")
        if column == "block":
            return np.array([-1 if layer.block is None else layer.block for layer in self.layers], dtype=np.int64)
        return np.array([getattr(layer, column) for layer in self.layers])

    def errors(self, quantizer: str, measure: str = "mse") -> np.ndarray:
        """One error measure of one quantizer, in layer order, float64.

        Raises:
            InputError: the measure is unknown, or the quantizer was not measured.
        """
        if measure not in MEASURES:
            raise InputError(f"no error measure is called {measure!r}; {closest(measure, MEASURES)}")
        if quantizer not in self.quantizers:
            raise InputError(
                f"the profile of {self.model} holds no errors under {quantizer!r}; "
                f"{closest(quantizer, self.quantizers)} (toolkit profile MODEL --quantizer '{quantizer}' adds them; "
                "a key leaves out options at their defaults)"
            )
        return np.array([getattr(layer.error[quantizer], measure) for layer in self.layers])

    def statistic(self, key: str) -> np.ndarray:
        """What a selector measured on data, in layer order, float64.

        Raises:
            InputError: the profile holds no such statistic; the message says how it is made.
        """
        held = self.statistics or {}
        if key not in held:
            others = f"; it holds {', '.join(held)}" if held else ""
            raise InputError(
                f"{key} ranks layers by what data say of them, and the profile of {self.model} does not hold that"
                f"{others}: measure it on a task's training rows (toolkit calibrate '{key}' --model MODEL --profile "
                "PROFILE --task TASK -o PROFILE)"
            )
        return np.array(held[key].values)

    def row(self, name: str) -> LayerProfile:
        """The row of one layer."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InputError(f"the profile of {self.model} has no layer {name!r}; {closest(name, self.names)}")

    def expect(self, model: str, fingerprint: str, what: str) -> None:
        """Refuse data of another model, or of changed weights.

        Raises:
            InputError: the fingerprints differ; both models are named.
        """
        if fingerprint != self.fingerprint:
            same = "whose weights have changed since" if model == self.model else "another model"
            raise InputError(
                f"{what} belongs to {model} (fingerprint {fingerprint[:12]}), {same}: the profile is of "
                f"{self.model} (fingerprint {self.fingerprint[:12]})"
            )


def thirds(profile: Profile) -> list[int]:
    """Each layer's third of the network's depth, ⌊3·block/blocks⌋: 0, 1 or 2 (layers outside blocks: 2)."""
    count = max(profile.blocks, 1)
    return [2 if layer.block is None else min(2, 3 * layer.block // count) for layer in profile.layers]


def fingerprint(rows: list[tuple[str, tuple[int, int], str]]) -> str:
    """The hash of a model's layers: (name, (out, in), hash of the float32 values), in model order."""
    return digest([[name, list(shape), content] for name, shape, content in rows])
