"""The interfaces of the toolkit's parts: what a plug-in author implements, one noun a file.

Every part is a `Component`: a class with a unique `name` in its `kind`, whose options are the fields of a
dataclass (or none at all). The core knows these classes and never a component by name. Nothing here
imports torch, so that selections can be made and judged without it.
"""

from toolkit.interfaces.component import Component
from toolkit.interfaces.dataflow import DataFlow
from toolkit.interfaces.grid import Grid
from toolkit.interfaces.initializer import FALLBACK, LIMITED, Given, Initializer, Moments, Start
from toolkit.interfaces.layout import Layout
from toolkit.interfaces.quantizer import Errors, Packed, Quantizer
from toolkit.interfaces.scaler import Scaler
from toolkit.interfaces.selector import CalibratedSelector, Law, Pick, RankingSelector, Selector, unrepeated
from toolkit.interfaces.task import Answered, Example, Hub, Scored, Task, Windows

KINDS: dict[str, type[Component]] = {c.kind: c for c in (Quantizer, Selector, Initializer, Scaler, DataFlow, Task)}
"""Every kind of component and its interface; the registry, the lists and the checks read this."""

__all__ = [
    "FALLBACK",
    "KINDS",
    "LIMITED",
    "Answered",
    "CalibratedSelector",
    "Component",
    "DataFlow",
    "Errors",
    "Example",
    "Given",
    "Grid",
    "Hub",
    "Initializer",
    "Law",
    "Layout",
    "Moments",
    "Packed",
    "Pick",
    "Quantizer",
    "RankingSelector",
    "Scaler",
    "Scored",
    "Selector",
    "Start",
    "Task",
    "Windows",
    "unrepeated",
]
