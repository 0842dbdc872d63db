"""The layers that quantization damages least: the ranking's negative control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.interfaces import RankingSelector
from toolkit.records.profile import Profile


@dataclass
class BottomError(RankingSelector):
    """Keep the layers with the smallest quantization error: the first K of the ranking by −ε.

    ε is `top-error`'s, and the choice of the mean squared error is ours (see there). The control of AQLoRA
    §7.2. Under a layers budget it holds other totals than `top-error`: judge it at its own total, or give it
    the other's total as a parameters or bytes budget.

    Raises:
        InputError: the profile does not hold that quantizer's errors, even where it holds another's.
    """

    name = "bottom-error"

    quantizer: str = "nf4"
    measure: Literal["mse", "mae", "relative", "max"] = "mse"

    @property
    def quantizers(self) -> tuple[str, ...]:
        """The one whose errors are ranked."""
        return (self.quantizer,)

    def score(self, profile: Profile) -> Sequence[float]:
        """−ε of each layer."""
        return [-error for error in profile.errors(self.quantizer, self.measure)]
