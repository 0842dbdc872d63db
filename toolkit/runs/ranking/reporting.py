"""From a run and what it scored to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.report import Draw, Law, Provenance, Report, Rows, Text, mask
from toolkit.records.study import Study
from toolkit.registry import registry
from toolkit.runs.ranking import design, kept
from toolkit.runs.texts.evaluation import total
from toolkit.selection.laws import declared, expected


def masks(run: design.Run, profile: Profile) -> list[str]:
    """The sets that a run measures, as masks over the profile's layers."""
    names = profile.names
    return [mask(frozenset(selection.layers), names) for selection in run.selections]


def report(
    run: design.Run,
    outcomes: Sequence[kept.Outcome],
    *,
    study: Study,
    profile: Profile,
    texts: Mapping[str, Text],
    settings: str,
    lock: str | None,
    rows: Rows,
    provenance: Provenance,
    labels: Sequence[str] = (),
) -> Report:
    """The report of a finished run.

    Args:
        outcomes: one a selection.
        settings: hash of what fixes the numbers.
        lock: hash of the lock that the run was made under, or None.
        labels: what must be said beside those of the run.
    """
    first = run.selections[0]
    return Report(
        study=study.name,
        form=study.form,
        run=run.name,
        role=run.role,
        arm=run.arm,
        control=run.control,
        budget=run.budget,
        model=profile.model,
        fingerprint=profile.fingerprint,
        reference=profile.reference,
        settings=settings,
        lock=lock,
        seed=study.seed,
        plan=None if run.many else Plan.protecting(first, study.base, protect=study.protect),
        selection=None if run.many else first,
        law=law(run, profile) if run.role == "control" else None,
        layers=profile.names if run.many else None,
        labels=[*run.labels, *labels, *(["small form"] if study.form == "small" else [])],
        scores={} if run.many else {name: total(w) for name, w in outcomes[0].items()},
        draws=_draws(run, outcomes, profile) if run.many else [],
        texts=dict(texts),
        rows=rows,
        provenance=provenance,
    )


def law(run: design.Run, profile: Profile) -> Law:
    """What a control's draws come from."""
    first = run.selections[0]
    return Law(
        selector=first.selector,
        options=first.options,
        like=run.arm,
        chain=run.chain,
        feasible_subsets=first.feasible_subsets,
        inclusion=first.inclusion,
        inclusion_draws=first.inclusion_draws,
        expected=None if first.inclusion is None else expected(first.inclusion, profile),
        single_total=first.single_total,
        **declared(registry.make("selector", first.selector)),
    )


def _draws(run: design.Run, outcomes: Sequence[kept.Outcome], profile: Profile) -> list[Draw]:
    """A run's draws; the mismatch of a sweep's is 0, for nothing is matched."""
    target = run.like.parameters if run.like is not None else None
    draws = []
    for index, (selection, text, outcome) in enumerate(zip(run.selections, masks(run, profile), outcomes, strict=True)):
        mismatch = selection.mismatch
        if mismatch is None:
            mismatch = 0.0 if target is None else (selection.parameters - target) / target
        draws.append(
            Draw(
                index=index,
                mask=text,
                layers=len(selection.layers),
                parameters=selection.parameters,
                bytes=selection.bytes,
                mismatch=mismatch,
                scores={name: total(w) for name, w in outcome.items()},
            )
        )
    return draws
