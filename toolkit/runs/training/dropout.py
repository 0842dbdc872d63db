"""Dropout by the lever: in the adapters alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def lever_dropout(model: nn.Module, share: float) -> Iterator[None]:
    """Only the adapters drop out, by the lever's share; the frozen model's own dropout is off."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    inside: set[int] = set()
    for module in model.modules():
        dropouts = getattr(module, "lora_dropout", None)
        if isinstance(dropouts, nn.ModuleDict):
            inside |= {id(m) for m in dropouts.modules()}
            chosen = {key: nn.Dropout(share) if share else nn.Identity() for key in dropouts}
            inside |= {id(m) for m in chosen.values()}
            put(module, "lora_dropout", nn.ModuleDict(chosen))
    for module in model.modules():
        if id(module) in inside:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            put(module, "p", 0.0)
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value and (name.endswith("dropout") or name.endswith("pdrop")):
                put(module, name, 0.0)
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
