"""Equivalence of two arms: two one-sided tests, only against a margin that was declared before the first run."""

from __future__ import annotations

from toolkit.analysis.statistics.distributions import t_above, t_quantile
from toolkit.analysis.statistics.runs import Equivalence, Estimate
from toolkit.errors import InputError


def equivalence(estimate: Estimate, margin: float | None = None, *, alpha: float = 0.05) -> Equivalence:
    """p = max(P(T ≥ (m + D)/s), P(T ≥ (m − D)/s)), T of the estimate's df; passed where p ≤ α.

    The smallest margin at which it would pass is |D| + t_{1−α}·s: printed where no margin was declared, and no claim.

    Args:
        estimate: D with its standard error s and df.
        margin: m; None: none was declared beforehand.
        alpha: of each of the two tests; the interval that goes with them covers 1 − 2α.

    Raises:
        InputError: a margin that is not above zero.

    Source: Schuirmann (1987).
    """
    if margin is not None and not margin > 0:
        raise InputError(f"an equivalence margin lies above zero; found {margin}")
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha of an equivalence test lies between 0 and .5; found {alpha}")
    d, error, df = estimate.estimate, estimate.error, estimate.df
    if not error or df is None:
        return Equivalence(margin, None, None, None, alpha)
    smallest = abs(d) + t_quantile(1 - alpha, df) * error
    if margin is None:
        return Equivalence(None, None, None, smallest, alpha)
    p = max(t_above((margin + d) / error, df), t_above((margin - d) / error, df))
    return Equivalence(margin, p <= alpha, p, smallest, alpha)
