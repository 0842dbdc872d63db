"""Which execution a device gets."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.errors import InputError, closest

if TYPE_CHECKING:
    import torch

    from toolkit_plugins.dataflows.pact.execution import Execution
    from toolkit_plugins.dataflows.pact.settings import Settings

HERE = "toolkit_plugins.dataflows.pact"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a device is, as far as executions ask.

    Attributes:
        kind: `cuda` for NVIDIA's alone, `rocm`, `cpu`, or another of PyTorch's.
        capability: of an NVIDIA GPU.
        triton: whether it is installed.
    """

    kind: str
    capability: tuple[int, int] | None = None
    triton: bool = False

    def __str__(self) -> str:
        parts = [self.kind if self.capability is None else "CUDA {}.{}".format(*self.capability)]
        return parts[0] if self.kind != "cuda" or self.triton else f"{parts[0]} without triton"


@dataclasses.dataclass(frozen=True)
class Offer:
    """An execution, imported when it is taken.

    Attributes:
        target: module:class.
        lacks: what it misses on a device, or None.
    """

    target: str
    lacks: Callable[[Found], str | None]

    def make(self) -> Execution:
        """The execution."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)()


def _gpu(least: tuple[int, int], majors: tuple[int, ...] = ()) -> Callable[[Found], str | None]:
    """Of NVIDIA's with triton: capabilities from `least` on, or with one of `majors`."""
    wanted = " or ".join(f"{major}.x" for major in majors) or "{}.{} or later".format(*least)

    def lacks(found: Found) -> str | None:
        if found.capability is None:
            return f"it needs an NVIDIA GPU of compute capability {wanted}"
        if found.capability < least or (majors and found.capability[0] not in majors):
            return f"it needs compute capability {wanted}"
        return None if found.triton else "it needs triton, which is not installed"

    return lacks


OFFERS = {
    "reference": Offer(f"{HERE}.execution:Execution", lambda found: None),
    "exact": Offer(f"{HERE}.exact:Exact", _gpu((8, 0))),
    "fp8": Offer(f"{HERE}.fp8:FP8", _gpu((8, 9))),
    "native": Offer(f"{HERE}.native:Native", _gpu((10, 0), (10, 12))),
}

BY_SPEED = ("native", "exact")
"""Of those that keep `reference`'s numerics, fastest first; `fp8` does not, and is never taken unasked."""


def choose(asked: str, device: torch.device, settings: Settings | None = None) -> tuple[Execution, str]:
    """(the execution, why it is this one).

    `auto` is `native` on compute capabilities 10.x and 12.x, if it passes its own trial there, `exact` on NVIDIA GPUs
    from 8.0 (Ampere) on, both with triton, and `reference` elsewhere.

    Args:
        settings: for what the execution computes otherwise than its name says, which is told.

    Raises:
        InputError: there is no execution of the name, or it cannot run on this device: what it needs, what was found
            and what would run are told.
    """
    if asked != "auto" and asked not in OFFERS:
        raise InputError(f"data flow pact has no execution {asked!r}; {closest(asked, ['auto', *OFFERS])}")
    found = look(device)
    execution, why = _fastest(found, device) if asked == "auto" else (_asked(asked, found, device), "it was asked for")
    told = None if settings is None else execution.departs(settings)
    return execution, why if told is None else f"{why}; {told}"


def look(device: torch.device) -> Found:
    """What a device is."""
    import torch

    if device.type != "cuda":
        return Found(device.type)
    if torch.version.hip is not None:
        return Found("rocm")
    return Found("cuda", torch.cuda.get_device_capability(device), importlib.util.find_spec("triton") is not None)


def able(found: Found) -> list[str]:
    """The executions that run on a device."""
    return [name for name, offer in OFFERS.items() if offer.lacks(found) is None]


def _asked(name: str, found: Found, device: torch.device) -> Execution:
    lacks = OFFERS[name].lacks(found)
    if lacks is None:
        execution = OFFERS[name].make()
        failed = _trial(name, device)
        if failed is None:
            return execution
        lacks = f"its trial failed ({failed})"
    others = ", ".join(each for each in able(found) if each != name)
    raise InputError(f"data flow pact: execution {name} cannot run here: {lacks}; found: {found}; what runs: {others}")


def _fastest(found: Found, device: torch.device) -> tuple[Execution, str]:
    passed_over = ""
    for name in BY_SPEED:
        if OFFERS[name].lacks(found) is not None:
            continue
        failed = _trial(name, device)
        if failed is None:
            return OFFERS[name].make(), f"the fastest on {found} with the numerics of reference{passed_over}"
        passed_over += f"; {name} was passed over, because its trial failed: {failed}"
    why = f"nothing faster with its numerics runs here: {OFFERS['exact'].lacks(found)}; found: {found}"
    return OFFERS["reference"].make(), why + passed_over


@functools.cache
def _trial(name: str, device: torch.device) -> str | None:
    """What an execution's own trial on a device says; once a process."""
    return OFFERS[name].make().trial(device)
