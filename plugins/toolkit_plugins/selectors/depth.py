"""The last layers of the network: adapters there let the backward pass stop early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from toolkit.interfaces import RankingSelector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection
from toolkit.selection.ranking import nothing


@dataclass
class Depth(RankingSelector):
    """Select the last K layers in model order: score(ℓ) = ℓ (AQLoRA §3.3).

    The paper writes ⌈αL⌉, and its placement figures (100 of 144 layers at α = .7, mean block 15.2) fit ⌊αL⌋:
    take `rounding=floor` to reproduce them. With `whole_blocks` only whole transformer blocks are taken, from
    the top, as long as they do not exceed K (or the parameters or bytes); layers outside the blocks are left out.

    Raises:
        InputError: a budget that selects nothing, or, with `whole_blocks`, no whole block.
    """

    name = "depth"

    whole_blocks: bool = False

    def score(self, profile: Profile) -> Sequence[float]:
        """The layer's position."""
        return range(len(profile))

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> Sequence[str]:
        """The last K layers, or the whole blocks among them."""
        if not self.whole_blocks:
            return super().select(profile, budget, rng, like)
        assert budget is not None  # the core refuses a missing budget before it asks
        blocks: dict[int, list[int]] = {}
        for at, layer in enumerate(profile.layers):
            if layer.block is not None:
                blocks.setdefault(layer.block, []).append(at)
        costs = [1 if budget.unit == "layers" else getattr(layer, budget.unit) for layer in profile.layers]
        left = budget.of(sum(costs), self.rounding if budget.unit == "layers" else "floor")
        chosen: list[str] = []
        for block in sorted(blocks, reverse=True):
            cost = sum(costs[at] for at in blocks[block])
            if cost > left:
                break
            left -= cost
            chosen += [profile.layers[at].name for at in blocks[block]]
        if not chosen:
            top = max(blocks, default=None)
            held = sum(costs[at] for at in blocks[top]) if top is not None else 0
            detail = f"block {top} holds {held:,} {budget.unit}" if top is not None else "the model has no blocks"
            raise nothing(profile, budget, self.key, detail)
        return chosen
