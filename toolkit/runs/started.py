"""What a built model's layers start from: computed while it is built, or read from a folder of starts.

Both give the same: a start a layer, a record of it, and the digest of the bases that initializers changed, by which an
adapter is tied to the base that it was trained on.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError, closest
from toolkit.interfaces import Given, Initializer, Moments, Start
from toolkit.records.plan import LayerPlan, Plan
from toolkit.records.start import LayerStart, StartFile
from toolkit.registry import registry
from toolkit.runs import starts

if TYPE_CHECKING:
    import torch

CALIBRATE = "toolkit calibrate PLAN --text FILE -o DIR"
"""The command that makes what an initializer that needs calibration cannot do without."""


def initializers(plan: Plan) -> list[Initializer]:
    """Those of a plan that are not plain, each once.

    Raises:
        InputError: there is none of a key.
    """
    keys = dict.fromkeys(layer.initializer for layer in [plan.default, *plan.layers.values()])
    return [made for key in keys if not (made := registry.make("initializer", key)).plain]


def check(
    layers: Mapping[str, LayerPlan], shapes: Mapping[str, tuple[int, int]], *, folder: bool = False
) -> dict[str, LayerPlan]:
    """The layers whose initializer is not plain, after every layer's was asked whether it can be started so.

    Args:
        layers: name → decision.
        shapes: name → (out, in).
        folder: whether starts are read from a folder, and nothing need be calibrated.

    Raises:
        InputError: names layer, initializer and reason; where calibration is missing, the command that makes it.
    """
    made: dict[tuple[str, str], tuple[Initializer, object]] = {}
    found = {}
    for name, layer in layers.items():
        key = (layer.initializer, layer.quantizer)
        if key not in made:
            made[key] = registry.make("initializer", key[0]), registry.make("quantizer", key[1])
        begin, quantizer = made[key]
        try:
            if begin.needs_rank and layer.adapter is None:
                raise InputError(f"initializer {begin.key} fits an adapter, and the plan gives this layer none")
            begin.check(shapes[name], quantizer, None if layer.adapter is None else layer.adapter.rank)  # type: ignore[arg-type]
            if begin.needs_calibration and not folder:
                raise InputError(
                    f"initializer {begin.key} is calibrated: make its starts by `{CALIBRATE}`, and build with "
                    "start=DIR (--start DIR)"
                )
        except InputError as error:
            raise InputError(f"layer {name}: {error}") from None
        if not begin.plain:
            found[name] = layer
    return found


def computed(
    name: str,
    layer: LayerPlan,
    weight: torch.Tensor,
    dtype: torch.dtype,
    seed: int = 0,
    moments: Moments | None = None,
    *,
    initializer: str | None = None,
) -> tuple[Start, LayerStart]:
    """One layer's start, and the record of it.

    Args:
        layer: the decision.
        weight: W, (out, in), dense, on the device to compute on.
        dtype: the model's compute dtype.
        seed: of the adapters.
        moments: of the layer's inputs, for an initializer that is calibrated.
        initializer: key of another one that takes the place of the decision's, which the record names all the same.

    Raises:
        InputError: the layer cannot be started so; it is named.
    """
    import torch

    from toolkit.runs.adapters import initial

    began, adapter = time.perf_counter(), layer.adapter
    a = None if adapter is None else initial(seed, name, adapter.rank, (weight.shape[0], weight.shape[1]))
    given = Given(
        name=name,
        weight=weight,
        quantizer=registry.make("quantizer", layer.quantizer),
        rank=None if adapter is None else adapter.rank,
        scaling=1.0 if adapter is None else adapter.scaling,
        A=None if a is None else a.to(weight.device),
        seed=seed,
        dtype=getattr(torch, layer.compute_dtype) if layer.compute_dtype else dtype,
        moments=moments,
    )
    try:
        start = registry.make("initializer", initializer or layer.initializer).initialize(given)
        base = starts.changed(start, weight)
    except InputError as error:
        raise InputError(str(error) if name in str(error) else f"layer {name}: {error}") from None
    record = LayerStart(
        initializer=layer.initializer,
        quantizer=layer.quantizer,
        rank=given.rank,
        scaling=given.scaling,
        residuals=list(start.residuals),
        kept=start.kept,
        notes=dict(start.notes),
        seconds=round(time.perf_counter() - began, 4),
        base=base,
    )
    return start, record


class Starts:
    """(layer name, dense weight) → what the layer starts from, or None for a plain start.

    Where a start adds nothing (B = 0), its A is the run's own, a function of (seed, layer name, rank, shape), so that
    one folder of starts serves runs of every seed.

    Args:
        layers: name → decision, of the layers whose initializer is not plain.
        dtype: the model's compute dtype.
        seed: of the adapters.
        folder: of starts; None: they are computed. A start of another compute dtype serves as well: it was fitted to a
            base that is decoded to that one.

    Attributes:
        records: layer name → what a report says of its start, as far as they were asked for.

    Raises:
        InputError: the folder holds no whole starts, lacks a layer's, or has been made for other decisions.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerPlan],
        dtype: torch.dtype,
        seed: int = 0,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._layers, self._dtype, self._seed = dict(layers), dtype, seed
        self._folder = None if folder is None else Path(folder)
        self.file = None if self._folder is None else _read(self._folder, self._layers)
        self.records: dict[str, LayerStart] = {}

    @property
    def layers(self) -> int:
        """How many layers do not start plainly."""
        return len(self._layers)

    def expect(self, fingerprint: str | None) -> None:
        """Refuse starts of other weights.

        Raises:
            InputError: both are named.
        """
        if self.file is not None and fingerprint != self.file.fingerprint:
            raise InputError(
                f"the starts in {self._folder} are of {self.file.model or 'a model without a name'} (weights "
                f"{self.file.fingerprint[:12]}), and this model's weights are {(fingerprint or 'not known')[:12]}: "
                "make them anew for this model"
            )

    def __call__(self, name: str, weight: torch.Tensor) -> Start | None:
        """The start of one layer.

        Raises:
            InputError: the layer cannot be started so, or its file is damaged.
        """
        if name not in self._layers:
            return None
        from toolkit.runs.adapters import initial

        layer = self._layers[name]
        shape = (weight.shape[0], weight.shape[1])
        adapter = layer.adapter
        a = None if adapter is None else initial(self._seed, name, adapter.rank, shape).to(weight.device)
        if self.file is None:
            start, self.records[name] = computed(name, layer, weight, self._dtype, self._seed)
        else:
            start = self._read(name, weight)
        if a is not None and start.B is not None and not bool(start.B.any()):
            start = dataclasses.replace(start, A=a)
        return start

    def _read(self, name: str, weight: torch.Tensor) -> Start:
        assert self.file is not None and self._folder is not None
        told, shape = self.file.layers[name], tuple(weight.shape)
        start = starts.read(self._folder, name, weight.device)
        found = (start.base.quantizer.key, tuple(start.base.shape), start.scaling)
        if found != (told.quantizer, shape, told.scaling):
            raise InputError(
                f"{self._folder}: the start of layer {name} is {found[0]} of shape {found[1]} with scaling {found[2]}, "
                f"and {told.quantizer} of shape {shape} with scaling {told.scaling} is told of: the folder is damaged"
            )
        if told.base is not None and starts.digest_of(start.base) != told.base:
            raise InputError(
                f"{self._folder}: the base of layer {name} is not the one that {starts.REPORT} tells of: the folder "
                "was changed"
            )
        if told.base is None:
            start = dataclasses.replace(start, base=start.base.quantizer.quantize(weight))
        self.records[name] = told
        return start

    @property
    def digest(self) -> str | None:
        """Which base the starts asked for have made; None where initializers changed none."""
        bases = {name: each.base for name, each in self.records.items() if each.base is not None}
        return starts.digest_over(bases) if bases else None


def _read(folder: Path, layers: Mapping[str, LayerPlan]) -> StartFile:
    """The report of a folder of starts that fits these decisions.

    Raises:
        InputError: it is not there, or differs; the layer is named, and what was found.
    """
    if not (folder / starts.REPORT).is_file():
        held = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else ""
        raise InputError(
            f"{folder} holds no {starts.REPORT}: no starts, or unfinished ones; found {held or 'nothing'}. "
            f"Make them by `toolkit initialize PLAN -o DIR` or `{CALIBRATE}`"
        )
    file = StartFile.load(folder / starts.REPORT)
    for name, layer in layers.items():
        if name not in file.layers:
            raise InputError(
                f"{folder} holds no start of layer {name!r}, whose initializer is {layer.initializer}; "
                f"{closest(name, file.layers)}"
            )
        told = file.layers[name]
        adapter = layer.adapter
        for what, planned, found in (
            ("initializer", layer.initializer, told.initializer),
            ("quantizer", layer.quantizer, told.quantizer),
            ("rank", None if adapter is None else adapter.rank, told.rank),
            ("scaling", 1.0 if adapter is None else adapter.scaling, told.scaling),
        ):
            if planned != found:
                raise InputError(
                    f"layer {name}: its start in {folder} has {what} {found}, and the plan {what} {planned}: starts of "
                    "another plan; make them anew for this one"
                )
    if further := sorted(set(file.layers) - set(layers)):
        raise InputError(
            f"{folder} holds a start of layer {further[0]!r} ({file.layers[further[0]].initializer}; {len(further)} "
            "such layers), which the plan starts plainly: starts of another plan"
        )
    return file
