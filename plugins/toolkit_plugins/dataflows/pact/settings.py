"""What of PACT's data flow is switched on; each switch is a factor that a study can ablate."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args, get_type_hints

from toolkit.errors import InputError, closest


@dataclasses.dataclass(frozen=True)
class Settings:
    """The switches of the data flow; the defaults are PACT's (Table 7), and our choice where the paper is silent.

    Attributes:
        execution: who computes: `reference` (plain PyTorch), `exact`, `fp8`, `native`; `auto`: the fastest that the
            device has and that keeps the numerics of `reference`.
        layouts: `cached` keeps a second copy of each weight, blocked along the output dimension, for backward;
            `shared` reads the forward copy in both directions, which then see the same effective weights.
        source: what the backward copy is rounded from under `cached`: the `calibrated` weight that forward computes
            with, or the `original` one.
        gradients: how an output gradient enters the input-gradient product: NVFP4 to `nearest`, `stochastic`, or
            `16bit` (not rounded).
        norm: what RMSNorm gives: `nvfp4`, kept for backward and shared by all that read it, or `16bit`, which is kept
            too; the frozen product rounds it either way, the LoRA branch reads it as it is.
        gates: what SiLU-multiply keeps of gate and up: `nvfp4`, `16bit`, or group-wise integers `int4`, `int2`.
        nonlinear: what RMSNorm and SiLU-multiply compute from in forward: `16bit`, or values rounded to `nvfp4`.
        reuse: whether layers that read one norm share what is kept of it; without, each keeps its own copy.

    Raises:
        InputError: a value that a switch does not have; what it has is told.
    """

    execution: Literal["auto", "reference", "exact", "fp8", "native"] = "auto"
    layouts: Literal["cached", "shared"] = "cached"
    source: Literal["calibrated", "original"] = "calibrated"
    gradients: Literal["nearest", "stochastic", "16bit"] = "nearest"
    norm: Literal["nvfp4", "16bit"] = "nvfp4"
    gates: Literal["nvfp4", "16bit", "int4", "int2"] = "nvfp4"
    nonlinear: Literal["16bit", "nvfp4"] = "16bit"
    reuse: bool = True

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Settings).items():
            allowed, found = get_args(hint) or (True, False), getattr(self, name)
            if found not in allowed:
                offered = closest(str(found), [str(value) for value in allowed])
                raise InputError(f"data flow pact has no {name}={found}; {offered}")
