"""Training: the Hugging Face Trainer under a study's levers, the same for every arm by construction.

Names are imported when first used: torch and transformers are slow to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "train": "outcome",
    "Outcome": "outcome",
    "Pacing": "pacing",
    "FairTrainer": "fair_trainer",
    "trainer": "fair_trainer",
    "lowest_block": "backward",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    from toolkit.runs.training.backward import lowest_block as lowest_block
    from toolkit.runs.training.fair_trainer import FairTrainer as FairTrainer
    from toolkit.runs.training.fair_trainer import trainer as trainer
    from toolkit.runs.training.outcome import Outcome as Outcome
    from toolkit.runs.training.outcome import train as train
    from toolkit.runs.training.pacing import Pacing as Pacing
