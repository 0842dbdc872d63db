"""What a control holds equal: one positive integer a layer."""

from __future__ import annotations

from typing import Literal

from toolkit.errors import InputError
from toolkit.records.profile import Profile

Match = Literal["parameters", "bytes", "extra-bytes", "adapter-parameters"]
"""What a matched draw may hold equal, as options name it."""

Quantity = Match | Literal["layers"]


def quantities(profile: Profile, match: Quantity, quantizer: str = "nf4") -> tuple[int, ...]:
    """What each layer counts, in profile order.

    layers: 1. parameters: d_out·d_in. bytes: those at 16 bit, 2·d_out·d_in. extra-bytes: what keeping the layer in
    16 bit adds, its 16-bit bytes less the bytes that it takes under the base quantizer. adapter-parameters:
    d_in + d_out; an adapter has r(d_in + d_out), and a rank that all layers share cancels. A fused projection is one
    layer with one adapter, and so is each expert of a stack.

    Args:
        profile: the layers.
        match: which of these.
        quantizer: key of the base quantizer; read for extra-bytes only.

    Raises:
        InputError: the profile lacks that quantizer or its bytes, or a layer takes no fewer bytes under it.
    """
    if match == "layers":
        return (1,) * len(profile)
    if match == "adapter-parameters":
        return tuple(sum(layer.shape) for layer in profile.layers)
    if match == "extra-bytes":
        return _extra(profile, quantizer)
    return tuple(getattr(layer, match) for layer in profile.layers)


def _extra(profile: Profile, quantizer: str) -> tuple[int, ...]:
    profile.errors(quantizer)  # refuses a quantizer that was not measured, with the closest ones
    found = []
    for layer in profile.layers:
        packed = layer.error[quantizer].bytes
        if packed is None:
            raise InputError(
                f"the profile of {profile.model} does not say how many bytes layer {layer.name!r} takes under "
                f"{quantizer!r}, which match=extra-bytes needs: it was measured by an older version; measure it again "
                f"(toolkit profile {profile.model} --quantizer '{quantizer}')"
            )
        if packed >= layer.bytes:
            raise InputError(
                f"match=extra-bytes: layer {layer.name!r} takes {packed:,} bytes under {quantizer!r} and "
                f"{layer.bytes:,} at 16 bit: keeping it in 16 bit costs nothing; name another quantizer, or match "
                "parameters"
            )
        found.append(layer.bytes - packed)
    return tuple(found)
