"""The start of one weight, from keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit.interfaces import Given, Moments, Start

if TYPE_CHECKING:
    import torch


def initialize(
    weight: torch.Tensor,
    initializer: str = "zero",
    quantizer: str = "nf4",
    *,
    rank: int | None = None,
    alpha: float = 16.0,
    scaler: str = "lora",
    seed: int = 0,
    name: str = "weight",
    moments: Moments | None = None,
    dtype: torch.dtype | None = None,
) -> Start:
    """What one layer starts from: W ≈ Ŵ + s·BA, with s = scaler(alpha, rank).

        start = tk.initialize(weight, initializer="loftq", quantizer="nf4", rank=8, alpha=16, scaler="lora")
        start.base.dequantize(), start.A, start.B, start.scaling, start.residuals

    Args:
        weight: W, (out, in), dense and finite, of any floating dtype, on the device to compute on.
        initializer, quantizer, scaler: keys.
        rank: of the adapter; None: there is none.
        seed, name: with rank and shape, what the layer's A is a function of.
        moments: of the layer's inputs, for an initializer that is calibrated.
        dtype: what Ŵ is decoded to when the layer computes; None: the weight's.

    Raises:
        InputError: an unknown key, a weight that is no finite matrix, a rank that is no whole number, a rank or
            quantizer that the initializer cannot work with, an alpha that is not finite, or moments that are missing,
            not finite, or of another width.
    """
    import torch

    from toolkit.registry import registry
    from toolkit.runs.adapters import initial

    begin, pack = registry.make("initializer", initializer), registry.make("quantizer", quantizer)
    if not isinstance(weight, torch.Tensor):
        raise InputError(f"{name}: a weight is a tensor (out, in); found {type(weight).__name__}")
    if weight.ndim != 2 or not weight.numel():
        raise InputError(f"{name}: a weight (out, in) is needed; found shape {tuple(weight.shape)}")
    if rank is not None and type(rank) is not int:
        raise InputError(f"{name}: a rank is a whole number; found {rank!r}")
    if not math.isfinite(alpha):
        raise InputError(f"{name}: alpha is {alpha}; a finite number is needed")
    shape = (weight.shape[0], weight.shape[1])
    scaling = 1.0 if rank is None else float(registry.make("scaler", scaler)(alpha, rank))
    begin.check(shape, pack, rank)
    if begin.needs_calibration and moments is None:
        raise InputError(
            f"initializer {begin.key} is calibrated: give the second moments of {name}'s inputs, as "
            "moments=tk.Moments(second, tokens)"
        )
    if moments is not None and not isinstance(moments, Moments):
        raise InputError(f"{name}: moments are {type(moments).__name__}, and tk.Moments(second, tokens) is asked for")
    if moments is not None:
        found = tuple(moments.second.shape)
        if found != (shape[1], shape[1]) or not bool(moments.second.isfinite().all()):
            raise InputError(
                f"{name}: finite second moments of shape {shape[1]}×{shape[1]} are needed; found shape {found}"
                + ("" if found != (shape[1], shape[1]) else " with NaN or infinity")
            )
    a = None if rank is None else initial(seed, name, rank, shape).to(weight.device)
    return begin.initialize(Given(name, weight, pack, rank, scaling, a, seed, dtype, moments))
