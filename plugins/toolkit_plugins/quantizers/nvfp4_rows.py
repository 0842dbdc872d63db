"""NVFP4 of what flows through a model: activations and gradients, every row (a token) rounded by itself."""

from __future__ import annotations

import dataclasses

import torch

from toolkit_plugins.quantizers.e2m1 import LARGEST, MAGNITUDES, divide
from toolkit_plugins.quantizers.nvfp4 import E4M3_LARGEST, GLOBAL_FLOOR, NVFP4, block_scale

BLOCK = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A matrix (M, K) in NVFP4, every row with a tensor scale of its own: x̂ = g·s·e2m1(code), 4.5 bits a value.

    Attributes:
        codes: uint8 (M, 8·⌈K/16⌉), two a byte, the first in the low half; what lies beyond K holds the code of zero.
        scales: s, float8_e4m3fn (M, ⌈K/16⌉).
        g: float32 (M,), powers of two.
        width: K.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    g: torch.Tensor
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.g))

    def unscaled(self) -> torch.Tensor:
        """s·e2m1(code), float32 (M, K): at most six significant bits, so that bfloat16 holds it exactly."""
        pairs = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1)
        magnitudes = torch.tensor(MAGNITUDES, device=pairs.device)
        values = magnitudes[(pairs & 7).int()] * self.scales.float().repeat_interleave(BLOCK, dim=1)
        return torch.where(pairs >= 8, -values, values)[:, : self.width]

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """x̂ (M, K). g is a power of two, so that float32 and bfloat16 hold it exactly above their smallest normals.

        Of |x| above 3.2·10³⁸ x̂ may be infinity, as any rounding up there may.
        """
        return (self.unscaled() * self.g[:, None]).to(dtype)


def quantize_rows(x: torch.Tensor, noise: torch.Tensor | None = None) -> Rows:
    """Round a matrix (M, K) of any float dtype to NVFP4, row by row.

        g = 2^⌈log₂(amax/(6·448))⌉,  s = E4M3(amax₁₆/(6·g)),  code = RNE(x/(s·g))

    PACT does not say what scales its activations have. A row's own g, so that a token's rounding depends on no other
    token of the batch, and a power of two, so that x̂ is exact in bfloat16 and a product's rows are scaled exactly, are
    our choices. s has the same three bits of mantissa under any g, so that the power of two costs no accuracy. Floors
    are those of `NVFP4`. A value that is not finite makes its whole row NaN, so that it is seen downstream.

    Args:
        noise: uniform in [0, 1), (M, K): rounds away from zero where it lies below the distance from the lower level,
            in units of the gap between the levels (stochastic rounding); None: to nearest, ties to even. With noise, s
            is rounded up to the next E4M3 number with 6·s·g ≥ amax₁₆: under the nearest one the largest value of half
            of the blocks would saturate, and E[x̂] = x would not hold. The paper is silent: our choice.
    """
    count, width = x.shape
    values = torch.nn.functional.pad(x.detach().float(), (0, -width % BLOCK))
    blocks = values.view(count, values.shape[1] // BLOCK, BLOCK)
    absmax = blocks.abs().amax(-1)
    g = _power(divide(absmax.amax(-1), LARGEST * E4M3_LARGEST).clamp(min=GLOBAL_FLOOR))
    scales = block_scale(absmax, g[:, None])
    if noise is not None:
        scales = _covering(scales, absmax / g[:, None])
    ratio = (blocks / (scales.float() * g[:, None])[..., None]).flatten(1)
    if noise is None:
        codes = NVFP4().choose(ratio)
    else:
        codes = _stochastic(ratio, torch.nn.functional.pad(noise, (0, -width % BLOCK), value=1.0))
    return Rows(codes[:, ::2] | codes[:, 1::2] << 4, scales, g, width)


def _power(g: torch.Tensor) -> torch.Tensor:
    """The least power of two not below g."""
    mantissa, exponent = torch.frexp(g)
    return torch.ldexp(torch.ones_like(g), exponent - (mantissa == 0.5).int()).where(g.isfinite(), torch.nan)


def _covering(scales: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """The next E4M3 number, up to 448, where 6·s lies below what the block must hold."""
    short = (LARGEST * scales.float() < absmax) & (scales.float() < E4M3_LARGEST)
    return (scales.view(torch.uint8) + short).view(torch.float8_e4m3fn)


def _stochastic(ratio: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor(MAGNITUDES, device=ratio.device)
    size = ratio.abs().clamp(max=LARGEST)
    below = (torch.bucketize(size, levels, right=True) - 1).clamp(max=len(MAGNITUDES) - 2)
    share = (size - levels[below]) / (levels[below + 1] - levels[below])
    return (below + (noise < share) + 8 * ratio.signbit()).to(torch.uint8)
