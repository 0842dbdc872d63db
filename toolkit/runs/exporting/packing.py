"""The packed weights of a quantized export: the plan's bases, with an adapter merged in where that is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from toolkit.errors import InputError
from toolkit.interfaces import Layout, Packed
from toolkit.records.exported import ExportedLayer, Survival
from toolkit.records.io import digest
from toolkit.runs.exporting.changes import Change, Kept
from toolkit.runs.exporting.weights import Onto, Opened, add_bias, finite, is_dense, put, quantizer_of, refuse_shared


@dataclasses.dataclass(frozen=True)
class Merge:
    """An adapter that goes into a packed weight: Q(W₀ + ΔW).

    Attributes:
        change: ΔW.
        before: the packed base Ŵ without it.
        weight: W₀, where it is the dense weight; None: W₀ is Ŵ, decoded.
    """

    change: Change
    before: Packed
    weight: torch.Tensor | None

    def meant(self) -> torch.Tensor:
        """W₀ + ΔW in float64."""
        return self.change.onto(self._start())

    def arrived(self, after: Packed) -> Kept:
        """What of ΔW stands between Ŵ before and after, both decoded in float32."""
        before, start = self.before.dequantize(torch.float32).double(), self._start().double()
        return Kept.of(before, after.dequantize(torch.float32), before + (self.meant() - start))

    def _start(self) -> torch.Tensor:
        return self.before.dequantize(torch.float32) if self.weight is None else self.weight


@dataclasses.dataclass
class Held:
    """One quantized layer of an export.

    Attributes:
        packed: its weight.
        layout: how the format holds it.
        about: what the report says of it.
        weight: the dense weight that it was quantized from; None where an initializer made the base.
        merge: the adapter that went in; None where none did.
    """

    packed: Packed
    layout: Layout
    about: ExportedLayer
    weight: torch.Tensor | None = None
    merge: Merge | None = None

    def reference(self) -> torch.Tensor | None:
        """What it can be quantized anew from; None: nothing better than itself."""
        return self.weight if self.merge is None else self.merge.meant().float()


def layouts(opened: Opened, form: str) -> dict[str, Layout]:
    """Layer → how the format holds it, of every layer that is planned quantized.

    Raises:
        InputError: the format cannot hold a layer (named, with what it can hold), or two quantizers side by side, or
            nothing is quantized.
    """
    from torch import nn

    from toolkit.interfaces import Quantizer
    from toolkit.registry import registry

    found: dict[str, Layout] = {}
    keys: dict[str, tuple[str, str]] = {}
    for name, layer in opened.layers.items():
        quantizer = quantizer_of(opened.plans[name])
        if is_dense(quantizer):
            continue
        layout = quantizer.layout(form)
        if layout is None:
            made = [cls() for cls, _ in registry.of_kind("quantizer").values()]
            held = [q.name for q in made if isinstance(q, Quantizer) and q.layout(form) is not None]
            raise InputError(
                f"layer {name} is quantized by {quantizer.key}, which {form} cannot hold; it holds "
                f"{', '.join(sorted(held)) or 'none of what is installed'}, and 16 bit"
            )
        if layer.index is not None:
            raise InputError(f"layer {name} is one expert of a stacked parameter, which {form} cannot hold quantized")
        if (layer.transposed and layout.multiple > 1) or not (layer.transposed or type(layer.module) is nn.Linear):
            raise InputError(
                f"layer {name} is a {type(layer.module).__name__}, and {layout.name} holds weights of nn.Linear"
            )
        if layer.shape[1] % layout.multiple:
            raise InputError(
                f"layer {name} has {layer.shape[1]} input features, and {layout.name} needs a whole number of "
                f"{layout.multiple}"
            )
        found[name] = layout
        keys.setdefault(digest([layout.name, layout.config(opened.dtype)]), (quantizer.key, name))
    if not found:
        raise InputError(f"the plan quantizes no layer: there is nothing to hold in {form}; export it as merged")
    if len(keys) > 1:
        (first, one), (second, other) = list(keys.values())[:2]
        raise InputError(
            f"layer {one} is quantized by {first} and layer {other} by {second}: a {form} checkpoint has one setting "
            "for all of its quantized layers"
        )
    refuse_shared(opened, found)
    return found


def pack(
    opened: Opened, held: Mapping[str, Layout], changes: Mapping[str, Change], *, onto: Onto
) -> tuple[dict[str, Held], dict[str, Kept]]:
    """Every quantized layer's packed weight; what stays dense is merged and rounded in the model itself.

    A merged layer is Q(W₀ + ΔW), W₀ the dense weight (`dense`) or the decoded base (`base`).

    Returns:
        Quantized layers; and of each layer that stays dense and was merged, how much arrived.

    Raises:
        InputError: a layer that cannot be quantized, started or merged; it is named.
    """
    packed: dict[str, Held] = {}
    kept: dict[str, Kept] = {}
    for name, layer in opened.layers.items():
        change, weight = changes.get(name), layer.weight()
        base, changed = opened.base(name)
        if name not in held:  # packed where the plan keeps wider weights in 16 bit, or an initializer changed them
            start = weight if base is None else base.dequantize(opened.dtype)
            if change is not None:
                kept[name] = put(layer, start, change, opened.dtype)
            elif base is not None:
                weight.copy_(finite(name, start))
            continue
        assert base is not None
        key = opened.plans[name].quantizer
        if change is None:
            about = ExportedLayer(quantizer=key, base="start" if changed else "quantized")
            packed[name] = Held(base, held[name], about, None if changed else weight)
            continue
        merge = Merge(change, base, None if onto == "base" else weight)
        try:
            merged = quantizer_of(opened.plans[name]).quantize(merge.meant().float())
        except InputError as error:
            raise InputError(f"layer {name}, with its adapter merged in: {error}") from None
        add_bias(layer, change, opened.dtype)
        packed[name] = Held(merged, held[name], ExportedLayer(quantizer=key, base="merged"), merge=merge)
    return packed, kept


def arrived(held: Mapping[str, Held]) -> dict[str, Kept]:
    """Quantized layer → how much of its adapter's change is in what it holds now."""
    return {name: each.merge.arrived(each.packed) for name, each in held.items() if each.merge is not None}


def refuse_lost(kept: Mapping[str, Kept], quantized: Mapping[str, object], least: float) -> None:
    """Refuse a merge of which too little arrives in the layers that were quantized again; 0 takes it as it is.

    Raises:
        InputError: names the worst layers and their shares, and the share of all of them together.
    """
    shares = {name: kept[name].survival().share for name in quantized if name in kept}
    known = {name: share for name, share in shares.items() if share is not None}
    if not known or least <= 0:
        return
    together = total({name: kept[name] for name in known}).share
    lost = sorted((share, name) for name, share in known.items() if share < least)
    if lost or (together is not None and together < least):
        worst = ", ".join(
            f"{name} {share:.3f}" for share, name in (lost or sorted((s, n) for n, s in known.items()))[:3]
        )
        raise InputError(
            f"of the adapter's change, {together:.3f} arrives in the quantized weights, and less than {least:g} in "
            f"{len(lost)} of {len(known)} layers ({worst}): rounding again loses the rest; export it as merged, in 16 "
            "bit, or the base and the adapter apart, or take it as it is (least=0, --least 0)"
        )


def total(kept: Mapping[str, Kept]) -> Survival:
    """Of all layers together, each weighing by ‖ΔW‖²."""
    found = Kept()
    for each in kept.values():
        found.add(each)
    return found.survival()
