"""The profile: one pass over a model's weights, from its files or from a model object.

From files no model is built and one layer is in memory at a time; neither transformers nor bitsandbytes is
imported. Every layer is scanned once (sums, finiteness, digest) and measured under each quantizer.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.interfaces import Quantizer
from toolkit.records.profile import LayerErrors, LayerProfile, Profile, Reference, fingerprint
from toolkit.registry import registry
from toolkit.weights import native, sources
from toolkit.weights.checkpoints import open_checkpoint
from toolkit.weights.families import layout
from toolkit.weights.layers import block_count, head_of, layers_of
from toolkit.weights.reporting import Progress, reporting

LATTICE = 16
"""A run of 32 weights with at most this many distinct values tells of a 4-bit format."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """A layer to measure: what is known without its weight, and how to read that."""

    name: str
    tensor: str | list[str]
    role: str
    block: int | None
    shape: tuple[int, int]
    read: Callable[[], torch.Tensor]

    @property
    def parameters(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclasses.dataclass(frozen=True)
class _Model:
    """What is known of a model before its weights are read. The head's row, if asked for, is the last of `rows`."""

    name: str
    rows: list[_Row]
    head: str | None
    blocks: int
    other_parameters: int
    stored: str
    note: str | None = None


def profile(
    model: str | os.PathLike[str] | nn.Module,
    quantizers: str | Quantizer | Sequence[str | Quantizer] = ("nf4",),
    *,
    include_head: bool = False,
    progress: Progress | bool | None = None,
) -> Profile:
    """Measure every layer of a model under each quantizer.

    One row a layer: ‖W‖_F, the mean |w| (density), and for each quantizer the errors defined at
    `toolkit.interfaces.Errors`, all from the weight's float32 values as (out, in). The fingerprint hashes
    names, shapes and float32 values; the head is never part of it, so that profiles with and without the
    head's row belong to the same model.

    Args:
        model: `demo`, a local folder or file, a hub id, or a model object (read where it is, unchanged).
        quantizers: keys or components; an empty sequence measures no errors.
        include_head: add a row for the output embedding (of a tied one too), as the last row.
        progress: a function, or whether to draw a bar; by default a bar where stderr is a terminal.

    Raises:
        InputError: the model cannot be read, a quantizer is unknown, or a weight holds NaN or infinity (the
            layer and its tensor are named).
    """
    if isinstance(quantizers, str | Quantizer):
        quantizers = (quantizers,)
    made = {q.key: q for q in (registry.make("quantizer", q) for q in quantizers)}
    source = _from_object(model, include_head) if isinstance(model, nn.Module) else _from_files(model, include_head)
    total = sum(row.parameters for row in source.rows)
    layers, contents, lattice, values = [], [], True, False
    with reporting(progress, total, f"profile of {source.name}") as report, native.own_threads():
        done = 0
        for row in source.rows:
            weight = _read(row)
            scan = _scan(row, weight)
            errors = {key: _measure(q, row, weight) for key, q in made.items()}
            del weight
            layers.append(_layer(row, scan, errors))
            if row.name != source.head:
                contents.append((row.name, row.shape, scan.digest))
                lattice &= scan.distinct <= LATTICE
                values |= scan.max_abs > 0
            done += row.parameters
            report(done, total, row.name)
    reference = _reference(source.stored, lattice and values)
    if reference.lattice:
        print(f"warning: {source.name}: {reference.note}", file=sys.stderr)
    return Profile(
        model=source.name,
        fingerprint=fingerprint(contents),
        reference=reference,
        head=source.head,
        blocks=source.blocks,
        other_parameters=source.other_parameters,
        fallbacks=_fallbacks(source, len(layers)),
        layers=layers,
    )


def fingerprint_of(model: str | os.PathLike[str] | nn.Module) -> str:
    """A model's fingerprint alone, equal to that of its profile: to check a plan before it is built.

    Raises:
        InputError: the model cannot be read, or a weight holds NaN or infinity.
    """
    source = _from_object(model, False) if isinstance(model, nn.Module) else _from_files(model, False)
    with native.own_threads():
        return fingerprint([(row.name, row.shape, _scan(row, _read(row)).digest) for row in source.rows])


def _from_files(model: str | os.PathLike[str], include_head: bool) -> _Model:
    source = sources.resolve(model)
    checkpoint = open_checkpoint(source.path)
    found = layout(checkpoint)
    stored = list(found.layers)
    others = found.other_parameters
    if include_head:
        if found.head_layer is None:
            raise InputError(f"{source.name} holds no weight of the output embedding ({found.head}) to include")
        stored.append(found.head_layer)
        others -= found.head_layer.shape[0] * found.head_layer.shape[1]
    rows = [_Row(s.name, s.tensor, s.role, s.block, s.shape, lambda s=s: s.read(checkpoint)) for s in stored]
    names = {name for s in found.layers for name in s.tensors}
    dtypes = {checkpoint.tensors[name].dtype for name in names}
    return _Model(source.name, rows, found.head, found.blocks, others, _join(map(_plain, dtypes)), found.note)


def _from_object(model: nn.Module, include_head: bool) -> _Model:
    layers = layers_of(model, include_head=include_head)
    head = head_of(model)
    layers.sort(key=lambda layer: layer.name == head)  # stable: model order, the head last
    rows = []
    for layer in layers:
        place = f"{layer.path}.{layer.parameter}".lstrip(".")
        rows.append(_Row(layer.name, place, layer.role, layer.block, layer.shape, layer.weight))
    whole = sum(p.numel() for p in model.parameters())
    dtypes = {str(getattr(layer.module, layer.parameter).dtype) for layer in layers if layer.name != head}
    name = getattr(model, "name_or_path", "") or ""
    name = sources.shown(name) if name and sources.is_local(name) else name or type(model).__name__
    return _Model(
        name=name,
        rows=rows,
        head=head,
        blocks=block_count(model),
        other_parameters=whole - sum(row.parameters for row in rows),
        stored=_join(map(_plain, dtypes)),
    )


def _read(row: _Row) -> torch.Tensor:
    weight = row.read()
    if weight.dtype == torch.float64:  # errors are defined on float32 values
        weight = weight.float()
    return weight.cpu().contiguous()


def _scan(row: _Row, weight: torch.Tensor) -> native.Scan:
    scan = native.scan(weight)
    if not scan.finite:
        bad = int((~weight.isfinite()).sum())
        tensor = row.tensor if isinstance(row.tensor, str) else ", ".join(row.tensor)
        raise InputError(
            f"layer {row.name} holds NaN or infinity in {bad:,} of its {row.parameters:,} weights (tensor {tensor})"
        )
    return scan


def _measure(quantizer: Quantizer, row: _Row, weight: torch.Tensor) -> LayerErrors:
    try:
        errors = quantizer.measure(weight)
    except InputError as error:
        raise InputError(f"layer {row.name}: {error}") from None
    return LayerErrors(**dataclasses.asdict(errors))


def _layer(row: _Row, scan: native.Scan, errors: dict[str, LayerErrors]) -> LayerProfile:
    return LayerProfile(
        name=row.name,
        tensor=row.tensor,
        role=row.role,
        block=row.block,
        shape=row.shape,
        parameters=row.parameters,
        bytes=2 * row.parameters,
        norm=scan.sum_square**0.5,
        density=scan.sum_abs / row.parameters,
        error=errors,
    )


def _reference(stored: str, lattice: bool) -> Reference:
    if lattice:
        note = (
            "weights are dequantized 4-bit values (at most 16 distinct per 32 weights): errors on them are errors "
            "on already rounded weights"
        )
    else:
        note = f"{stored} weights, as the model stores them"
    return Reference(dtype=stored, lattice=lattice, note=note)


def _fallbacks(source: _Model, layers: int) -> dict[str, int]:
    """What was not done as it should be, and for how many layers; told on stderr too."""
    found = {}
    if reason := native.why_not():
        found[f"measured without the native kernel: {reason}"] = layers
        print(f"warning: the profile is slow: {reason}", file=sys.stderr)
    if source.note:
        found[source.note] = layers
    return found


def _plain(dtype: str) -> str:
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return names.get(dtype, dtype.removeprefix("torch."))


def _join(dtypes: Iterator[str]) -> str:
    return " and ".join(sorted(set(dtypes)))
