"""E2M1, the 4-bit float of the OCP microscaling formats and of NVFP4: its levels and its rounding."""

from __future__ import annotations

import functools

import torch

from toolkit_plugins.quantizers.codebook import CodebookQuantizer, passed

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0


class E2M1(CodebookQuantizer):
    """Common base of the E2M1 formats: sign in bit 3, then one of eight magnitudes; ties to the even code.

    Values beyond ±6 saturate. A negative value that rounds to zero keeps its sign, as in an IEEE cast.
    """

    levels = (*MAGNITUDES, *(-x for x in MAGNITUDES))
    mode = "divide"
    first_nibble = "low"

    def thresholds(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Midpoints of the signed levels; where the even code lies above, the next float below the midpoint."""
        up = _rises(device)
        down = torch.tensor([-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0], device=device).flip(0)
        # Below zero the even code lies above the midpoint where it lies below it on the positive side.
        below = torch.nextafter(down, torch.full_like(down, -10.0))
        odd = torch.tensor([True, False, True, False, True, False, True], device=device)
        levels = torch.tensor(sorted(self.levels), device=device)
        return torch.cat([torch.where(odd, below, down), torch.zeros(1, device=device), up]), levels

    def choose(self, ratio: torch.Tensor) -> torch.Tensor:
        """sign·8 + the number of thresholds below |y|, uint8."""
        magnitude = passed(ratio.abs(), _rises(ratio.device))
        return (magnitude + 8 * ratio.signbit()).to(torch.uint8)


def divide(values: torch.Tensor, by: float) -> torch.Tensor:
    """values/by, rounded once: CUDA turns a division by a Python number into a multiplication by its reciprocal."""
    return values / values.new_tensor(by)


@functools.cache
def _rises(device: torch.device) -> torch.Tensor:
    """|y| above which the magnitude is at least 1, 2, … 7: codes 2, 4 and 6 are even and win their lower tie."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)
    below = torch.nextafter(middle, torch.zeros_like(middle))
    even = torch.tensor([False, True, False, True, False, True, False], device=device)
    return torch.where(even, below, middle)
