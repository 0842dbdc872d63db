"""`select` and `draws`: ask a selector, check the question and the answer, record where it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from decimal import Decimal
from os import PathLike, fspath
from random import Random
from typing import Any

from toolkit.errors import InputError, RunError, ToolkitError, closest
from toolkit.interfaces import Pick, RankingSelector, Selector
from toolkit.records.budget import Budget
from toolkit.records.profile import Profile
from toolkit.records.selection import MatchedTo, Selection
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

    The random stream is `stream(selector.key, seed, like)`, so that an answer is a pure function of its
    arguments, and `select(…, seed=s)` is the first of `draws(…, seed=s)`. Where a matched selector states no
    mismatch itself, that of the parameters is recorded.

    Raises:
        InputError: unknown selector or option, a missing or unfitting `like` or budget, a budget that selects
            nothing, scores that are no finite numbers, or a selector that names unknown layers, names one
            twice, or changes the profile.
    """
    chosen = _Question(selector, profile, budget, like, seed, options)
    return chosen.ask(lambda s, p, b, rng, m: [s.select(p, b, rng, m)])[0]


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

    A shorter list is the beginning of a longer one with the same seed. The other arguments and the errors
    are those of `select`.

    Raises:
        InputError: also where the selector is not random, or `count` is below 1.
    """
    chosen = _Question(selector, profile, budget, like, seed, options)
    if not chosen.selector.random:
        raise InputError(f"{chosen.selector.key} is not random: it has one answer, and draws of it make no control")
    if count < 1:
        raise InputError(f"asked for {count} draws of {chosen.selector.key}; at least 1 is needed")
    found = chosen.ask(lambda s, p, b, rng, m: s.draws(p, b, rng, m, count))
    if len({tuple(s.layers) for s in found}) != len(found):
        raise InputError(f"{chosen.selector.key} gave the same selection twice among its draws")
    return found


def stream(key: str, seed: int, like: Selection | None = None) -> Random:
    """The random stream of a selector: `random.Random("<key>|<seed>|<layers_hash of the matched set>")`.

    A string seeds it through SHA-512, the same in every process and on every machine. Nothing after the last
    bar where nothing is matched.
    """
    return Random(f"{key}|{seed}|{like.layers_hash if like is not None else ''}")


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
    """A checked question to one selector."""

    def __init__(
        self,
        selector: str | Selector,
        profile: Profile,
        budget: Budget | str | None,
        like: Selection | None,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        if isinstance(selector, Selector) and options:
            raise InputError(f"options {', '.join(options)} beside a ready selector: set them when making it")
        _expect("profile", profile, Profile)
        if budget is not None:
            _expect("budget", budget, Budget, str)
        if like is not None:
            _expect("like", like, Selection)
        self.selector: Selector = registry.make("selector", selector, options)
        self.profile, self.like, self.seed = profile, like, seed
        self.budget = Budget.parse(budget) if isinstance(budget, str) else budget
        key = self.selector.key
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"seed {seed!r} of {key} is no integer")
        if not profile.layers:
            raise InputError(f"the profile of {profile.model} holds no layers")
        self._check_like(key)
        self._check_budget(key)

    def _check_like(self, key: str) -> None:
        like, selector = self.like, self.selector
        if like is None:
            if selector.needs_like:
                raise InputError(f"{key} matches another selection: name its file with --like (like=… in Python)")
            return
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
        like, budget, selector = self.like, self.budget, self.selector
        if like is not None:
            if budget is not None and budget != like.budget:
                has = f"has budget {like.budget}" if like.budget is not None else "has no budget"
                raise InputError(
                    f"budget {budget}, but the selection to match ({like.selector}) {has}: leave --budget out"
                )
        elif not selector.needs_budget:
            self.budget = None
        elif budget is None:
            raise InputError(f"{key} needs a budget: layers=0.2, parameters=0.1 or bytes=512MiB")

    def ask(self, how: Any) -> list[Selection]:
        """Put the question on a copy of the profile's list, and check what comes back."""
        key = self.selector.key
        shown = self.profile.model_copy(update={"layers": list(self.profile.layers)})
        matched = self.like.model_copy(update={"layers": list(self.like.layers)}) if self.like else None
        before = _signature(shown)
        try:
            answers = how(self.selector, shown, self.budget, stream(key, self.seed, self.like), matched)
        except ToolkitError:
            raise
        except Exception as error:  # a plug-in's own mistake
            raise RunError(f"selector {key} failed: {type(error).__name__}: {error}") from error
        if _signature(shown) != before:
            raise InputError(f"{key} changed the profile that it was given; a selector only reads it")
        if matched is not None and self.like is not None and matched.layers != self.like.layers:
            raise InputError(f"{key} changed the selection that it was to match; a selector only reads it")
        self.names = self.profile.names
        self.parameters = [layer.parameters for layer in self.profile.layers]
        self.bytes = [layer.bytes for layer in self.profile.layers]
        at = {name: index for index, name in enumerate(self.names)}
        totals = {"layers": len(self.profile), "parameters": self.profile.parameters, "bytes": self.profile.bytes}
        to = None if self.like is None else matched_to(self.profile, self.like)
        options = {name: _plain(value) for name, value in self.selector.options.items()}
        return [self._record(answer, at, totals, to, options, key) for answer in answers]

    def _record(
        self,
        answer: Pick | Sequence[str],
        at: dict[str, int],
        totals: dict[str, int],
        to: MatchedTo | None,
        options: dict[str, Any],
        key: str,
    ) -> Selection:
        pick = answer if isinstance(answer, Pick) else Pick(answer)
        indexes = sorted(_indexes(pick.layers, at, key, self.profile.model))
        if not indexes and (self.selector.needs_budget or self.like is not None):
            if self.budget is not None:
                raise nothing(self.profile, self.budget, key)
            raise InputError(f"{key} selects nothing")
        parameters = sum(map(self.parameters.__getitem__, indexes))
        mismatch = pick.mismatch
        if mismatch is None and to is not None:
            mismatch = (parameters - to.parameters) / to.parameters
        return Selection(
            selector=key,
            options=options,
            budget=self.budget,
            seed=self.seed if self.selector.random else None,
            model=self.profile.model,
            fingerprint=self.profile.fingerprint,
            layers=[self.names[i] for i in indexes],
            parameters=parameters,
            bytes=sum(map(self.bytes.__getitem__, indexes)),
            of=totals,
            matched_to=to,
            mismatch=mismatch,
            feasible_subsets=pick.feasible_subsets,
            inclusion=list(pick.inclusion) if pick.inclusion is not None else None,
            single_total=pick.single_total,
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
    """What a selector could change in a profile: its list of (frozen) rows and their tables of errors."""
    return (
        profile.model,
        profile.fingerprint,
        profile.blocks,
        [(id(row), *((k, id(e)) for k, e in row.error.items())) for row in profile.layers],
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
