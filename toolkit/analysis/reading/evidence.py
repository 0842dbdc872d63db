"""What every verdict is computed from, wherever it was measured: outcomes of arms and of their draws, as plain numbers.

A study's reports, a table of scores from another runner, and a certificate all become `Evidence`; tests,
verdicts and sentences (`toolkit.analysis.statistics.verdicts`) know nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from toolkit.records.report import Law
from toolkit.records.study import Analysis, Headroom


@dataclass(frozen=True)
class Chance:
    """The draws of one control for one arm at one budget.

    Attributes:
        law: what they were drawn from; with `law.chain`, draw i of every budget belongs to one family; with
            `law.shared`, draw i of every arm is one random change of all layers.
        asked: how many draws were asked for.
        mismatch: (mean, largest) of (draw − arm)/arm of the parameters, signed.
        outcomes: text → one outcome a draw, float64, in the order of the draws.
    """

    control: str
    law: Law
    asked: int
    mismatch: tuple[float, float]
    outcomes: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.outcomes.values())))


@dataclass(frozen=True)
class Room:
    """One text's scored windows: summed negative log-likelihoods (nats) of chance, arm, oracle and anti-oracle.

    Attributes:
        tokens: scored tokens of each window.
        chance: the mean over the draws, window by window.
        draws: the draws' losses on these windows, nats a token.
    """

    tokens: np.ndarray
    chance: np.ndarray
    arm: np.ndarray
    oracle: np.ndarray
    anti: np.ndarray
    draws: np.ndarray


@dataclass(frozen=True)
class Judged:
    """One arm at one budget: its outcome on each text, its draws under each law, its headroom on each text."""

    arm: str
    budget: str | None
    selector: str
    parameters: int
    outcomes: dict[str, float]
    chances: tuple[Chance, ...]
    headroom: dict[str, Room] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """All outcomes of one model, and the analysis that was declared for them.

    Attributes:
        texts: the texts, or metrics, that outcomes are named by.
        budgets: in the study's order.
        unit: of the outcome, for sentences.
    """

    texts: tuple[str, ...]
    budgets: tuple[str | None, ...]
    arms: tuple[Judged, ...]
    analysis: Analysis
    headroom: Headroom | None = None
    unit: str = "nats a token"


def mismatch(parameters: np.ndarray, target: int) -> tuple[float, float]:
    """(mean, largest) of (draw − arm)/arm of the parameters; the largest is the value furthest from zero, signed."""
    off = parameters / target - 1
    low, high = float(off.min()), float(off.max())
    return float(off.mean()), high if abs(high) >= abs(low) else low
