"""Exports: adapters and bases as PEFT, transformers with bitsandbytes, and compressed-tensors read them; merging."""

from toolkit.runs.exporting.exporting import FORMATS, export

__all__ = ["FORMATS", "export"]
