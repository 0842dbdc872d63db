"""The built-in components: one folder a kind, one file a component, registered like a stranger's.

A kind's folder is imported only when that kind is asked for: selections need no torch.
"""

from __future__ import annotations

import importlib

from toolkit import hookimpl
from toolkit.interfaces import Component

FOLDERS = {
    "quantizer": "quantizers",
    "selector": "selectors",
    "initializer": "initializers",
    "scaler": "scalers",
    "dataflow": "dataflows",
    "task": "tasks",
}


@hookimpl
def toolkit_components(kind: str) -> list[type[Component]]:
    """The classes of one kind."""
    if kind not in FOLDERS:
        return []
    return importlib.import_module(f"{__name__}.{FOLDERS[kind]}").COMPONENTS
