"""The layers with the heaviest weights on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.interfaces import RankingSelector
from toolkit.records.profile import Profile


@dataclass
class Density(RankingSelector):
    """Select the layers with the largest mean absolute weight: the first K by ‖W‖₁/n.

    AQLoRA §7.1 ranks layers to adapt by a density score s, finds it no better than chance, and its public
    text gives no formula. The mean absolute weight is our choice: it is a mean a weight, so that size alone
    does not rank, and it picks nearly the layers of the weight norm, as §7.3 says that theirs does.
    """

    name = "density"

    def score(self, profile: Profile) -> Sequence[float]:
        """‖W‖₁/n of each layer."""
        return profile["density"]
