"""`select`, `draws` and `chains`: ask a selector, check the question and the answer, record where it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from decimal import Decimal
from os import PathLike, fspath
from random import Random
from typing import Any

from toolkit.errors import InputError, RunError, ToolkitError, closest
from toolkit.interfaces import Law, Pick, RankingSelector, Selector
from toolkit.records.budget import Budget
from toolkit.records.io import digest
from toolkit.records.profile import Profile
from toolkit.records.selection import MatchedTo, Selection
from toolkit.records.study import MOST_DRAWS
from toolkit.registry import registry
from toolkit.selection.ranking import nothing


def select(
    selector: str | Selector,
    profile: Profile,
    budget: Budget | str | None = None,
    *,
    like: Selection | None = None,
    seed: int = 0,
    **options: Any,
) -> Selection:
    """One selection of layers, in model order, with its provenance.

    Args:
        selector: a key such as `top-error` or `random-matched(within=0.01)`, or a selector.
        profile: the layers.
        budget: a Budget or text such as `layers=0.2`. Selectors that use none ignore it, and then it is not
            recorded. With `like` it may be left out, and must be that selection's where given.
        like: the selection to match, of the same profile.
        seed: of the selector's randomness; recorded for random selectors only.
        options: of the selector, beside those in its key.

    The random stream is `stream(selector.key, seed, like)`, and `stream(selector.key, seed)` for a law that is
    `shared`, so that an answer is a pure function of its arguments, and `select(…, seed=s)` is the first of
    `draws(…, seed=s)`. Where a matched selector states no mismatch itself, that of the parameters is recorded.

    Raises:
        InputError: unknown selector or option, a missing or unfitting `like` or budget, a budget that selects
            nothing, scores that are no finite numbers, or a selector that names unknown layers, names one
            twice, or changes the profile.
    """
    chosen = _Question(selector, profile, budget, [like] if like is not None else [], seed, options)
    return chosen.ask(lambda s, p, b, rng, m: [(s.select(p, b, rng, m[0] if m else None),)])[0][0]


def draws(
    selector: str | Selector,
    profile: Profile,
    budget: Budget | str | None = None,
    *,
    like: Selection | None = None,
    count: int,
    seed: int = 0,
    **options: Any,
) -> list[Selection]:
    """`count` distinct selections of a random selector, without replacement; all of them where fewer exist.

    A shorter list is the beginning of a longer one with the same seed. Draws of a law that is `shared` are
    independent: always `count`, and a selection may come up twice. The other arguments and the errors are
    those of `select`.

    Raises:
        InputError: also where the selector is not random, or `count` is below 1.
    """
    chosen = _Question(selector, profile, budget, [like] if like is not None else [], seed, options)
    chosen.expect_draws(count)
    found = chosen.ask(
        lambda s, p, b, rng, m: [(pick,) for pick in s.draws(p, b, rng, m[0] if m else None, count)],
        distinct=not chosen.shared,
    )
    return [selection for (selection,) in found]


def chains(
    selector: str | Selector,
    profile: Profile,
    *,
    likes: Sequence[Selection],
    count: int,
    seed: int = 0,
    **options: Any,
) -> list[list[Selection]]:
    """`count` families of a law: each a list of one selection a matched selection, nested as their totals ascend.

    The random stream is `stream(selector.key, seed, *likes)`, and `stream(selector.key, seed)` for a law that is
    `shared`, whose draw i of one selection is then the same by itself and in a family. A shorter list is the
    beginning of a longer one with the same seed. Each selection records which draw it is, and the hash of the matched
    selections, by which the members of one family are known.

    Args:
        selector: a key of a law that draws families, or the law.
        profile: the layers.
        likes: the matched selections, of this profile, in any order; the members of a family are in theirs.
        count: how many families; fewer come back where fewer exist.
        seed: of the randomness.
        options: of the selector, beside those in its key.

    Raises:
        InputError: those of `draws`; a selector that is no law or draws no families; no selection to match.
    """
    if isinstance(likes, Selection) or not isinstance(likes, Sequence):
        raise InputError(f"likes is a {type(likes).__name__}, and a list of selections is asked for")
    if not likes:
        raise InputError("a family is matched to at least one selection; likes is empty")
    chosen = _Question(selector, profile, None, list(likes), seed, options)
    law = chosen.selector
    if not isinstance(law, Law) or not law.nests:
        kinds = [cls for cls, _ in registry.of_kind("selector").values() if issubclass(cls, Law)]
        nesting = [cls.name for cls in kinds if cls.chains is not Law.chains]
        raise InputError(f"{law.key} draws no nested families; laws that can: {', '.join(nesting)}")
    chosen.expect_draws(count)
    found = chosen.ask(lambda s, p, b, rng, m: s.chains(p, m, rng, count), distinct=not chosen.shared, chain=True)
    return [list(family) for family in found]


def stream(key: str, seed: int, *likes: Selection) -> Random:
    """The random stream of a selector: `random.Random("<key>|<seed>|<layers_hash of the matched set>")`.

    A string seeds it through SHA-512, the same in every process and on every machine. The hashes of several
    matched sets are joined by commas, in the order given; nothing after the last bar where nothing is matched.
    """
    return Random(f"{key}|{seed}|{','.join(like.layers_hash for like in likes)}")


def matched_to(profile: Profile, like: Selection) -> MatchedTo:
    """What is recorded of a selection that is matched: its totals are the profile's, not those that its file states."""
    chosen = set(like.layers)
    rows = [layer for layer in profile.layers if layer.name in chosen]
    return MatchedTo(
        selector=like.selector,
        hash=like.layers_hash,
        layers=len(rows),
        parameters=sum(row.parameters for row in rows),
        bytes=sum(row.bytes for row in rows),
    )


class _Question:
    """A checked question to one selector; `likes` are the selections that it matches, none or one but for families."""

    def __init__(
        self,
        selector: str | Selector,
        profile: Profile,
        budget: Budget | str | None,
        likes: list[Selection],
        seed: int,
        options: dict[str, Any],
    ) -> None:
        if isinstance(selector, Selector) and options:
            raise InputError(f"options {', '.join(options)} beside a ready selector: set them when making it")
        _expect("profile", profile, Profile)
        if budget is not None:
            _expect("budget", budget, Budget, str)
        for like in likes:
            _expect("like", like, Selection)
        self.selector: Selector = registry.make("selector", selector, options)
        self.shared = isinstance(self.selector, Law) and self.selector.shared
        self.profile, self.likes, self.seed = profile, likes, seed
        self.budget = Budget.parse(budget) if isinstance(budget, str) else budget
        key = self.selector.key
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"seed {seed!r} of {key} is no integer")
        if not profile.layers:
            raise InputError(f"the profile of {profile.model} holds no layers")
        if not likes and self.selector.needs_like:
            raise InputError(f"{key} matches another selection: name its file with --like (like=… in Python)")
        for like in likes:
            self._check_like(key, like)
        self._check_budget(key)

    def expect_draws(self, count: int) -> None:
        """Refuse a selector with one answer, and fewer than one draw."""
        if not self.selector.random:
            raise InputError(f"{self.selector.key} is not random: it has one answer, and draws of it make no control")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"asked for {count} draws of {self.selector.key}; at least 1 is needed")
        if count > MOST_DRAWS:
            raise InputError(f"asked for {count} draws of {self.selector.key}; at most {MOST_DRAWS:,} are made")

    def _check_like(self, key: str, like: Selection) -> None:
        selector = self.selector
        if not (selector.needs_like or (selector.random and not isinstance(selector, RankingSelector))):
            raise InputError(f"{key} matches nothing: leave --like out, or use a selector that matches")
        self.profile.expect(like.model, like.fingerprint, "the selection to match (--like)")
        names = set(self.profile.names)
        for name in like.layers:
            if name not in names:
                raise InputError(
                    f"the selection to match (--like) holds layer {name!r}, which the profile of "
                    f"{self.profile.model} does not; {closest(name, names)}"
                )
        if not like.layers:
            raise InputError(f"the selection to match ({like.selector}) is empty: {key} has no target")

    def _check_budget(self, key: str) -> None:
        budget, selector = self.budget, self.selector
        for like in self.likes:
            if budget is not None and budget != like.budget:
                has = f"has budget {like.budget}" if like.budget is not None else "has no budget"
                raise InputError(
                    f"budget {budget}, but the selection to match ({like.selector}) {has}: leave --budget out"
                )
        if self.likes:
            return
        if not selector.needs_budget:
            self.budget = None
        elif budget is None:
            raise InputError(f"{key} needs a budget: layers=0.2, parameters=0.1 or bytes=512MiB")

    def ask(self, how: Any, *, distinct: bool = False, chain: bool = False) -> list[tuple[Selection, ...]]:
        """Put the question on a copy of the profile's list, and check what comes back: a list of families."""
        key = self.selector.key
        shown = self.profile.model_copy(update={"layers": list(self.profile.layers)})
        matched = [like.model_copy(update={"layers": list(like.layers)}) for like in self.likes]
        before = _signature(shown)
        rng = stream(key, self.seed, *([] if self.shared else self.likes))
        try:
            answers = how(self.selector, shown, self.budget, rng, matched)
        except ToolkitError:
            raise
        except Exception as error:  # a plug-in's own mistake
            reason = " ".join(str(error).split())[:200]
            raise RunError(f"selector {key} failed: {type(error).__name__}: {reason}") from error
        if _signature(shown) != before:
            raise InputError(f"{key} changed the profile that it was given; a selector only reads it")
        if any(copy.layers != like.layers for copy, like in zip(matched, self.likes, strict=True)):
            raise InputError(f"{key} changed the selection that it was to match; a selector only reads it")
        self.names = self.profile.names
        self.parameters = [layer.parameters for layer in self.profile.layers]
        self.bytes = [layer.bytes for layer in self.profile.layers]
        self.at = {name: index for index, name in enumerate(self.names)}
        self.totals = {"layers": len(self.profile), "parameters": self.profile.parameters, "bytes": self.profile.bytes}
        self.options = {name: _plain(value) for name, value in self.selector.options.items()}
        targets = [matched_to(self.profile, like) for like in self.likes] or [None]
        family = digest([to.hash for to in targets if to is not None]) if chain else None
        found = []
        for draw, answer in enumerate(answers):
            if len(answer) != len(targets):
                raise InputError(f"{key} drew {len(answer)} selections for {len(targets)} to match")
            found.append(tuple(self._record(*pair, draw, family) for pair in zip(answer, targets, strict=True)))
        if distinct and len({tuple(tuple(s.layers) for s in answer) for answer in found}) != len(found):
            raise InputError(f"{key} gave the same {'family' if chain else 'selection'} twice among its draws")
        return found

    def _record(self, answer: Pick | Sequence[str], to: MatchedTo | None, draw: int, family: str | None) -> Selection:
        key = self.selector.key
        pick = answer if isinstance(answer, Pick) else Pick(answer)
        indexes = sorted(_indexes(pick.layers, self.at, key, self.profile.model))
        if not indexes and (self.selector.needs_budget or to is not None):
            if self.budget is not None:
                raise nothing(self.profile, self.budget, key)
            raise InputError(f"{key} selects nothing")
        parameters = sum(map(self.parameters.__getitem__, indexes))
        mismatch = pick.mismatch
        if mismatch is None and to is not None:
            mismatch = (parameters - to.parameters) / to.parameters
        return Selection(
            selector=key,
            options=self.options,
            budget=self.budget,
            seed=self.seed if self.selector.random else None,
            model=self.profile.model,
            fingerprint=self.profile.fingerprint,
            layers=[self.names[i] for i in indexes],
            parameters=parameters,
            bytes=sum(map(self.bytes.__getitem__, indexes)),
            of=self.totals,
            matched_to=to,
            mismatch=mismatch,
            feasible_subsets=pick.feasible_subsets,
            inclusion=list(pick.inclusion) if pick.inclusion is not None else None,
            inclusion_draws=pick.inclusion_draws,
            single_total=pick.single_total,
            draw=draw if self.selector.random else None,
            chain=family,
        )


def _expect(what: str, given: Any, *kinds: type) -> None:
    """Refuse an argument of another type, such as a bare number as the budget or a file's name as the profile."""
    if not isinstance(given, kinds):
        hint = {"budget": "layers=0.2, parameters=0.1 or bytes=512MiB", "profile": "tk.profile(MODEL)"}
        asked = f"a {kinds[0].__name__}" + (f", such as {hint[what]}," if what in hint else "")
        raise InputError(f"{what} is {given!r:.60} ({type(given).__name__}), and {asked} is asked for")


def _indexes(layers: Sequence[str], at: dict[str, int], key: str, model: str) -> list[int]:
    """Positions of the named layers; each must exist, once."""
    if isinstance(layers, str):
        raise InputError(f"{key} answered with the text {layers!r}; a sequence of layer names is needed")
    names = list(layers)
    for name in names:
        if not isinstance(name, str) or name not in at:
            raise InputError(f"{key} chose layer {name!r}, which {model} does not have; {closest(str(name), at)}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{key} chose layer {twice!r} twice")
    return [at[name] for name in names]


def _signature(profile: Profile) -> tuple[Any, ...]:
    """What a selector could change in a profile: its list of (frozen) rows, their tables of errors, its statistics."""
    return (
        profile.model,
        profile.fingerprint,
        profile.blocks,
        [(id(row), *((k, id(e)) for k, e in row.error.items())) for row in profile.layers],
        [(key, tuple(statistic.values)) for key, statistic in (profile.statistics or {}).items()],
    )


def _plain(value: Any) -> Any:
    """An option's value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Decimal | PathLike):
        return str(value) if isinstance(value, Decimal) else fspath(value)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value
