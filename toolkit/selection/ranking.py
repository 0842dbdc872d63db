"""From one number a layer to a set of layers: the top of a ranking, under any budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from toolkit.errors import InputError
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile


def top(
    profile: Profile,
    scores: Sequence[float],
    budget: Budget,
    *,
    rounding: Literal["ceil", "floor"] = "ceil",
    selector: str,
) -> list[str]:
    """The best-scored layers that a budget pays for, best first; ties go to the earlier layer.

    Under a layers budget the first K = ⌈ρL⌉ of the ranking (`rounding="floor"`: ⌊ρL⌋), in exact decimals
    (AQLoRA §3.2). Under a parameters or bytes budget the longest prefix of the ranking whose total never
    exceeds it: the first layer that does not fit ends it, and no later, smaller one is tried (our choice; a
    knapsack would no longer be the ranking's own set).

    Args:
        profile: the layers.
        scores: one finite number a layer, in profile order; larger is kept first.
        budget: how much may be kept.
        rounding: of K under a layers budget.
        selector: the selector's key, for messages.

    Raises:
        InputError: scores of the wrong length, a score that is no finite number (layer named), or a budget
            that selects nothing.
    """
    values = check_scores(profile, scores, selector)
    order = sorted(range(len(values)), key=lambda at: (-values[at], at))
    names = profile.names
    if budget.unit == "layers":
        count = budget.of(len(profile), rounding)
        if count == 0:
            raise nothing(profile, budget, selector)
        return [names[at] for at in order[:count]]
    costs = [getattr(layer, budget.unit) for layer in profile.layers]
    left = budget.of(sum(costs), "floor")
    kept = []
    for at in order:
        if costs[at] > left:
            break
        left -= costs[at]
        kept.append(names[at])
    if not kept:
        first = order[0]
        raise nothing(
            profile, budget, selector, f"its first layer, {names[first]}, costs {costs[first]:,} {budget.unit}"
        )
    return kept


def check_scores(profile: Profile, scores: Sequence[float], selector: str) -> list[float]:
    """The scores as floats.

    Raises:
        InputError: not one score a layer, or one that is no finite number; the layer is named.
    """
    try:
        values = list(scores)
    except TypeError:
        raise InputError(
            f"{selector} scored the layers with {type(scores).__name__}; a sequence of {len(profile)} numbers is needed"
        ) from None
    if len(values) != len(profile):
        raise InputError(f"{selector} gave {len(values)} scores for the {len(profile)} layers of {profile.model}")
    for at, value in enumerate(values):
        try:
            values[at] = float(value)
        except (TypeError, ValueError):
            values[at] = math.nan
        if not math.isfinite(values[at]):
            raise InputError(f"{selector} scored layer {profile.layers[at].name} with {value!r}: no finite number")
    return values


def nothing(profile: Profile, budget: Budget, selector: str, detail: str = "") -> InputError:
    """The error of a budget that pays for no layer: what it amounts to, and what the smallest layer costs."""
    if not profile.layers:
        return InputError(f"the profile of {profile.model} holds no layers")
    if budget.unit == "layers":
        smallest = f"one of {len(profile)} layers is layers={1 / len(profile):.6f}"
        amount = f"{budget.amount * len(profile):f} layers"
    else:
        row = min(profile.layers, key=lambda layer: getattr(layer, budget.unit))
        smallest = f"the smallest layer, {row.name}, costs {getattr(row, budget.unit):,} {budget.unit}"
        amount = f"{budget.of(getattr(profile, budget.unit), 'floor'):,} {budget.unit}"
    return InputError(
        f"{selector} selects nothing under budget {budget} ({amount})"
        + (f": {detail}" if detail else "")
        + f"; {smallest}"
    )
