"""Which execution a device gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit_plugins.dataflows.pact.execution import Execution

if TYPE_CHECKING:
    import torch

AVAILABLE = {Execution.name: Execution}


def choose(asked: str, device: torch.device) -> tuple[Execution, str]:
    """(the execution, why it is this one).

    Raises:
        InputError: an execution that is not there for this device.
    """
    if asked == "auto":
        return Execution(), f"it is the only one on {device.type}"
    if asked not in AVAILABLE:
        raise InputError(f"data flow pact has no execution {asked!r} yet; it has {', '.join(AVAILABLE)}")
    return AVAILABLE[asked](), "it was asked for"
