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
    def fit(
        self,
        columns: torch.Tensor,
        values: torch.Tensor,
        importance: torch.Tensor | None = None,
        spread: torch.Tensor | None = None,
    ) -> None:
        """Fix the scales of one group of columns.

        With `importance` they are searched, row by row, as to minimise Σ_j importance_j·(w_j − ŵ_j)². With `spread`
        besides, the columns are rounded one after the other, and each one's error is moved onto those after it
        before they are: w_k ← w_k − (w_j − ŵ_j)·spread_jk for k > j.

        Args:
            columns: (n,) int64, all of the group, in the order that `spread` has them.
            values: w, (out, n), float32, as they are now.
            importance: (n,), not negative; None takes the quantizer's own rule, no search.
            spread: (n, n), read above its diagonal.

        Raises:
            ValueError: this grid has no groups, or `columns` are not all of one.
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
