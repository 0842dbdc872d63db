"""Grids: what a quantizer can round one weight to, column by column."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from toolkit.interfaces.quantizer import Packed


class Grid(ABC):
    """The values that one weight (out, in) can be rounded to, for methods that fix it column by column.

    Scales start as the quantizer's own for this weight (static). `fit` fixes those of one group of columns anew, from
    values that error compensation has moved. What `round` answers is what `pack` keeps: `pack().dequantize()` gives
    the very same numbers.

    Attributes:
        group: input columns that share a scale in every row; groups begin at its multiples. None where scales do
            not lie so (blocks that run over the ends of rows): they are static then.
    """

    group: int | None

    @abstractmethod
    def fit(self, start: int, values: torch.Tensor, importance: torch.Tensor | None = None) -> None:
        """Fix the scales of the group that begins at column `start`.

        Args:
            values: (out, columns of the group), float32, as they are now.
            importance: (columns of the group,), float32: weights of the squared error that the scales then minimise,
                Σ importance·(w − ŵ)², searched; None takes the quantizer's own rule.

        Raises:
            ValueError: this grid has no groups, or `start` begins none.
        """

    @abstractmethod
    def round(self, columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """ŵ of some columns in float32, (out, n), by the scales as they are; the codes are remembered for `pack`.

        Args:
            columns: (n,) int64, which they are.
            values: (out, n), float32.
        """

    @abstractmethod
    def pack(self) -> Packed:
        """The packed weight, after every column was rounded.

        Raises:
            ValueError: a column was not.
        """
