"""Tails and quantiles of t, F, χ² and the binomial; scipy is imported where they are asked for."""

from __future__ import annotations

import math


def t_p(t: float, df: float) -> float:
    """P(|T| ≥ |t|), two-sided; df may be infinite."""
    from scipy import special

    return float(2 * (special.ndtr(-abs(t)) if math.isinf(df) else special.stdtr(df, -abs(t))))


def t_above(t: float, df: float) -> float:
    """P(T ≥ t)."""
    from scipy import special

    return float(special.ndtr(-t) if math.isinf(df) else special.stdtr(df, -t))


def t_quantile(share: float, df: float) -> float:
    """The t below which `share` lies."""
    from scipy import special

    return float(special.ndtri(share) if math.isinf(df) else special.stdtrit(df, share))


def df_of_t(share: float, t: float) -> float:
    """The df at which `share` of t lies below `t`; infinite where it is the normal's or less."""
    from scipy import special

    if t <= special.ndtri(share) * (1 + 1e-9):
        return math.inf
    return float(special.stdtridf(share, t))


def t_power(shift: float, df: float, alpha: float) -> float:
    """P(|T| > t_{1−α/2, df}) for T noncentral with noncentrality `shift`: the power of a two-sided t-test."""
    from scipy import special

    if math.isinf(df) or df > 1e5:  # the noncentral t has no finite sum there
        bound = float(special.ndtri(1 - alpha / 2))
        return float(special.ndtr(shift - bound) + special.ndtr(-shift - bound))
    bound = t_quantile(1 - alpha / 2, df)
    above, below = special.nctdtr(df, shift, bound), special.nctdtr(df, shift, -bound)
    return float(1 - above + (0.0 if math.isnan(below) else below))


def f_two_sided(f: float, df_above: float, df_below: float) -> float:
    """min(1, 2·min(P(F ≤ f), P(F ≥ f)))."""
    from scipy import special

    return float(min(1.0, 2 * min(special.fdtr(df_above, df_below, f), special.fdtrc(df_above, df_below, f))))


def f_quantile(share: float, df_above: float, df_below: float) -> float:
    """The F below which `share` lies."""
    from scipy import special

    return float(special.fdtri(df_above, df_below, share))


def chi2_quantile(share: float, df: float) -> float:
    """The χ² below which `share` lies."""
    from scipy import special

    return float(special.chdtri(df, 1 - share))


def binomial_at_least(successes: int, total: int, chance: float) -> float:
    """P(X ≥ successes), X binomial(total, chance)."""
    from scipy import special

    if successes <= 0:
        return 1.0
    return float(special.betainc(successes, total - successes + 1, chance))


def clopper_pearson(successes: int, total: int, tail: float) -> tuple[float, float]:
    """The exact limits of a share, each with `tail` outside."""
    from scipy import special

    low = float(special.betaincinv(successes, total - successes + 1, tail)) if successes else 0.0
    high = float(special.betaincinv(successes + 1, total - successes, 1 - tail)) if successes < total else 1.0
    return low, high
