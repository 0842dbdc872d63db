"""What an adapter changes in a layer's weight: ΔW = s·BA, or DoRA's form of it; and rounding it once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from toolkit.errors import InputError, closest
from toolkit.records.exported import Survival
from toolkit.records.io import read_json
from toolkit.records.plan import LayerPlan
from toolkit.registry import registry
from toolkit.runs import adapters, starts
from toolkit.runs.exporting.origin import Origin

if TYPE_CHECKING:
    from pathlib import Path

TENSOR = re.compile(
    r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>A|B|magnitude_vector)(?:\.(?P<what>weight|bias))?"
)


@dataclasses.dataclass(frozen=True)
class Change:
    """One layer's adapter.

    Attributes:
        A, B: (rank, in) and (out, rank).
        scaling: s.
        magnitude: DoRA's m, (out,); None without.
        bias: of B, (out,), where the adapter has one: s times it is added to the layer's.
    """

    A: torch.Tensor
    B: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def onto(self, weight: torch.Tensor) -> torch.Tensor:
        """W + s·BA, or m ⊙ (W + s·BA)/‖W + s·BA‖ by rows (Liu et al., 2024, eq. 5), in float64, (out, in)."""
        full = torch.addmm(weight.double(), self.B.double(), self.A.double(), alpha=self.scaling)
        if self.magnitude is None:
            return full
        return full * (self.magnitude.double() / torch.linalg.norm(full, dim=1))[:, None]


def changes_of(origin: Origin, layers: Mapping[str, LayerPlan]) -> dict[str, Change]:
    """Layer → its adapter, of everything that the plan adapts: trained, or as the starts hold it.

    Starts hold no layer that starts plainly: its B is 0, and adds nothing.

    Raises:
        InputError: the file is missing or damaged, holds what is no adapter of a linear layer, or differs from the plan
            in layers, ranks, shapes or scalings.
    """
    if origin.adapter is not None:
        found = _read(origin.adapter, layers)
    else:
        found = _begun(origin, layers)
    planned = {name for name, layer in layers.items() if layer.adapter is not None and not _absent(origin, layer)}
    if missing := sorted(planned - set(found)):
        if origin.adapter is None and origin.start is None:
            raise InputError(
                f"{origin.path} holds no adapter to merge, and {len(missing)} layers, such as {missing[0]}, are "
                "planned with one: name a run that kept its adapter, the folder of an adapter, or a folder of starts"
            )
        raise InputError(
            f"{origin.path} has no adapter of layer {missing[0]} ({len(missing)} such), which the plan adapts"
        )
    return found


def _absent(origin: Origin, layer: LayerPlan) -> bool:
    """Whether what is exported are starts, and the layer starts plainly."""
    return origin.begun and bool(registry.make("initializer", layer.initializer).plain)


def _begun(origin: Origin, layers: Mapping[str, LayerPlan]) -> dict[str, Change]:
    found = {}
    for name in layers if origin.start is not None else ():
        adapter = layers[name].adapter
        if adapter is None or origin.started is None or name not in origin.started.layers:
            continue
        start = starts.read(origin.start, name)  # type: ignore[arg-type]
        if start.A is not None and start.B is not None:
            found[name] = Change(start.A, start.B, start.scaling)
    return found


def _read(folder: Path, layers: Mapping[str, LayerPlan]) -> dict[str, Change]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / adapters.WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path} as an adapter: {error}") from None
    config = read_json(folder / adapters.CONFIG)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = TENSOR.fullmatch(key)
        if match is None:
            raise InputError(f"{path} holds {key!r}, which is no LoRA or DoRA of a linear layer, and is not exported")
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise InputError(f"{path} holds NaN, infinity or no floats in {key}")
        name, part = match["layer"], match["part"] + ("-bias" if match["what"] == "bias" else "")
        if name not in layers:
            raise InputError(f"{path} adapts layer {name!r}, which the model has not; {closest(name, layers)}")
        parts.setdefault(name, {})[part] = tensor
    return {name: _change(name, each, layers[name], config, folder) for name, each in parts.items()}


def _change(name: str, parts: dict[str, torch.Tensor], plan: LayerPlan, config: dict, folder: Path) -> Change:
    adapter = plan.adapter
    if adapter is None:
        raise InputError(f"the adapter in {folder} adapts layer {name}, and its plan does not")
    if "A" not in parts or "B" not in parts:
        raise InputError(
            f"the adapter in {folder} holds {', '.join(sorted(parts))} of layer {name}; A and B are needed"
        )
    ranks = {parts["A"].shape[0], parts["B"].shape[1]}
    if ranks != {adapter.rank}:
        raise InputError(f"the adapter in {folder} has rank {ranks} in layer {name}, the plan {adapter.rank}")
    if adapter.dora != ("magnitude_vector" in parts):
        has, planned = ("a magnitude", "without") if not adapter.dora else ("no magnitude", "with")
        raise InputError(f"the adapter in {folder} has {has} in layer {name}, and is planned {planned} DoRA")
    if adapter.dora and "B-bias" in parts:
        raise InputError(
            f"the adapter in {folder} has DoRA and a bias of B in layer {name}: what that means is not known"
        )
    stock = adapters.scaling_in(config, name, folder)
    if not math.isclose(stock, adapter.scaling, rel_tol=1e-12):
        raise InputError(
            f"{folder / adapters.CONFIG} scales layer {name} by {stock:.6g}, and the plan by {adapter.scaling:.6g}"
        )
    return Change(parts["A"], parts["B"], adapter.scaling, parts.get("magnitude_vector"), parts.get("B-bias"))


def once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 → `dtype`, to nearest, ties to even, in one rounding.

    PyTorch goes through float32, which rounds twice. Here float32 takes the odd neighbour of what is inexact, from
    where a narrower dtype rounds as from the exact value (Boldo and Melquiond, 2008).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return values.to(dtype)
    near = values.float()
    exact = (near.double() == values) | ~near.isfinite()
    bits = near.view(torch.int32)
    toward = torch.where(near.double().abs() > values.abs(), bits - 1, bits)  # the neighbour nearer to zero
    return torch.where(exact, bits, toward | 1).view(torch.float32).to(dtype)


@dataclasses.dataclass
class Kept:
    """Sums of how much of a change arrived, over layers."""

    along: float = 0.0
    moved: float = 0.0
    change: float = 0.0
    base: float = 0.0

    @classmethod
    def of(cls, before: torch.Tensor, after: torch.Tensor, meant: torch.Tensor) -> Kept:
        """One layer: W₀, W₁, and W₀ + ΔW as it was meant, all (out, in)."""
        before = before.double()
        delta, moved = meant.double() - before, after.double() - before
        return cls(
            *(
                float(x)
                for x in ((moved * delta).sum(), moved.square().sum(), delta.square().sum(), before.square().sum())
            )
        )

    def add(self, other: Kept) -> None:
        """One layer more."""
        self.along += other.along
        self.moved += other.moved
        self.change += other.change
        self.base += other.base

    def survival(self) -> Survival:
        """As a report has it."""
        none = self.change == 0
        return Survival(
            share=None if none else self.along / self.change,
            norm=None if none else math.sqrt(self.moved / self.change),
            change=math.sqrt(self.change / self.base) if self.base else 0.0,
        )
