"""The best factors of rank r of a matrix, exact or by a block Krylov method that states its error."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

Method = Literal["auto", "exact", "randomised"]

OVERSAMPLING = 8
"""Columns of a block beyond r (Halko et al., 2011, §4.2: 5 to 10)."""
BLOCKS = 16
"""Blocks that a search on a flat spectrum may take; where they would fill over half of the smaller side, a full
decomposition is as fast (measured on one core; our choice)."""
TOLERANCE = 1e-3
"""The stated error at which the search ends (our choice). The true one is about its square, at most 3e-6 where both
were measured, as eigenvalues err by the square of what their vectors do."""
FINEST = 1e-5
"""float32 products resolve no smaller stated error; the tolerance is not asked below it."""
NOTHING = 1e-6
"""A singular value of this share of the largest, or below, is float32's rounding."""
EAGER = 4
"""Products after which the bound is looked at every second time only."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """E ≈ LVᵀ of rank r: V the leading right singular vectors, L = EV = UΣ.

    LVᵀ = EVVᵀ is a projection of E whatever V is, so that an error in V costs at most the stated share.

    Attributes:
        left: UΣ, (out, r), float32.
        right: Vᵀ, (r, in), float32, orthonormal rows.
        sigma: Σ, (r,), float64, descending.
        error: bound on (Σσ² of the best r − Σσ² here)/Σσ² here; 0 for a full decomposition (to rounding).
        exact: whether the decomposition was full.
        products: passes over E, each one product with E and one with Eᵀ.
    """

    left: torch.Tensor
    right: torch.Tensor
    sigma: torch.Tensor
    error: float
    exact: bool
    products: int

    @property
    def captured(self) -> float:
        """Σσ² of these r: the squared Frobenius norm that the factors take away from E."""
        return float(self.sigma.square().sum())

    def split(
        self, scaling: float, fallback: torch.Tensor, right: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, B) with s·BA = LVᵀ: A = √Σ·Vᵀ/√s, B = U√Σ/√s, (r, in) and (out, r) in float32.

        The scaling lies in both halves, because ∂A = s·Bᵀ∂W and ∂B = s·∂W·Aᵀ: so split, they have the size √(s·σ)
        both. With all of 1/s in B, A would be √s times as long and B shorter by as much, so that the gradient of B
        had s times the size of A's, beside the split above, and what one step of gradient descent does to the
        weight through B, s·∂B·A, s² times the size of s·B·∂A: thirtyfold at s = 5.66 (s² = 32).

        Where E was weighted before it was decomposed, `right` is what stands for Vᵀ, with rows of other lengths than 1;
        each component is then split in half by length too, ‖A_i‖ = ‖B_i‖, so that the weights' unit does not count.

        A component with σ = 0 (to rounding) has nothing to say, and were A's row and B's column both zero, neither
        would ever get a gradient: it starts as the zero start does, A's row from `fallback` and B's column 0. A
        negative s has its sign in B.

        Args:
            fallback: (r, in), the layer's seeded A.
            right: (r, in), float32; Vᵀ where there is none.
        """
        if right is None:
            right, root = self.right, self.sigma.sqrt()
        else:
            lengths = torch.linalg.vector_norm(right, dim=1, dtype=torch.float64)
            root = (self.sigma / torch.where(lengths > 0, lengths, 1.0)).sqrt()
        dead = self.sigma <= NOTHING * self.sigma.amax()
        share = math.sqrt(abs(scaling))
        up = (root / share).float()
        down = torch.where(dead, 0.0, 1 / torch.where(dead, 1.0, root * share)).float()
        a = torch.where(dead[:, None], fallback.to(right), right * up[:, None])
        return a.contiguous(), (self.left * (down if scaling > 0 else -down)).contiguous()


def best(
    matrix: torch.Tensor,
    rank: int,
    *,
    method: Method = "auto",
    seed: int = 0,
    tolerance: float = TOLERANCE,
    guess: torch.Tensor | None = None,
) -> Factors:
    """The factors of rank r that minimise ‖E − LVᵀ‖_F, by Eckart and Young the leading singular triples.

    `exact` takes the eigenvectors of the smaller Gram matrix in float64. `randomised` searches the block Krylov space
    of EᵀE from random columns (Halko et al., 2011; Musco and Musco, 2015), which on the flat spectra that
    quantization leaves behind needs far fewer products than power iterations alone, and stops by its own bound:
    with Ritz vectors V, Ritz values Θ and the residual R = EᵀEV − VΘ, r eigenvalues of EᵀE lie within ‖R‖_F of Θ in
    the Euclidean norm (Kahan; Parlett, The Symmetric Eigenvalue Problem, §11.5), so that their sum exceeds Σθ by
    √r·‖R‖_F at most. That these are the r largest fails only where a leading vector is all but orthogonal to every
    random start column, which has no practical chance. `auto` searches where 16 blocks of r + 8 fit into half of the
    smaller side, and otherwise, or where the search does not reach its tolerance there, is exact.

    Args:
        matrix: E, (out, in), float32, finite.
        rank: 1 to min(shape).
        seed: of the random columns; no global random state is used.
        tolerance: of the stated error, `Factors.error`.
        guess: (in, k), directions to start from besides, such as those of a similar matrix.

    Raises:
        ValueError: a rank outside 1 to min(shape).
    """
    small = min(matrix.shape)
    if not 1 <= rank <= small:
        raise ValueError(f"a rank of 1 to {small} is needed for {tuple(matrix.shape)}; found {rank}")
    products, half = 0, small // 2
    if method == "randomised" or (method == "auto" and BLOCKS * (rank + OVERSAMPLING) <= half):
        limit = half if method == "auto" else small
        found, products = _search(matrix, rank, seed, max(tolerance, FINEST), guess, limit)
        if found is not None:
            return _cleared(matrix, found)
    return _cleared(matrix, _full(matrix, rank, products))


def _cleared(matrix: torch.Tensor, found: Factors) -> Factors:
    """With exact zeros where a row or column of E has nothing else, which rounding leaves at 1e-17 or so.

    A block of such numbers is no block of zeros to a quantizer, and its maximum is quantized as any other.
    """
    full = matrix != 0
    left = found.left * full.any(dim=1)[:, None]
    return dataclasses.replace(found, left=left, right=found.right * full.any(dim=0))


def _full(matrix: torch.Tensor, rank: int, products: int) -> Factors:
    """Eigenvectors of EᵀE or EEᵀ in float64: an absolute error of 1e-16·σ₁² in σ², far below float32's own."""
    wide = matrix.shape[0] < matrix.shape[1]
    exact = matrix.double()
    gram = exact @ exact.T if wide else exact.T @ exact
    values, vectors = torch.linalg.eigh(gram)
    vectors = vectors[:, -rank:].flip(1)
    sigma = values[-rank:].flip(0).clamp(min=0).sqrt()
    if not wide:
        return Factors((exact @ vectors).float(), vectors.T.float().contiguous(), sigma, 0.0, True, products)
    # UUᵀE: Vᵀ = Σ⁻¹UᵀE, orthonormal but where σ vanishes beside σ₁, and those rows are not used
    rows = vectors.T @ exact
    safe = torch.where(sigma > 0, sigma, 1.0)
    return Factors((vectors * sigma).float(), (rows / safe[:, None]).float(), sigma, 0.0, True, products)


def _search(
    matrix: torch.Tensor, rank: int, seed: int, tolerance: float, guess: torch.Tensor | None, limit: int
) -> tuple[Factors | None, int]:
    """The block Krylov search within `limit` dimensions; None where it does not reach its tolerance there."""
    if guess is None:
        guess = matrix.new_empty(matrix.shape[1], 0)
    columns = min(rank + OVERSAMPLING, matrix.shape[1])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(matrix.shape[1], max(columns - guess.shape[1], OVERSAMPLING), generator=generator)
    block = torch.linalg.qr(torch.cat([guess, drawn.to(matrix)], dim=1))[0]
    basis, images = block[:, :0], block[:, :0]
    lefts = matrix.new_empty(matrix.shape[0], 0)
    products = 0
    while basis.shape[1] + block.shape[1] <= limit:
        left = matrix @ block
        basis, lefts = torch.cat([basis, block], dim=1), torch.cat([lefts, left], dim=1)
        images = torch.cat([images, matrix.T @ left], dim=1)
        products += 1
        if basis.shape[1] >= rank and (products <= EAGER or products % 2 == 0):
            values, vectors = torch.linalg.eigh((lefts.T @ lefts).double())
            vectors, values = vectors[:, -rank:].flip(1), values[-rank:].flip(0).clamp(min=0)
            turn = vectors.to(matrix)
            right = basis @ turn
            off = torch.linalg.vector_norm(images @ turn - right * values.to(matrix), dtype=torch.float64)
            total = values.sum()
            error = float(math.sqrt(rank) * off / total) if total > 0 else 0.0
            if error <= tolerance:
                left = lefts @ turn
                sigma = torch.linalg.vector_norm(left, dim=0, dtype=torch.float64)
                return Factors(left, right.T.contiguous(), sigma, error, False, products), products
        block = images[:, -block.shape[1] :]
        for _ in range(2):  # twice is enough, and after a block that lost rank it is needed
            block = block - basis @ (basis.T @ block)
            block = torch.linalg.qr(block)[0]
    return None, products
