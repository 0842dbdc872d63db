"""The layers of an exported model: their dense weights, their packed bases, and adapters merged into either."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch

from toolkit.errors import InputError
from toolkit.interfaces import Packed, Quantizer
from toolkit.records.plan import LayerPlan
from toolkit.registry import registry
from toolkit.runs.exporting.changes import Change, Kept, once
from toolkit.runs.exporting.origin import Origin

if TYPE_CHECKING:
    from torch import nn

    from toolkit.runs.started import Starts
    from toolkit.weights.layers import Layer

Onto = Literal["base", "dense"]
HALF = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A dense model to export from.

    Attributes:
        model: on the CPU; in its checkpoint's dtype, or a wider one where `dtype` is wider.
        layers: name → layer, of everything that the plan decides.
        plans: name → decision.
        fingerprint: of the weights.
        dtype: of what is not packed, once it is written.
        starts: of the layers that do not start plainly, read or computed.
    """

    model: nn.Module
    layers: dict[str, Layer]
    plans: dict[str, LayerPlan]
    fingerprint: str
    dtype: torch.dtype
    starts: Starts

    def base(self, name: str) -> tuple[Packed | None, bool]:
        """The packed base that a layer computes from, and whether an initializer changed it; None: its own weight.

        Raises:
            InputError: names the layer: it cannot be quantized or started, or its start is damaged.
        """
        weight = self.layers[name].weight()
        start = self.starts(name, weight.contiguous())
        if start is not None and self.starts.records[name].base is not None:
            return start.base, True
        quantizer = quantizer_of(self.plans[name])
        if quantizer.keeps(weight.dtype):
            return None, False
        try:
            return quantizer.quantize(weight.contiguous()), False
        except InputError as error:
            raise InputError(f"layer {name}: {error}") from None

    def same_base(self, origin: Origin) -> None:
        """After every layer's base was asked for: it is the one that the plan names.

        Raises:
            InputError: initializers make another one here.
        """
        if origin.plan.start not in (None, self.starts.digest):
            raise InputError(
                f"{origin.path} belongs to the base {origin.plan.start:.12}, and its initializers make "
                f"{(self.starts.digest or 'none')[:12]} here (another device, dtype or seed): name the folder of "
                "starts (--start)"
            )


def open_model(origin: Origin, dtype: str | torch.dtype | None = None) -> Opened:
    """Load the dense weights and make sure that they are the plan's.

    Raises:
        InputError: the model cannot be loaded, has not the plan's layers, or has other weights; or starts are missing
            or of another plan.
    """
    from toolkit.runs.models import cast, compute_dtype
    from toolkit.runs.started import Starts, check
    from toolkit.weights.layers import head_of, layers_of

    model, plans, found = dense_model(origin)
    stored = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    target = stored if dtype is None else compute_dtype(torch.device("cpu"), dtype)
    layers = {layer.name: layer for layer in layers_of(model, include_head=head_of(model) in plans)}
    begun = check(plans, {n: layer.shape for n, layer in layers.items()}, folder=origin.start is not None)
    fitted = getattr(torch, origin.dtype) if origin.dtype else target
    starts = Starts(begun, fitted, origin.seed, origin.start if begun else None)
    starts.expect(found)
    cast(model, torch.promote_types(stored, target))  # exact; narrowed after the last sum
    return Opened(model, layers, plans, found, target, starts)


def dense_model(origin: Origin) -> tuple[nn.Module, dict[str, LayerPlan], str]:
    """The model, the decision for each of its layers, and its fingerprint.

    Raises:
        InputError: the model cannot be loaded, has not the plan's layers, or has other weights.
    """
    from toolkit.runs.building import checked, decide
    from toolkit.runs.models import load_model, skeleton
    from toolkit.weights.profiling import fingerprint_of

    checked(origin.plan)
    decide(skeleton(origin.model), origin.plan)
    model = load_model(origin.model, device="cpu")
    found = fingerprint_of(model)
    if origin.plan.fingerprint not in (None, found):
        raise InputError(
            f"{origin.path} is of {origin.plan.model} (weights {(origin.plan.fingerprint or '')[:12]}), and the "
            f"weights of {origin.model} are {found[:12]}: another model, or changed weights"
        )
    return model, decide(model, origin.plan), found


def is_dense(quantizer: Quantizer) -> bool:
    """Whether the quantizer leaves 16-bit weights as they are."""
    return any(quantizer.keeps(dtype) for dtype in HALF)


def quantizer_of(plan: LayerPlan) -> Quantizer:
    """The quantizer that a layer is planned with."""
    found: Quantizer = registry.make("quantizer", plan.quantizer)
    return found


def shared(model: nn.Module, layer: Layer) -> list[str]:
    """Names of other parameters that are the layer's weight too."""
    own = getattr(layer.module, layer.parameter)
    place = f"{layer.path}.{layer.parameter}"
    return [n for n, p in model.named_parameters(remove_duplicate=False) if p is own and n != place]


def refuse_shared(opened: Opened, names: Mapping[str, object]) -> None:
    """Refuse to change a weight that is another parameter's too.

    Raises:
        InputError: names both.
    """
    for name in names:
        if others := shared(opened.model, opened.layers[name]):
            raise InputError(
                f"layer {name} shares its weight with {others[0]}, which an export would change too: leave it in 16 bit"
            )


def merge_dense(opened: Opened, changes: Mapping[str, Change], *, onto: Onto) -> dict[str, Kept]:
    """Put into every layer what it computes with its adapter, in place: round(W₀ + ΔW), rounded once.

    W₀ is the decoded base Ŵ in the written dtype (`base`), as the layer was trained, or the original weight (`dense`).
    Sums are in float64. A bias of B is added s times to the layer's.

    Returns:
        Layer → how much of its change arrived.
    """
    kept = {}
    for name, layer in opened.layers.items():
        weight = layer.weight()
        packed = opened.base(name)[0] if onto == "base" else None
        start = weight if packed is None else packed.dequantize(opened.dtype)
        if name in changes:
            kept[name] = put(layer, start, changes[name], opened.dtype)
        elif packed is not None:
            weight.copy_(finite(name, start))
    return kept


def finite(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as it is.

    Raises:
        InputError: it holds NaN or infinity, as where its dtype is too narrow; the layer is named.
    """
    lowest, highest = weight.aminmax()
    if not bool(lowest.isfinite() & highest.isfinite()):
        dtype = str(weight.dtype).removeprefix("torch.")
        raise InputError(
            f"layer {name} would hold NaN or infinity, as what is too large for {dtype}: choose a wider dtype (--dtype)"
        )
    return weight


def put(layer: Layer, start: torch.Tensor, change: Change, dtype: torch.dtype) -> Kept:
    """Write round(W₀ + ΔW) into a dense layer; how much of ΔW arrived.

    Raises:
        InputError: the sum is too large for the dtype, or the adapter has a bias and the layer none. It is named.
    """
    meant = change.onto(start)
    rounded = finite(layer.name, once(meant, dtype))
    kept = Kept.of(start, rounded, meant)
    layer.weight().copy_(rounded)
    add_bias(layer, change, dtype)
    return kept


def add_bias(layer: Layer, change: Change, dtype: torch.dtype) -> None:
    """b + s·b_B, rounded once, in place.

    Raises:
        InputError: the adapter has a bias and the layer has none.
    """
    if change.bias is None:
        return
    own = getattr(layer.module, "bias", None)
    if own is None:
        raise InputError(f"layer {layer.name} has no bias to merge the adapter's into")
    with torch.no_grad():
        own.copy_(once(own.double() + change.scaling * change.bias.double(), dtype))
