"""The layers with the largest weights in the root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.interfaces import RankingSelector
from toolkit.records.profile import Profile


@dataclass
class WeightNorm(RankingSelector):
    """Select the layers with the largest root mean square weight: the first K by ‖W‖_F/√n.

    AQLoRA §7.1 takes a weight-norm ranking as a baseline and gives no formula; §7.3 says that it picks nearly
    the layers of the density rule: 68 of 72 and 99 of 100. Dividing by √n is our choice for that fact: on the
    dequantized SmolLM2-135M-Instruct (210 layers of 3 sizes) the two share 38 of 42, 96 of 105 and 140 of 147
    layers so, and with the plain ‖W‖_F, which ranks by size, 7, 71 and 123.
    """

    name = "weight-norm"

    def score(self, profile: Profile) -> Sequence[float]:
        """‖W‖_F/√n of each layer."""
        return profile["norm"] / np.sqrt(profile["parameters"])
