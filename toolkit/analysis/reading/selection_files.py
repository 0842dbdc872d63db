"""A folder of selection files: arms, and the draws that belong to each under each law."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic_core
from pydantic import ValidationError

from toolkit.analysis.printing.entries import roles
from toolkit.analysis.reading.workers import shared_out
from toolkit.errors import InputError, closest
from toolkit.records.budget import Budget
from toolkit.records.io import read_bytes
from toolkit.records.report import Law
from toolkit.records.selection import Selection
from toolkit.records.study import slug
from toolkit.registry import registry
from toolkit.selection.laws import declared

SHARE = 2500
"""A worker is started for every so many selection files."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One selection file, cut down to what judging needs.

    Attributes:
        name: its path in the folder, without the ending.
        hash: `Selection.layers_hash`.
        layers: how many it holds; `roles`, of each role, where it is an arm.
        matched_to: the hash of the selection that it was matched to; None for an arm.
    """

    path: Path
    name: str
    hash: str
    selector: str
    options: dict[str, Any]
    budget: str | None
    seed: int | None
    model: str
    fingerprint: str
    layers: int
    roles: dict[str, int]
    parameters: int
    matched_to: str | None
    feasible_subsets: int | None
    inclusion: tuple[float, ...] | None
    inclusion_draws: int | None
    single_total: bool | None
    draw: int | None
    chain: str | None


@dataclass(frozen=True)
class Arm:
    """A selection that is judged, and the name that it has among the others."""

    label: str
    chosen: Chosen
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Group:
    """The draws of one law for one arm, in the order of their numbers."""

    control: str
    law: Law
    draws: tuple[Chosen, ...]


def read_selections(folder: str | os.PathLike[str]) -> list[Chosen]:
    """Every selection file in a folder and the folders in it, in the order of their paths.

    Raises:
        InputError: there is none, one is damaged or another kind of file, or they are of several models.
    """
    folder = Path(folder)
    if not folder.is_dir():
        near = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise InputError(f"no folder of selections at {folder}; {closest(folder.name, near)}")
    paths = sorted(p for p in folder.rglob("*.json") if not any(part.startswith(".") for part in p.parts))
    if not paths:
        raise InputError(
            f"{folder} holds no selection file (*.json); `toolkit select … --draws N -o FOLDER` writes them"
        )
    found = [
        replace(c, name=c.path.relative_to(folder).with_suffix("").as_posix())
        for c in shared_out(read, paths, share=SHARE)
    ]
    for what in ("fingerprint", "model"):
        counts = Counter(getattr(c, what) for c in found)
        usual = counts.most_common(1)[0][0]
        odd = [c for c in found if getattr(c, what) != usual]
        if odd:
            named = "; ".join(f"{c.path}: {getattr(c, what)[:40]!r}" for c in odd[:3])
            raise InputError(
                f"the selections are of different models: most have {what} {usual[:40]!r}; not so {named}"
                + (f"; and {len(odd) - 3} more" if len(odd) > 3 else "")
            )
    return found


def read(paths: list[Path]) -> list[Chosen]:
    """One `Chosen` a path; of what all draws of a law repeat, one copy is kept."""
    kept: dict[Any, Any] = {}
    found = []
    for path in paths:
        one = _read(path)
        found.append(
            replace(
                one,
                inclusion=kept.setdefault(one.inclusion, one.inclusion),
                options=kept.setdefault(repr(one.options), one.options),
            )
        )
    return found


def _read(path: Path) -> Chosen:
    content = read_bytes(path)
    try:
        record = Selection.model_validate(pydantic_core.from_json(content))
    except (ValidationError, ValueError, InputError):
        record = Selection.load(path)  # says what is wrong, or takes an integer of any length
    return Chosen(
        path=path,
        name=path.stem,
        hash=record.layers_hash,
        selector=record.selector,
        options=record.options,
        budget=None if record.budget is None else str(record.budget),
        seed=record.seed,
        model=record.model,
        fingerprint=record.fingerprint,
        layers=len(record.layers),
        roles=roles(record.layers) if record.matched_to is None else {},
        parameters=record.parameters,
        matched_to=None if record.matched_to is None else record.matched_to.hash,
        feasible_subsets=record.feasible_subsets,
        inclusion=None if record.inclusion is None else tuple(record.inclusion),
        inclusion_draws=record.inclusion_draws,
        single_total=record.single_total,
        draw=record.draw,
        chain=record.chain,
    )


def grouped(found: Sequence[Chosen]) -> list[Arm]:
    """Arms, in the order of their budgets, each with its draws.

    A selection that is matched to none is an arm. Draws of one selector, seed, family and arm are one control;
    draws of one selector that each have a seed of their own, as `tk.select(…, seed=s)` gives them, are one control
    too.

    Raises:
        InputError: no arm, no draw, a draw of an arm that is not there, a matched selection that is no random
            draw, or draws that are not numbered 0 … n − 1.
    """
    arms = [c for c in found if c.matched_to is None]
    if not arms:
        raise InputError("every selection is matched to another one: the selections that are judged are not there")
    by_hash: dict[str, list[Chosen]] = {}
    for arm in arms:
        by_hash.setdefault(arm.hash, []).append(arm)
    matched: dict[tuple[str, str, str], dict[int, list[Chosen]]] = {}
    for c in found:
        if c.matched_to is None:
            continue
        if c.matched_to not in by_hash:
            raise InputError(
                f"{c.path} is matched to selection {c.matched_to[:12]}, which is not there; there are "
                + ", ".join(f"{a.hash[:12]} ({a.name})" for a in arms[:8])
            )
        if c.seed is None:
            raise InputError(f"{c.path} is matched to another selection, and is no random draw: it has no seed")
        matched.setdefault((c.matched_to, c.selector, c.chain or ""), {}).setdefault(c.seed, []).append(c)
    if not matched:
        raise InputError("no selection is matched to another one: there are no draws that the arms are judged against")
    groups: dict[str, list[Group]] = {}
    several = _labels(matched)
    for key, by_seed in matched.items():
        for control, draws in _controls(key, by_seed, several):
            groups.setdefault(key[0], []).append(Group(control, _law(draws, key), tuple(draws)))
    names = _arm_labels(arms)
    made = [Arm(names[arm.name], arm, tuple(groups.get(arm.hash, ()))) for arm in arms]
    order = {budget: at for at, budget in enumerate(budgets(found))}
    return sorted(made, key=lambda arm: (order[arm.chosen.budget], arm.label))


def budgets(found: Sequence[Chosen]) -> list[str | None]:
    """The arms' budgets, by unit and then by amount."""
    seen = dict.fromkeys(c.budget for c in found if c.matched_to is None)

    def place(budget: str | None) -> tuple[str, Any]:
        if budget is None:
            return "", 0
        parsed = Budget.parse(budget)
        return parsed.unit, parsed.amount

    return sorted(seen, key=place)


def _arm_labels(arms: Sequence[Chosen]) -> dict[str, str]:
    """File → the arm's name: its selector, and the file where two arms of one budget share that."""
    shared = Counter((slug(arm.selector), arm.budget) for arm in arms)
    twice = {label for (label, _), count in shared.items() if count > 1}
    return {a.name: slug(a.selector) if slug(a.selector) not in twice else slug(a.name) for a in arms}


def _labels(matched: dict[tuple[str, str, str], dict[int, list[Chosen]]]) -> dict[tuple[str, str], bool]:
    """(arm, selector) → whether families and single draws of one law are both there."""
    chains = Counter((arm, selector) for arm, selector, _ in matched)
    return {key: count > 1 for key, count in chains.items()}


def _controls(
    key: tuple[str, str, str], by_seed: dict[int, list[Chosen]], several: dict[tuple[str, str], bool]
) -> list[tuple[str, list[Chosen]]]:
    """(control, draws in order) of one arm, selector and family."""
    arm, selector, chain = key
    label = slug(selector) + (f"+{chain[:8]}" if chain and several[arm, selector] else "")
    if all(len(draws) == 1 and draws[0].draw in (0, None) for draws in by_seed.values()):
        return [(label, [by_seed[seed][0] for seed in sorted(by_seed)])]
    found = []
    for seed, draws in sorted(by_seed.items()):
        draws = sorted(draws, key=lambda c: (c.draw is None, c.draw or 0, c.name))
        for number, c in enumerate(draws):
            if c.draw is not None and c.draw != number:
                of = f"of {selector} (seed {seed}) matched to {arm[:12]}"
                if c.draw < number:
                    raise InputError(f"draw {c.draw} {of} stands twice, as {draws[number - 1].path} and {c.path}")
                raise InputError(
                    f"draw {number} {of} is missing; draws are numbered from 0 on, and {c.path} is draw {c.draw}"
                )
        found.append((label if len(by_seed) == 1 else f"{label}@seed-{seed}", draws))
    return found


def _law(draws: Sequence[Chosen], key: tuple[str, str, str]) -> Law:
    """What the draws tell of their law; what it holds and whether it is shared, its component does."""
    one = draws[0]
    try:
        facts = declared(registry.make("selector", one.selector))
    except InputError:  # a plug-in that is not installed here: what its draws hold is not known
        facts = {}
    return Law(
        selector=one.selector,
        options=one.options,
        like=key[0][:12],
        chain=one.chain is not None or facts.get("shared", False),
        feasible_subsets=one.feasible_subsets,
        inclusion=None if one.inclusion is None else list(one.inclusion),
        inclusion_draws=one.inclusion_draws,
        single_total=one.single_total,
        **facts,
    )
