"""Two stages: a second NF4 quantization of what the first left over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from toolkit.interfaces import Grid, Quantizer
from toolkit.registry import registry
from toolkit_plugins.quantizers.nf4 import NF4


@dataclasses.dataclass(frozen=True)
class Residual(Quantizer):
    """A second NF4 stage on the layer's own residual, over any inner quantizer.

    Ŵ = Q(W) + NF4(W − Q(W)), both stages decoded in float32, the residual taken against Q(W) as it is reloaded
    (AQLoRA, Appendix H, the cheaper protection tier). The second stage has NF4's defaults. Bits a weight are the
    sum of both: 8.25 over NF4.

    Attributes:
        inner: the first stage's key, kept in its shortest form: `residual(inner=nf4)` is `residual`.

    Raises:
        InputError: an unknown inner quantizer, or options that it does not take.
    """

    name = "residual"

    inner: str = "nf4"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", self.first.key)

    @property
    def first(self) -> Quantizer:
        """The inner quantizer."""
        return registry.make("quantizer", self.inner)

    @property
    def second(self) -> NF4:
        """The quantizer of the residual."""
        return NF4()

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both stages' tensors, named `inner.…` and `residual.…`."""
        first = self.first.encode(weight)
        rest = self._rest(weight, first)
        kept = {f"inner.{name}": tensor for name, tensor in first.items()}
        return kept | {f"residual.{name}": tensor for name, tensor in self.second.encode(rest).items()}

    def decode(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Q(W) + NF4(W − Q(W)) in float32."""
        parts = {
            stage: {n.removeprefix(stage): t for n, t in tensors.items() if n.startswith(stage)}
            for stage in ("inner.", "residual.")
        }
        first = self.first.decode(parts["inner."], shape).reshape(shape)
        return first + self.second.decode(parts["residual."], shape).reshape(shape)

    def grid(self, weight: torch.Tensor) -> Grid:
        """The second stage's grid; the first stage is Q(W) and stays so.

        Raises:
            InputError: as `quantize`, or the weight has not two dimensions.
        """
        from toolkit_plugins.quantizers.grid import Shifted

        weight = self.valid(weight)
        first = self.first.encode(weight)
        base = self.first.decode(first, tuple(weight.shape)).reshape(weight.shape)
        return Shifted(self, weight.dtype, first, base, self.second.grid(weight.float() - base))

    def _rest(self, weight: torch.Tensor, first: Mapping[str, torch.Tensor]) -> torch.Tensor:
        exact = weight.detach().float()
        return exact - self.first.decode(first, tuple(weight.shape)).reshape(exact.shape)
