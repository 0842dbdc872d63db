"""What products keep of a layer's packed weight from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from toolkit.interfaces import Packed

_KEPT: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def kept(layer: nn.Module, name: str, packed: Packed, make: Callable[[], Any]) -> Any:
    """`make()`, made anew only when the packed weight's tensors are others, or were written to.

    Args:
        layer: whose end ends what is kept.
        name: of what is made.
    """
    state = tuple((t.data_ptr(), t.device, 0 if t.is_inference() else t._version) for t in packed.tensors.values())
    entries = _KEPT.setdefault(layer, {})
    found = entries.get(name)
    if found is None or found[0] != state:
        entries[name] = found = (state, make())
    return found[1]


def global_scale(layer: nn.Module, name: str, packed: Packed) -> float:
    """g of a weight as a Python number; waits for the device once, which must not be while a CUDA graph is captured."""
    return kept(layer, f"g of {name}", packed, lambda: float(packed.tensors["global_scale"]))
