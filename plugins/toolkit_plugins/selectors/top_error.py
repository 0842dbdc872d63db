"""The layers that quantization damages most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.interfaces import RankingSelector
from toolkit.records.profile import Profile


@dataclass
class TopError(RankingSelector):
    """Keep the layers with the largest quantization error: the first K of the ranking by ε.

    ε = ‖W − Ŵ‖²/n, the mean squared error a weight under `quantizer` (AQLoRA §3.2). The paper's public text
    leaves its formula out, so that the measure is our choice, for the facts that it states: on phi-1.5 errors
    span 11.8× over 144 layers, the top fifth hold 29% of the total, and they correlate with layer size at
    r = −0.19. A mean squared error a weight gives such figures; a sum over weights would grow with size, and
    relative errors hardly differ between layers. `measure` takes the others: mae, relative, max.

    Raises:
        InputError: the profile does not hold that quantizer's errors, even where it holds another's.
    """

    name = "top-error"

    quantizer: str = "nf4"
    measure: Literal["mse", "mae", "relative", "max"] = "mse"

    @property
    def quantizers(self) -> tuple[str, ...]:
        """The one whose errors are ranked."""
        return (self.quantizer,)

    def score(self, profile: Profile) -> Sequence[float]:
        """ε of each layer."""
        return profile.errors(self.quantizer, self.measure)
