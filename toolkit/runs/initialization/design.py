"""From a study of starts to its runs and their plans; what cannot be run is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import math

from toolkit.errors import InputError
from toolkit.interfaces import Initializer
from toolkit.records.initialization import Initialization, StartArm
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.report import SIXTEEN_BIT
from toolkit.registry import registry
from toolkit.runs import started
from toolkit.selection.select import select


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: an arm at one scaling, or the 16-bit model (`arm` and `plan` are None).

    Attributes:
        scaling: None where it plays no part.
    """

    name: str
    arm: StartArm | None = None
    scaling: float | None = None
    plan: Plan | None = None


def check(study: Initialization) -> None:
    """Refuse a study that cannot be run, as far as that is known without its model.

    Raises:
        InputError: an unknown component, an initializer that needs calibration in a study without it, or a scaling
            that the scaler does not reach.
    """
    for key in study.activations:
        registry.make("quantizer", key)
    for arm in study.arms:
        registry.make("quantizer", arm.base)
        made: Initializer = registry.make("initializer", arm.initializer)
        if made.needs_calibration and study.calibration is None:
            raise InputError(
                f"arm {arm.name!r}: initializer {made.key} needs calibration; declare `calibration: {{text: …}}` on "
                "another text than those that the study evaluates on"
            )
        if arm.protect is not None:
            registry.make("selector", arm.protect.selector)
    for s in study.scalings:
        alpha_of(study, s)


def alpha_of(study: Initialization, scaling: float) -> float:
    """alpha = s/scaler(1, r): of a scaler that is proportional to alpha, the one that gives s.

    Raises:
        InputError: the scaler gives another factor for it.
    """
    scaler = registry.make("scaler", study.scaler)
    unit = scaler(1.0, study.rank)
    alpha = scaling / unit if unit else math.nan
    found = scaler(alpha, study.rank) if math.isfinite(alpha) else math.nan
    if not math.isclose(found, scaling, rel_tol=1e-9):
        raise InputError(
            f"scaler {scaler.key} at rank {study.rank} gives {found:g} where s = {scaling:g} is asked for: its factor "
            "is not proportional to alpha"
        )
    return alpha


def expand(study: Initialization, profile: Profile) -> list[Run]:
    """Every run, the 16-bit model first; an arm that starts plainly, Q(W) and B = 0, is one run for all scalings.

    Raises:
        InputError: two runs of one name; or a selector or budget that the profile does not fit.
    """
    runs = [Run(SIXTEEN_BIT)]
    for arm in study.arms:
        plain = registry.make("initializer", arm.initializer).plain
        for s in study.scalings[:1] if plain else study.scalings:
            name = arm.name if plain or len(study.scalings) == 1 else f"{arm.name}.s{s:g}"
            runs.append(Run(name, arm, None if plain else s, _plan(study, arm, profile, s)))
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two runs are called {name!r}: give an arm another name, or scalings of other digits")
    return runs


def _plan(study: Initialization, arm: StartArm, profile: Profile, scaling: float) -> Plan:
    protected = None
    if arm.protect is not None:
        protected = select(arm.protect.selector, profile, arm.protect.budget, seed=study.seed)
    made = Plan.protecting(
        protected,
        arm.base,
        rank=study.rank,
        alpha=alpha_of(study, scaling),
        scaler=study.scaler,
        initializer=arm.initializer,
    )
    return made.model_copy(update={"model": profile.model, "fingerprint": profile.fingerprint})


def expect(run: Run, profile: Profile) -> None:
    """Refuse what an initializer cannot do for a layer, before any weight is read.

    Raises:
        InputError: naming the layer, the initializer and the reason.
    """
    assert run.plan is not None
    try:
        started.check(
            {name: run.plan.of(name) for name in profile.names},
            {row.name: row.shape for row in profile.layers},
            folder=True,  # calibrated ones are made before they are read
        )
    except InputError as error:
        raise InputError(f"run {run.name}: {error}") from None


def enough_windows(study: Initialization, windows: dict[str, int]) -> None:
    """Refuse texts whose windows are fewer than a block of the bootstrap.

    Raises:
        InputError: names the text.
    """
    for name, count in windows.items():
        if count < study.analysis.block:
            raise InputError(
                f"text {name!r} has {count} windows, and analysis.block is {study.analysis.block}: ask for more tokens"
            )


def components(study: Initialization) -> list[tuple[str, str]]:
    """Kind and key of every component that the study names."""
    keys = [("quantizer", key) for key in [*[arm.base for arm in study.arms], *study.activations]]
    keys += [("initializer", arm.initializer) for arm in study.arms]
    keys += [("selector", arm.protect.selector) for arm in study.arms if arm.protect is not None]
    return [*keys, ("scaler", study.scaler)]
