"""`compare`: from somebody's selector to a certificate, in one call.

It writes the study that a careful author would have written, locks it, runs it, certifies it and says the verdict.
What it leaves is a results folder like any other: `toolkit table`, `figure` and `verify` read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, closest
from toolkit.interfaces import Law, Selector
from toolkit.records.budget import Budget
from toolkit.records.certificate import Certificate
from toolkit.records.report import REPORT
from toolkit.records.study import DEMO_MODEL, Analysis, Arm, Control, Headroom, Study, slug
from toolkit.registry import registry

BUDGETS = ("layers=0.05", "layers=0.10", "layers=0.20")
"""AQLoRA's three budgets (§7.2)."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` made.

    Attributes:
        folder: the results, one folder a run.
        path: the certificate's file.
        sentences: the verdict on each text, in one sentence each.
    """

    folder: Path
    path: Path
    certificate: Certificate
    sentences: tuple[str, ...]


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
        device, dtype, progress: as `toolkit.runs.runner.run`.

    Raises:
        InputError: the selector is random or matches another selection, or as `run` and `certify`.
    """
    from toolkit.analysis.certificates import certify
    from toolkit.runs.locking import lock
    from toolkit.runs.runner import run

    made: Selector = registry.make("selector", selector)
    if made.random or made.needs_like:
        raise InputError(f"{made.key} is chance itself: compare judges a selector that chooses; toolkit list selectors")
    study = declaration(
        made,
        os.fspath(model),
        budgets,
        draws,
        tokens=tokens,
        window=window,
        batch=batch,
        base=base,
        level=level,
        control=control,
        headroom=Headroom() if headroom else None,
        seed=seed,
    )
    folder = Path(out) if out is not None else Path(study.name)
    path = Path(certificate) if certificate is not None else folder / "control.json"
    given = texts if texts is None or isinstance(texts, Mapping) else list(texts)
    if not any(folder.glob(f"*/{REPORT}")):
        lock(study, out=folder, texts=given)
    run(study, out=folder, texts=given, device=device, dtype=dtype, progress=progress)
    found = certify(folder, path)
    return Comparison(folder, path, found, tuple(found.verdicts["sentences"]))


def declaration(
    selector: Selector,
    model: str,
    budgets: Sequence[str | Budget],
    draws: int,
    *,
    level: float,
    control: str | None = None,
    **settings: Any,
) -> Study:
    """The study that judges one selector under every standard law; `settings` are fields of the study.

    Raises:
        InputError: no law is installed, `control` is none of the standard ones, or a setting does not fit.
    """
    laws = {law.key: law for law in standard_laws()}
    if control is None:
        plain = [key for key, law in laws.items() if law.nests and not law.shared and not law.holds]
        control = next(iter([*plain, *laws]))
    key = registry.make("selector", control).key
    if key not in laws:
        raise InputError(f"control {key!r} is no standard law; {closest(key, laws)}")
    several = len(budgets) > 1
    controls = [
        Control(selector=name, draws=draws, chain=several and law.nests and (name == key or law.shared))
        for name, law in laws.items()
    ]
    declared = next(c for c in controls if c.selector == key)
    return Study(
        name=f"compare-{slug(selector.key)}",
        question=(
            f"Does protecting the layers that {selector.key} selects lower the loss more than protecting layers of the "
            "same memory that chance selects?"
        ),
        model=model,
        budgets=[b if isinstance(b, Budget) else Budget.parse(b) for b in budgets],
        arms=[Arm(selector=selector.key)],
        controls=controls,
        analysis=Analysis(control=declared.label, level=level, test="joint" if declared.chain else "each"),
        **settings,
    )


def standard_laws() -> list[Law]:
    """Every installed law in the forms that belong to the standard set of controls, in the order of their names.

    Raises:
        InputError: no plug-in has one.
    """
    found = [law for cls, _ in registry.of_kind("selector").values() if issubclass(cls, Law) for law in cls.standard()]
    if not found:
        raise InputError("no installed plug-in has a law of chance that is a standard control; toolkit list selectors")
    return found
