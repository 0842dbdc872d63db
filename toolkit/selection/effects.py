"""The best and the worst set at a given memory, from one effect a layer; and such effects from the draws' losses.

If effects add up, the loss of a selection is a constant less the sum of its layers' gains, and the set that
chance is measured against is a knapsack: the largest sum of gains within the tolerance of a total. Additivity is
an assumption about the model; the set is then scored, on text that the effects were not fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from toolkit.errors import InputError
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.matching import window
from toolkit.selection.select import matched_to

STEP_LIMIT = 20_000_000
"""The most steps of the dynamic programme: a step is one sum and one comparison, about a third of a microsecond."""

ALPHAS = tuple(float(alpha) for alpha in np.geomspace(1e-3, 1e4, 29))
"""Penalties that `ridge` chooses from: four a decade. Indicators are 0 or 1, so that they need no scaling."""


def best(values: Sequence[float], sizes: Sequence[int], low: int, high: int) -> list[int]:
    """The set with the largest sum of values whose total size lies in a window, exactly.

        argmax_S { Σ_{i∈S} v_i : low ≤ Σ_{i∈S} size_i ≤ high }

    Items of one size form a cell, of which a best set takes the k of largest value, so that a dynamic programme
    runs over cells with k = 0 … n. Sums are integers (multiples of one power of two), so that no rounding
    decides; of sets with equal sums the one whose first item that the other lacks comes earlier is taken.

    Args:
        values: one finite number an item.
        sizes: positive integers.
        low, high: the window, both ends in it.

    Returns:
        Indexes, ascending.

    Raises:
        InputError: lists of different length, a value that is no finite number, a size below 1, no set in the
            window, or a table past `STEP_LIMIT`.
    """
    keys = _exact(values)
    if len(sizes) != len(keys):
        raise InputError(f"{len(keys)} values and {len(sizes)} sizes: each item has one of each")
    if min(sizes, default=1) < 1:
        raise InputError(f"item {next(i for i, s in enumerate(sizes) if s < 1)} has size {min(sizes)}; sizes are ≥ 1")
    unit = math.gcd(*sizes) or 1
    floor, ceiling = max(0, -(-low // unit)), high // unit
    cells: dict[int, list[int]] = {}
    for item in sorted(range(len(sizes)), key=lambda i: -keys[i]):
        cells.setdefault(sizes[item] // unit, []).append(item)
    order = sorted(cells.items(), reverse=True)  # large sizes first: fewer states early
    left = sum(sizes) // unit
    states, taken, steps = {0: 0}, [], 0
    for size, items in order:
        left -= size * len(items)
        steps += len(states) * (len(items) + 1)
        if steps > STEP_LIMIT:
            raise InputError(
                f"the best set of {len(sizes)} layers of {len(cells)} different sizes needs more than {STEP_LIMIT:,} "
                "steps: match a smaller selection"
            )
        sums = [0]
        for item in items:
            sums.append(sums[-1] + keys[item])
        table: dict[int, int] = {}
        choice: dict[int, int] = {}
        for total, value in states.items():
            least = max(0, -(-(floor - left - total) // size))
            most = min(len(items), (ceiling - total) // size)
            for k in range(least, most + 1):
                state, reached = total + k * size, value + sums[k]
                if state not in table or reached > table[state]:
                    table[state], choice[state] = reached, k
        states = table
        taken.append(choice)
    if not states:
        raise InputError(f"no set of {len(sizes)} layers has a total from {low:,} to {high:,}; widen the tolerance")
    total = max(states, key=states.__getitem__)
    chosen: list[int] = []
    for (size, items), choice in zip(reversed(order), reversed(taken), strict=True):
        chosen += items[: choice[total]]
        total -= choice[total] * size
    return sorted(chosen)


def _exact(values: Sequence[float]) -> list[int]:
    """Each value as an integer, in the same proportions, with a digit below that orders equal sums by items."""
    ratios = []
    for item, value in enumerate(values):
        if not math.isfinite(value):
            raise InputError(f"the value of item {item} is {value!r}: no finite number")
        ratios.append(float(value).as_integer_ratio())
    scale = max((under for _, under in ratios), default=1)  # denominators are powers of two
    bits = len(ratios)
    return [(over * (scale // under) << bits) + (1 << (bits - 1 - at)) for at, (over, under) in enumerate(ratios)]


def reference_selection(
    profile: Profile, values: Sequence[float], like: Selection, within: Decimal, name: str
) -> Selection:
    """The best set by these values that holds as many parameters as another selection, to within a tolerance.

    S = argmax { Σ v_ℓ : |parameters(S) − parameters(M)| ≤ within·parameters(M) }; M itself is a candidate. The
    worst set is that of the negated values.

    Args:
        profile: the layers.
        values: one gain a layer, in profile order.
        like: M, of this profile.
        within: a fraction of M's parameters.
        name: what the selection is recorded as.

    Raises:
        InputError: those of `best`; or M is of other weights.
    """
    profile.expect(like.model, like.fingerprint, "the selection to match")
    to = matched_to(profile, like)
    sizes = [layer.parameters for layer in profile.layers]
    rows = [profile.layers[at] for at in best(values, sizes, *window(to.parameters, within))]
    total = sum(row.parameters for row in rows)
    return Selection(
        selector=name,
        options={"within": str(within)},
        model=profile.model,
        fingerprint=profile.fingerprint,
        layers=[row.name for row in rows],
        parameters=total,
        bytes=sum(row.bytes for row in rows),
        of={"layers": len(profile), "parameters": profile.parameters, "bytes": profile.bytes},
        matched_to=to,
        mismatch=(total - to.parameters) / to.parameters,
    )


def ridge(indicators: np.ndarray, losses: np.ndarray, alphas: Sequence[float] = ALPHAS) -> np.ndarray:
    """Additive gains of layers from the losses of draws: g = −β, by ridge regression.

        (β₀, β) = argmin Σᵢ (yᵢ − β₀ − xᵢ·β)² + α‖β‖²,

    the intercept not penalized. α is the penalty of `alphas` with the smallest leave-one-out error, in closed form:
    eᵢ/(1 − hᵢᵢ) with H = 11ᵀ/n + U diag(s²/(s² + α)) Uᵀ, X − 1x̄ᵀ = U diag(s) Vᵀ; the larger one of a tie. Which
    regression is used is our choice: draws are few beside layers, and a ridge needs no selection of layers.

    Args:
        indicators: (draws, layers), 1 where the draw holds the layer.
        losses: (draws,), nats a token.
        alphas: penalties, > 0.

    Returns:
        (layers,) float64: how much lower the loss is for holding each layer, nats a token.

    Raises:
        InputError: fewer than 3 draws, shapes that do not agree, numbers that are not finite, or no penalty > 0.
    """
    x, y = np.asarray(indicators, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise InputError(f"indicators of shape {x.shape} and losses of shape {y.shape}: (draws, layers) and (draws,)")
    if len(y) < 3:
        raise InputError(f"a ridge regression of {len(y)} draws: at least 3 are needed")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("a ridge regression of numbers that are not finite")
    if not len(alphas) or not all(math.isfinite(a) and a > 0 for a in alphas):
        raise InputError(f"penalties {list(alphas)}: each is a finite number above 0")
    centred = y - y.mean()
    u, s, vt = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    along = u.T @ centred
    errors = {}
    for alpha in sorted(alphas):
        kept = s**2 / (s**2 + alpha)
        leverage = 1 / len(y) + (u**2) @ kept
        errors[alpha] = float(np.sum(((centred - u @ (kept * along)) / (1 - leverage)) ** 2))
    alpha = min(errors, key=lambda a: (errors[a], -a))
    return -(vt.T @ (s / (s**2 + alpha) * along))
