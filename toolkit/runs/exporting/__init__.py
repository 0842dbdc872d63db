"""Exports: adapters and bases as PEFT, transformers with bitsandbytes, and compressed-tensors read them; merging."""

from toolkit.runs.exporting.exporting import FORMATS, export
from toolkit.runs.exporting.fusing import fuse

__all__ = ["FORMATS", "export", "fuse"]
