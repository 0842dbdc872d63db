"""`compare`: from somebody's selector to a certificate, in one call.

It writes the study that a careful author would have written, locks it, runs it, certifies it and says the verdict.
What it leaves is a results folder like any other: `toolkit table`, `figure` and `verify` read it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, closest
from toolkit.interfaces import Law, Selector
from toolkit.records.budget import Budget
from toolkit.records.certificate import Certificate
from toolkit.records.io import check_output, parse
from toolkit.records.profile import PROFILE, Profile
from toolkit.records.report import REPORT
from toolkit.records.study import DEMO_MODEL, Headroom, Study, slug
from toolkit.registry import registry
from toolkit.selection.select import draws as draw_of
from toolkit.selection.select import select

BUDGETS = ("layers=0.05", "layers=0.10", "layers=0.20")
"""AQLoRA's three budgets (§7.2)."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` made.

    Attributes:
        folder: the results, one folder a run.
        path: the certificate's file.
        sentences: the verdict on each text, in one sentence each.
        laws: what every law says of each text, in one sentence each, uncorrected.
    """

    folder: Path
    path: Path
    certificate: Certificate
    sentences: tuple[str, ...]
    laws: tuple[str, ...]


def compare(
    selector: str | Selector,
    model: str | os.PathLike[str] = DEMO_MODEL,
    *,
    budgets: Sequence[str | Budget] = BUDGETS,
    draws: int = 99,
    texts: Mapping[str, str] | Iterable[str] | None = None,
    tokens: int | None = 16384,
    window: int = 512,
    batch: int = 4,
    base: str = "nf4",
    level: float = 0.05,
    control: str | None = None,
    headroom: bool = True,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> Comparison:
    """Judge a selector against chance at the same memory, under every standard law, and certify the result.

    The claim is one a text: the selector's loss is lower than that of the declared law's draws, over all budgets
    together where there are several. The declared law is the one that holds the memory and nothing else, drawn as
    nested families; every other law's verdict stands beside it. Interrupted, the same call goes on where it stopped.

    Args:
        selector: a key such as `top-error`, or a selector of an installed or registered plug-in.
        model: a Hugging Face id, a local directory, or `demo`.
        budgets: of protected layers.
        draws: of each law; n draws give no p below 1/(n + 1).
        texts: name → source, or `[NAME=]SOURCE` items; by default the text that needs no network.
        tokens, window, batch: of each text, of a window, and windows a forward pass.
        base: quantizer key of the layers that are not protected.
        level: of the claims, after Holm's correction.
        control: key of the declared law, where it is to be another of the standard ones.
        headroom: also measure each layer alone, and the reference selections made from that; twice as many
            evaluations as the model has layers.
        seed: of the draws.
        out: folder for the results; by default `compare-SELECTOR` here.
        certificate: its file; by default `control.json` in that folder.
        device, dtype, progress: as `toolkit.runs.ranking.run`.

    Raises:
        InputError: the selector is random or matches another selection, or as `run` and `certify`.
    """
    from toolkit.analysis.certificates.certifying import certify
    from toolkit.runs.ranking import run
    from toolkit.runs.ranking.sealing import lock

    made: Selector = registry.make("selector", selector)
    if made.random or made.needs_like:
        raise InputError(f"{made.key} is chance itself: compare judges a selector that chooses; toolkit list selectors")
    folder = Path(out) if out is not None else Path(f"compare-{slug(made.key)}")
    if draws < 1:
        raise InputError(f"asked for {draws} draws of each law; at least 1 is needed")
    check_output(folder / PROFILE)
    limits = [b if isinstance(b, Budget) else Budget.parse(b) for b in ([budgets] if _one(budgets) else budgets)]
    declared = _declared(control)
    needed = [registry.make("quantizer", key).key for key in dict.fromkeys([base, *made.quantizers])]
    settings: dict[str, Any] = {"tokens": tokens, "window": window, "batch": batch, "base": base, "seed": seed}
    settings |= {"level": level, "headroom": Headroom() if headroom else None}
    declaration(made, os.fspath(model), limits, draws, [declared], declared, **settings)  # refused before any work
    laws = _with_draws(made, _profile(folder, model, needed, progress), limits, declared)
    study = declaration(made, os.fspath(model), limits, draws, laws, declared, **settings)
    path = Path(certificate) if certificate is not None else folder / "control.json"
    given = texts if texts is None or isinstance(texts, Mapping) else [str(texts)] if _one(texts) else list(texts)
    if not any(folder.glob(f"*/{REPORT}")):
        lock(study, out=folder, texts=given)
    run(study, out=folder, texts=given, device=device, dtype=dtype, progress=progress)
    found = certify(folder, path)
    laws = tuple(law["sentence"] for law in found.verdicts["laws"])
    return Comparison(folder, path, found, tuple(found.verdicts["sentences"]), laws)


def _one(given: Any) -> bool:
    """Whether one is given where several are asked for: a text is no list of its letters."""
    return isinstance(given, str | os.PathLike | Budget)


def _profile(folder: Path, model: str | os.PathLike[str], quantizers: list[str], progress: bool) -> Profile:
    """The profile of the model, in the folder's file, where `run` finds it."""
    from toolkit.weights.profiling import fingerprint_of, profile

    path = folder / PROFILE
    if path.exists():
        kept = Profile.load(path)
        if set(quantizers) <= set(kept.quantizers) and kept.fingerprint == fingerprint_of(model):
            return kept
        return profile(model, list(dict.fromkeys([*kept.quantizers, *quantizers])))  # `run` says what differs
    made = profile(model, quantizers, progress=None if progress else False)
    made.save(path)
    return made


def _declared(control: str | None) -> Law:
    """The law that is asked for, or the standard one that draws families and holds nothing but the memory."""
    laws = {law.key: law for law in standard_laws()}
    if control is None:
        return next(
            (law for law in laws.values() if law.nests and not law.shared and not law.holds), next(iter(laws.values()))
        )
    key = registry.make("selector", control).key
    if key not in laws:
        raise InputError(f"control {key!r} is no standard law; {closest(key, laws)}")
    return laws[key]


def _with_draws(selector: Selector, profile: Profile, budgets: Sequence[Budget], declared: Law) -> list[Law]:
    """The standard laws that have a draw for this selector at every budget.

    A law that holds more has no other set where the selector takes all that there is of a role or a third; it is
    left out, and said so. The declared one has to have draws.
    """
    arms = [select(selector, profile, budget) for budget in budgets]
    kept = []
    for law in standard_laws():
        try:
            for arm in arms:
                draw_of(law, profile, like=arm, count=1)
            kept.append(law)
        except InputError as error:
            if law.key == declared.key:
                raise
            print(f"note: {law.key} is left out: {error}", file=sys.stderr)
    return kept


def declaration(
    selector: Selector,
    model: str,
    budgets: Sequence[Budget],
    draws: int,
    laws: Sequence[Law],
    declared: Law,
    *,
    level: float,
    **settings: Any,
) -> Study:
    """The study that judges one selector under several laws, one of them declared; `settings` are fields of it.

    Raises:
        InputError: a value that no study has; its key is named.
    """
    several = len(budgets) > 1
    chains = {law.key: several and law.nests and (law.key == declared.key or law.shared) for law in laws}
    test = "joint" if chains[declared.key] else "each"
    data = {
        "name": f"compare-{slug(selector.key)}",
        "question": (
            f"Does protecting the layers that {selector.key} selects lower the loss more than protecting layers of the "
            "same memory that chance selects?"
        ),
        "model": model,
        "budgets": list(budgets),
        "arms": [{"selector": selector.key}],
        "controls": [{"selector": key, "draws": draws, "chain": chain} for key, chain in chains.items()],
        "analysis": {"control": slug(declared.key), "level": level, "test": test},
    }
    return parse(Study, data | settings, f"the comparison of {selector.key}", {})


def standard_laws() -> list[Law]:
    """Every installed law in the forms that belong to the standard set of controls, in the order of their names.

    Raises:
        InputError: no plug-in has one.
    """
    found = [law for cls, _ in registry.of_kind("selector").values() if issubclass(cls, Law) for law in cls.standard()]
    if not found:
        raise InputError("no installed plug-in has a law of chance that is a standard control; toolkit list selectors")
    return found
