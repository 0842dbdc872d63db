"""Second-order error compensation of one weight on a quantizer's own grid, and the Hessian's factor it goes by."""

from __future__ import annotations

import dataclasses

import torch

from toolkit.interfaces import Grid, Packed

RAISE = 10.0
"""What the damping is multiplied by where the factorization fails."""
FIRST = 1e-6
"""The first damping after 0."""
LARGEST = 1.0
"""No damping is tried above this."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """The upper Cholesky factor U of the damped inverse Hessian, UᵀU = (H + λI)⁻¹.

    Attributes:
        upper: U, (in, in), float64.
        damping: λ over the mean of H's diagonal, as it was in the end.
        raised: how often it was raised.
    """

    upper: torch.Tensor
    damping: float
    raised: int


def factorize(hessian: torch.Tensor, damping: float) -> Factor | None:
    """U of H + λI, λ = damping·mean(diag H); a damping that fails is raised tenfold up to 1, and then there is none.

    The one place that owns the damping. With P the reversal of rows, PHP = LLᵀ gives H = (PLP)(PLP)ᵀ of upper
    triangular PLP, so that U = (PLP)⁻¹: one factorization and one triangular inverse, and never H⁻¹ itself.

    Args:
        hessian: H, (in, in), float64, symmetric, its diagonal positive.
    """
    mean = hessian.diagonal().mean()
    unit = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    raised = 0
    while True:
        damped = hessian + unit * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not bool(failed):
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), unit, upper=True)
            if bool(upper.isfinite().all()):
                return Factor(upper, damping, raised)
        damping = max(damping * RAISE, FIRST)
        raised += 1
        if damping > LARGEST * (1 + 1e-9):
            return None


def sequence(second: torch.Tensor, grid: Grid, order: str) -> torch.Tensor:
    """The order in which columns are rounded, (in,) int64: the largest E[x_j²] first, ties as they are.

    `groups` puts the groups in the order of their sums, a short last one last, and the columns of each in their own,
    so that a group's scales can still be fitted when its turn comes; where there are no groups it is `columns`, which
    orders each column by itself. `none` leaves them.
    """
    moments = second.diagonal()
    if order == "none":
        return torch.arange(len(moments), device=moments.device)
    if order == "columns" or grid.group is None:
        return moments.argsort(descending=True, stable=True)
    groups = torch.nn.functional.pad(moments, (0, -len(moments) % grid.group), value=-torch.inf).view(-1, grid.group)
    within = groups.argsort(dim=1, descending=True, stable=True)
    first = groups.sum(1).argsort(descending=True, stable=True)
    found = (within + torch.arange(len(groups), device=first.device)[:, None] * grid.group)[first].view(-1)
    return found[found < len(moments)]


def compensate(
    grid: Grid,
    weight: torch.Tensor,
    upper: torch.Tensor,
    order: torch.Tensor,
    *,
    block: int,
    fit: str | None = None,
) -> Packed:
    """Round one column after the other, and move each one's error onto the columns that are still to come.

        ŵ_j = round(w_j),    w_k ← w_k − (w_j − ŵ_j)·U_jk/U_jj  for k > j

    so that the columns to come minimise tr(E H Eᵀ) given those that are fixed (Frantar et al., 2023, §3.3). Columns
    go in blocks: within one, each update is made at once, and those after it get all of its updates in one product.

    Args:
        grid: of the weight.
        weight: W, (out, in), in the dtype to compute in.
        upper: U of the Hessian whose rows and columns are in `order`.
        order: the columns' order, (in,) int64.
        block: columns a block; where scales are fitted it is rounded up to whole groups.
        fit: the scales of a group when its first column's turn comes, from the values of then: None leaves them;
            `refresh` takes the format's own rule; `search` those that add the least error when the group is rounded
            and compensated, Σ_j ((w_j − ŵ_j)/U_jj)² (ibid., eq. 2). The groups must follow one another whole.
    """
    columns = weight.shape[1]
    group = grid.group or 1
    if fit is not None:
        block = -(-block // group) * group
    upper = upper.to(weight.dtype)
    diagonal = upper.diagonal()
    spread = upper / diagonal[:, None]
    importance = diagonal.square().reciprocal()
    rest = weight[:, order].T.contiguous()  # (in, out): a column is contiguous
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        here, inside = rest[start:stop], spread[start:stop, start:stop]
        errors = torch.empty_like(here)
        for j in range(stop - start):
            if fit is not None and (start + j) % group == 0:
                part = slice(j, min(j + group, stop - start))
                searched = (importance[start:stop][part], inside[part, part]) if fit == "search" else ()
                grid.fit(order[start:stop][part], here[part].T.float(), *searched)
            column = order[start + j : start + j + 1]
            errors[j] = here[j] - grid.round(column, here[j][:, None].float())[:, 0]
            here[j + 1 :] -= inside[j, j + 1 :, None] * errors[j]
        rest[stop:] -= spread[start:stop, stop:].T @ errors
    return grid.pack()


def output_error(error: torch.Tensor, weight: torch.Tensor, second: torch.Tensor) -> float:
    """√(tr(E R Eᵀ)/tr(W R Wᵀ)): how far outputs are off over the calibration inputs, relative; 0 without outputs."""
    above, below = (_energy(matrix.double(), second) for matrix in (error, weight))
    return (max(above, 0.0) / below) ** 0.5 if below > 0 else 0.0


def _energy(matrix: torch.Tensor, second: torch.Tensor) -> float:
    return float(((matrix @ second) * matrix).sum())
