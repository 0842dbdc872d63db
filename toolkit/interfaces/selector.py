"""Selectors: which layers, under a budget; and laws of chance."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from toolkit import spec
from toolkit.errors import InputError
from toolkit.interfaces.component import Component

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.records.budget import Budget
    from toolkit.records.profile import Profile
    from toolkit.records.selection import Selection


@dataclasses.dataclass(frozen=True)
class Pick:
    """What a selector answers: layer names and, for matched ones, what the match was.

    Attributes:
        layers: names, in any order.
        mismatch: (reached − target)/target of the matched quantity, signed.
        feasible_subsets: how many subsets the draw could have been; an exact integer.
        inclusion: each layer's probability of being drawn, in profile order.
        inclusion_draws: how many simulated draws `inclusion` was estimated from; None where it is exact.
        single_total: whether the matched set meets the law itself and every feasible subset holds its total, so
            that its rank among the draws is exact.
    """

    layers: Sequence[str]
    mismatch: float | None = None
    feasible_subsets: int | None = None
    inclusion: Sequence[float] | None = None
    inclusion_draws: int | None = None
    single_total: bool | None = None


class Selector(Component):
    """profile + budget + randomness (+ a selection to match) → a set of layers.

    Used twice: which layers stay in 16 bit, which layers get an adapter. `random` selectors answer
    differently for each seed; `needs_like` selectors take their target from another selection, so that a
    budget may be left out; `needs_budget` is false for those that use neither (a list, all, none);
    `needs_calibration` ones read what a forward and backward pass over data left in the profile.
    """

    kind = "selector"
    random: ClassVar[bool] = False
    needs_like: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    needs_calibration: ClassVar[bool] = False

    @property
    def quantizers(self) -> tuple[str, ...]:
        """Keys of the quantizers whose errors or bytes it reads from the profile; a study has these measured."""
        return ()

    @abstractmethod
    def select(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None
    ) -> Pick | Sequence[str]:
        """The chosen layers' names. Must not change its arguments or use global random state."""

    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` distinct answers of a random selector, without replacement; fewer where fewer exist.

        The default repeats `select` and drops repeats; it gives up after 100 repeats in a row.
        """

        def draw() -> Pick:
            pick = self.select(profile, budget, rng, like)
            return pick if isinstance(pick, Pick) else Pick(list(pick))

        return unrepeated(draw, count)


def unrepeated(draw: Callable[[], Pick], count: int) -> list[Pick]:
    """`count` distinct answers of a function, repeats dropped; fewer after 100 repeats in a row."""
    found: dict[frozenset[str], Pick] = {}
    repeats = 0
    while len(found) < count and repeats < 100:
        pick = draw()
        names = frozenset(pick.layers)
        repeats = repeats + 1 if names in found else 0
        found.setdefault(names, pick)
    return list(found.values())


@dataclasses.dataclass
class RankingSelector(Selector):
    """Top-K by a score, under any budget, ties broken by layer order.

    Implement `score`: one number a layer in profile order, larger is kept first. Under a layers budget
    K = ⌈ρL⌉ in exact decimals (`rounding=floor` takes ⌊ρL⌋); under a parameters or bytes budget the longest
    prefix of the ranking that never exceeds it.
    """

    rounding: Literal["ceil", "floor"] = "ceil"

    @abstractmethod
    def score(self, profile: Profile) -> Sequence[float]:
        """One finite number a layer, in profile order; larger is kept first."""

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> Sequence[str]:
        from toolkit.selection.ranking import top

        assert budget is not None  # the core refuses a missing budget before it asks
        return top(profile, self.score(profile), budget, rounding=self.rounding, selector=self.key)


@dataclasses.dataclass
class CalibratedSelector(RankingSelector):
    """A ranking by what data say of each layer: one number a layer, measured once and kept in the profile.

    Implement `measure`. `toolkit calibrate` (`toolkit.runs.calibration.calibrated`) asks it, with a model and a few
    training rows, and keeps the answer as the profile's statistic `statistic_key`; `score` reads that, so that a
    selection needs neither model nor data again. A selector of the built-in package imports no torch at all: what it
    does to tensors it does by their methods, and `toolkit.runs.gradients` takes the gradients.
    """

    needs_calibration = True

    @classmethod
    def summary(cls) -> str:
        """Also that it asks for data."""
        return super().summary() + " (reads data: toolkit calibrate)"

    @property
    def statistic_key(self) -> str:
        """What its numbers are called in a profile: its key less `rounding`, which changes none of them."""
        defaults = self.defaults()
        ranking = RankingSelector.defaults()
        return spec.render(self.name, {k: v for k, v in self.options.items() if v != defaults[k] and k not in ranking})

    @abstractmethod
    def measure(
        self,
        model: nn.Module,
        batches: Sequence[dict[str, torch.Tensor]],
        profile: Profile,
        progress: Callable[[int, int], None] | None = None,
    ) -> Sequence[Any]:
        """One finite number a layer, in profile order; larger is kept first. Must leave the model as it was.

        Args:
            model: dense, in evaluation mode, on its device; no parameter asks for a gradient.
            batches: `input_ids`, `attention_mask` and `labels` (−100 where a token is not to be predicted), each
                (rows, tokens), int64, padded on the right, on the model's device.
            profile: of this model.
            progress: to be called with batches done and batches in all.

        Raises:
            InputError: what cannot be measured; the layer is named.
        """

    def score(self, profile: Profile) -> Sequence[float]:
        """What was measured.

        Raises:
            InputError: the profile was not calibrated for it; the message says how that is done.
        """
        return profile.statistic(self.statistic_key)


class Law(Selector):
    """A law of chance: a distribution over sets of layers that hold as much as a given selection.

    Implement `draws`. The docstring states the law. A law that can draw nested families also implements
    `chains`.

    Attributes:
        match: what each draw holds as much of as the matched selection: `parameters`, `bytes`, `extra-bytes`,
            `adapter-parameters`, or `layers` where it is their number alone. An option of that name sets it.
        within: how far a draw's total may be off, as a fraction of the matched one; None where nothing is promised.
            An option of that name sets it.
        shared: draw i is one random change of all layers (a permutation), whatever is matched: its stream then
            does not depend on the matched selection, so that draw i of several selections, or of several
            budgets, goes together. A set may then come up twice.
    """

    random = True
    needs_like = True
    match: ClassVar[str] = "parameters"
    within: ClassVar[Decimal | None] = None
    shared: ClassVar[bool] = False

    @property
    def holds(self) -> tuple[str, ...]:
        """What each draw has in common with the matched selection besides its total: `roles`, `sizes`, `thirds` …

        Verdicts under laws that hold more say whether composition, and not ranking, makes a difference.
        """
        return ()

    @classmethod
    def summary(cls) -> str:
        """Also which draws go together."""
        kinds = ["draws shared by all arms and budgets"] if cls.shared else []
        kinds += ["nested families"] if cls.chains is not Law.chains and not cls.shared else []
        return super().summary() + (f" ({', '.join(kinds)})" if kinds else "")

    @property
    def nests(self) -> bool:
        """Whether it draws nested families, that is, implements `chains`."""
        return type(self).chains is not Law.chains

    @classmethod
    def standard(cls) -> list[Law]:
        """The forms of this law that belong to the standard set of controls; none by default."""
        return []

    @abstractmethod
    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` draws; distinct ones unless the law is `shared`, and then fewer where fewer exist."""

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> Pick:
        """The first draw."""
        return self.draws(profile, budget, rng, like, 1)[0]

    def chains(self, profile: Profile, likes: Sequence[Selection], rng: Random, count: int) -> list[tuple[Pick, ...]]:
        """`count` families, one pick a matched selection, nested as those are.

        Raises:
            InputError: this law draws no families; or the matched selections are not nested, where it needs that.
        """
        raise InputError(f"{self.key} draws no nested families; use a law that does, or draw each budget by itself")
