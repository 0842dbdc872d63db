"""Chance with the same positions in the ranking: scores shuffled among layers of one class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Literal

from toolkit.errors import InputError
from toolkit.interfaces import Law, Pick
from toolkit.records.budget import Budget
from toolkit.records.profile import LayerProfile, Profile
from toolkit.records.selection import Selection


@dataclass
class RandomPermuted(Law):
    """Shuffle a ranking's scores among layers of one role and size, and take the same positions.

    The law: a draw is π(M) = { π(ℓ) : ℓ ∈ M }, π uniform over the permutations that map each class onto itself.
    Which class a layer is in, `among` says: role (same role and same parameters) or size (same parameters). So each
    draw holds k_c of the n_c layers of each class, as M does, and its mismatch is zero: ∏ C(n_c, k_c) sets are
    possible, M among them, each as likely, and a layer's inclusion is k_c/n_c.

    One π, from a stream that no matched selection changes, is applied to whatever is matched: draw i of several
    arms and of several budgets goes together, and what was nested, disjoint or ordered before still is. The
    permutations are drawn independently, so that a set may come up twice, and M too. The p-value (1 + b)/(n + 1) is
    valid all the same: where scores say nothing about layers of a class, M is π₀(M*) with π₀ uniform, and π₀, π₁π₀, …,
    π_nπ₀ are independent and uniform, as permutations form a group (Phipson & Smyth 2010; Hemerik & Goeman 2018).

    Raises:
        InputError: M holds all or none of each class, so that every permutation maps it onto itself.
    """

    name = "random-permuted"
    within = Decimal(0)
    shared = True

    among: Literal["role", "size"] = "role"

    @classmethod
    def standard(cls) -> list[Law]:
        """Within roles."""
        return [cls()]

    @property
    def holds(self) -> tuple[str, ...]:
        """Sizes always, and roles where they are the classes."""
        return ("roles", "sizes") if self.among == "role" else ("sizes",)

    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` draws, independent; a set may come up twice."""
        assert like is not None  # the core refuses a missing selection before it asks
        return [pick for (pick,) in self.chains(profile, [like], rng, count)]

    def chains(self, profile: Profile, likes: Sequence[Selection], rng: Random, count: int) -> list[tuple[Pick, ...]]:
        """`count` families: each permutation applied to every matched selection, which need not be nested."""
        names = profile.names
        classes: dict[tuple[str | int, ...], list[int]] = {}
        for at, layer in enumerate(profile.layers):
            classes.setdefault(self._class(layer), []).append(at)
        place = {name: at for at, name in enumerate(names)}
        members = [[place[name] for name in like.layers] for like in likes]
        laws = [self._law(classes, member, like, len(names)) for member, like in zip(members, likes, strict=True)]
        found = []
        for _ in range(count):
            image = list(range(len(names)))
            for layers in classes.values():
                moved = list(layers)
                for last in range(len(moved) - 1, 0, -1):  # Fisher–Yates
                    other = rng.randrange(last + 1)
                    moved[last], moved[other] = moved[other], moved[last]
                for at, to in zip(layers, moved, strict=True):
                    image[at] = to
            found.append(
                tuple(
                    Pick([names[i] for i in sorted(image[at] for at in member)], 0.0, feasible, inclusion, None, True)
                    for member, (feasible, inclusion) in zip(members, laws, strict=True)
                )
            )
        return found

    def _class(self, layer: LayerProfile) -> tuple[str | int, ...]:
        return (layer.role, layer.parameters) if self.among == "role" else (layer.parameters,)

    def _law(
        self, classes: dict[tuple[str | int, ...], list[int]], member: list[int], like: Selection, layers: int
    ) -> tuple[int, list[float]]:
        """∏ C(n_c, k_c), and each layer's k_c/n_c."""
        inside, feasible, inclusion = set(member), 1, [0.0] * layers
        for items in classes.values():
            kept = sum(1 for at in items if at in inside)
            feasible *= math.comb(len(items), kept)
            for at in items:
                inclusion[at] = kept / len(items)
        if feasible == 1:
            wider = "; among=size has larger classes" if self.among == "role" else ""
            raise InputError(
                f"{like.selector} holds all layers or none of each {self.among}: no permutation makes another set of "
                f"it{wider}"
            )
        return feasible, inclusion
