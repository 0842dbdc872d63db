"""Initializers: what a layer's base and its adapter start from."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from toolkit.interfaces.component import Component
from toolkit.interfaces.quantizer import Packed, Quantizer

if TYPE_CHECKING:
    import torch

FALLBACK = "fallback"
"""The note that says why a layer was started otherwise than asked for, such as by rounding alone."""
LIMITED = "limited"
"""The note that says which of its options an initializer could not follow in a layer, and why."""


@dataclasses.dataclass(frozen=True)
class Moments:
    """Second moments of a layer's inputs over calibration tokens, R = (1/n)·Σ xxᵀ.

    Attributes:
        second: R, (in, in), float32, symmetric, on the layer's device. GPTQ's Hessian is 2R.
        tokens: n; every token counts alike, whatever batch it came in.
        activations: key of the quantizer that the inputs were rounded by before they were counted.
    """

    second: torch.Tensor
    tokens: int
    activations: str = "none"


@dataclasses.dataclass(frozen=True)
class Given:
    """What an initializer is given of one layer.

    Attributes:
        name: the layer's.
        weight: W, (out, in), dense, finite, in its checkpoint's dtype, on the device to compute on.
        quantizer: of the base.
        rank: of the adapter; None: the layer gets none.
        scaling: s, the factor on BA; 1 without an adapter.
        A: (rank, in), float32: the layer's A as a function of (seed, name, rank, shape); None without an adapter.
        seed: of the run, for what is drawn besides A.
        dtype: what Ŵ is decoded to when the layer computes; the base is fitted as it will be read back.
        moments: of the layer's inputs; None where the initializer asked for none.
    """

    name: str
    weight: torch.Tensor
    quantizer: Quantizer
    rank: int | None
    scaling: float
    A: torch.Tensor | None
    seed: int = 0
    dtype: torch.dtype | None = None
    moments: Moments | None = None


@dataclasses.dataclass(frozen=True)
class Start:
    """What a layer starts from: W ≈ Ŵ + s·BA.

    Attributes:
        base: Ŵ, packed by the plan's quantizer.
        A: (rank, in), float32; None without an adapter.
        B: (out, rank), float32; None without an adapter.
        scaling: s.
        residuals: ‖W − Ŵ − s·BA‖_F/‖W‖_F of each iterate, in order; the first is the zero start's (Q(W), B = 0), or,
            where another initializer makes the base, of that base with B = 0.
        kept: which of them this is.
        notes: what a report has to say of this layer: damping, dead channels, stated errors; plain values. Layers with
            the notes `fallback` and `limited` are counted by their text, without what follows in parentheses.
    """

    base: Packed
    A: torch.Tensor | None
    B: torch.Tensor | None
    scaling: float
    residuals: tuple[float, ...]
    kept: int = 0
    notes: Mapping[str, float | int | str | bool] = dataclasses.field(default_factory=dict)

    @property
    def residual(self) -> float:
        """‖W − Ŵ − s·BA‖_F/‖W‖_F of what is kept."""
        return self.residuals[self.kept]

    def effective(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Ŵ + s·BA in float32, (out, in), Ŵ as it is decoded to `dtype`: the weight that the layer starts with."""
        import torch

        base = self.base.dequantize(dtype).float()
        return base if self.A is None or self.B is None else torch.addmm(base, self.B, self.A, alpha=self.scaling)


class Initializer(Component):
    """dense weight + quantizer + rank + scaling (+ calibration statistics) → quantized base and A, B.

    `plain` says that the base is the quantizer's own Q(W), A the seeded one and B = 0, so that nothing need be computed
    or kept. `needs_calibration` ones are given the layer's `Moments`. `needs_rank` ones answer for layers with an
    adapter only.
    """

    kind = "initializer"
    plain: ClassVar[bool] = False
    needs_calibration: ClassVar[bool] = False
    needs_rank: ClassVar[bool] = True

    @property
    def activations(self) -> str:
        """Key of the quantizer that a layer's inputs are rounded by while it is calibrated; `none` leaves them."""
        return "none"

    def check(self, shape: tuple[int, int], quantizer: Quantizer, rank: int | None) -> None:
        """Refuse, before any weight is read, what cannot be done for a layer of this shape (out, in).

        Raises:
            InputError: a rank above min(shape), a quantizer without a grid where one is needed, and the like.
        """

    @abstractmethod
    def initialize(self, given: Given) -> Start:
        """The start of one layer. Must not change its argument, nor use global random state.

        Raises:
            InputError: the layer cannot be started so.
        """
