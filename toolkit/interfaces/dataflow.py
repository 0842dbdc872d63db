"""Data flows: how a planned model computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from toolkit.interfaces.component import Component

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.interfaces.initializer import Start
    from toolkit.records.plan import LayerPlan, Plan


class DataFlow(Component):
    """How a planned model computes, and what it keeps for backward."""

    kind = "dataflow"

    def check(self, plan: Plan) -> None:
        """Refuse, before any weight is loaded, a plan that this data flow cannot compute.

        Raises:
            InputError: naming layer, component and reason.
        """

    @abstractmethod
    def apply(
        self,
        model: nn.Module,
        layers: Mapping[str, LayerPlan],
        dtype: torch.dtype,
        seed: int = 0,
        starts: Callable[[str, torch.Tensor], Start | None] | None = None,
    ) -> nn.Module:
        """Replace each planned layer in the model, which is changed in place and returned, perhaps wrapped.

        A flow that has a choice of how to compute leaves what it chose as `dataflow` of what it returns
        (`toolkit.records.dataflow.Flow`), and reports hold it.

        Args:
            model: dense, in its checkpoint's dtype.
            layers: name → decision, for every layer that is planned.
            dtype: the compute dtype where a decision names none; what stays dense is cast to it afterwards.
            seed: of the adapters; a layer's A is a function of (seed, layer name, rank, shape) alone.
            starts: (layer name, dense weight) → what the layer starts from, or None for a plain start (Q(W), seeded A,
                B = 0); asked once a layer, in model order.
        """
