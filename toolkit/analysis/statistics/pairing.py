"""Whether pairing runs by seed removed variance: two arms under one seed against two under different ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from toolkit.analysis.statistics.distributions import t_p, t_quantile
from toolkit.analysis.statistics.runs import Pairing, outcomes
from toolkit.errors import InputError


def pairing(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    coverage: float = 0.95,
    what: str = "the arms",
) -> Pairing:
    """s²(a − b) against s²(a) + s²(b) over shared seeds; removed = 1 − s²(a − b)/(s_a² + s_b²); r and its interval.

    removed = 2·r·s_a·s_b/(s_a² + s_b²), so it is r where the arms spread alike; p is of r = 0 (t, n − 2 df).
    Two seeds have no r.

    Args:
        first, second: (seeds,), outcomes of the arms under the same seeds, in the same order.

    Raises:
        InputError: fewer than two seeds, or lengths that differ.

    Source: the choice is ours. AQLoRA §7.4 finds its run-to-run spread at one seed as wide as that over seeds.
    """
    a, b = outcomes(first, what), outcomes(second, what)
    if len(a) != len(b) or len(a) < 2:
        raise InputError(f"{what}: two seeds or more, each with both arms, are asked for; found {len(a)} and {len(b)}")
    n = len(a)
    sa, sb = float(a.std(ddof=1)), float(b.std(ddof=1))
    joint, apart = float((a - b).var(ddof=1)), sa * sa + sb * sb
    if not apart:
        return Pairing(n, joint, apart, None, None, None, None, None, "the runs do not vary: nothing to remove")
    removed = 1 - joint / apart
    if not sa or not sb:
        return Pairing(n, joint, apart, removed, None, None, None, None, "one arm's runs do not vary")
    if n == 2:  # a line goes through any two points: r is +1 or −1 and says nothing
        return Pairing(n, joint, apart, removed, None, None, None, None, _sentence(n, removed, None, 1 - coverage))
    r = max(-1.0, min(1.0, float(np.corrcoef(a, b)[0, 1])))
    low = high = None
    p = 0.0 if abs(r) == 1 else t_p(r * math.sqrt((n - 2) / (1 - r * r)), n - 2)
    if n > 3:
        z, half = math.atanh(max(-1 + 1e-15, min(1 - 1e-15, r))), t_quantile((1 + coverage) / 2, math.inf)
        low, high = (math.tanh(z + side * half / math.sqrt(n - 3)) for side in (-1, 1))
    return Pairing(n, joint, apart, removed, r, low, high, p, _sentence(n, removed, p, 1 - coverage))


def _sentence(pairs: int, removed: float, p: float | None, alpha: float) -> str:
    seen = f"pairing by seed {'removed' if removed >= 0 else 'added'} {abs(removed):.0%} of the variance"
    if p is None or pairs < 4:
        return f"{seen} over {pairs} seeds, too few to tell that from nothing"
    return seen if p <= alpha else f"{seen} over {pairs} seeds, which cannot be told from nothing (p = {p:.2f})"
