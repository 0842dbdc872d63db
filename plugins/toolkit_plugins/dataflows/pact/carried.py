"""The NVFP4 form that a tensor carries from the operation that made it to those that read it."""

from __future__ import annotations

import dataclasses

import torch

from toolkit_plugins.quantizers.nvfp4_rows import Rows

_NAME = "_nvfp4"


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """What a tensor x (…, K) was rounded to.

    Attributes:
        rows: x̂ of its rows, (M, K).
        exact: whether x is x̂ itself, so that nothing but `rows` need be kept of it.
        version: of the tensor when it was rounded, so that one that was changed in place carries nothing; None where
            autograd counts none (in inference mode).
    """

    rows: Rows
    exact: bool
    version: int | None


def carry(x: torch.Tensor, rows: Rows, *, exact: bool) -> torch.Tensor:
    """The same tensor object, which from now on carries its NVFP4 form; any operation on it gives one without."""
    setattr(x, _NAME, Carried(rows, exact, _version(x)))
    return x


def carried(x: torch.Tensor) -> Carried | None:
    """What the tensor carries, or None."""
    found = getattr(x, _NAME, None)
    return found if found is not None and found.version == _version(x) else None


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version
