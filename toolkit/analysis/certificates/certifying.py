"""`certify`: a finished study as one file, which is verified before it is written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pydantic_core

from toolkit import __version__
from toolkit.analysis.certificates import locks
from toolkit.analysis.certificates.regeneration import plugins
from toolkit.analysis.reading import reports
from toolkit.analysis.reading.evidence import Chance, Evidence, Judged, Room
from toolkit.analysis.reading.kinds import SELECTIONS, kind_in
from toolkit.analysis.reading.missing import missing
from toolkit.analysis.reading.reports import Results
from toolkit.analysis.reading.study_evidence import evidence
from toolkit.analysis.reading.windows import expect_losses
from toolkit.analysis.statistics.verdicts import verdicts
from toolkit.errors import InputError
from toolkit.records.certificate import Certificate, CertifiedArm, CertifiedDraws, CertifiedRoom, tied
from toolkit.records.io import check_output, digest, read_bytes
from toolkit.records.lock import LOCK, Lock
from toolkit.records.profile import Profile
from toolkit.records.report import Law, mask, unmask


def certify(study: str | os.PathLike[str], out: str | os.PathLike[str], *, partial: bool = False) -> Certificate:
    """Write a study's certificate, after every draw was made again and every number computed again.

    Args:
        study: a study's folder, its `study.yaml`, or its results folder.
        out: the file.
        partial: also certify a study that lacks runs; it is exploratory, and the missing runs are its reason.

    Raises:
        InputError: it is a study of another kind; runs are missing (they are named), a report or the profile is
            damaged, or `verify` would refuse the certificate, because the draws are not those that the laws give.
    """
    from toolkit.analysis.certificates.verification import check

    check_output(out)
    if (kind := kind_in(study)) != SELECTIONS:
        raise InputError(f"{study} is a {kind} study; a certificate is of a study of selections")
    certificate = collected(reports.read(study), partial=partial)
    check(certificate, "the certificate of these results would not be sound, and was not written")
    certificate.save(out)
    return certificate


def collected(results: Results, *, partial: bool = False) -> Certificate:
    """The sealed certificate of a study's results; the draws are not made again here."""
    lost = missing(results)
    if lost and not partial:
        raise InputError(
            f"{results.folder} lacks {len(lost)} runs of the study: {_listed(lost)}. `toolkit run` makes them; "
            "--partial certifies without them, as exploratory"
        )
    profile = reports.profile_of(results)
    for run in [*results.arms.values(), *results.controls.values(), *results.oracles.values()]:
        if run.rows is not None:  # draws of several reports have none
            expect_losses(run, results.texts)
    found = evidence(results)
    hashes, heads = _read(results)
    status = locks.status(results)
    study = results.study.model_copy(
        update={"small": None, "texts": {name: Path(source).name for name, source in results.study.texts.items()}}
    )
    certificate = Certificate(
        study=study,
        profile=profile,
        profile_hash=profile.hash,
        texts=results.texts,
        lock=Lock.load(results.folder / LOCK) if status.hash is not None else None,
        exploratory=list(status.reasons),
        missing=lost,
        settings=results.settings,
        arms=[_arm(results, profile, judged) for judged in found.arms],
        controls=[
            _draws(results, profile, judged, chance, heads) for judged in found.arms for chance in judged.chances
        ],
        reports=hashes,
        provenance=_provenance(results, heads),
        verdicts={},
    )
    computed = verdicts(evidence_of(certificate))
    return certificate.model_copy(update={"verdicts": computed}).sealed()


def evidence_of(certificate: Certificate) -> Evidence:
    """What the verdicts of a certificate are computed from: its own numbers."""
    study = certificate.study
    drawn: dict[tuple[str, str | None], list[Chance]] = {}
    for item in certificate.controls:
        drawn.setdefault((item.arm, item.budget), []).append(
            Chance(
                control=item.control,
                law=item.law,
                asked=item.asked,
                mismatch=(item.mismatch["mean"], item.mismatch["largest"]),
                outcomes={text: np.asarray(values, dtype=np.float64) for text, values in item.outcomes.items()},
            )
        )
    return Evidence(
        texts=tuple(certificate.texts),
        budgets=tuple(str(budget) for budget in study.budgets),
        arms=tuple(
            Judged(
                arm=item.arm,
                budget=item.budget,
                selector=item.selector,
                parameters=item.parameters,
                outcomes=item.outcomes,
                chances=tuple(drawn.get((item.arm, item.budget), ())),
                headroom={text: _room(room) for text, room in item.headroom.items()},
            )
            for item in certificate.arms
        ),
        analysis=study.analysis,
        headroom=study.headroom,
    )


def _room(room: CertifiedRoom) -> Room:
    return Room(**{name: np.asarray(getattr(room, name), dtype=np.float64) for name in CertifiedRoom.model_fields})


def _listed(items: list[str], most: int = 5) -> str:
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _read(results: Results) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Run → SHA-256 of its report; and run → the report's law, seed and provenance."""
    hashes, heads = {}, {}
    for mark in results.marks:
        content, run = read_bytes(mark.path), mark.path.parent.name
        data = pydantic_core.from_json(content)
        hashes[run] = hashlib.sha256(content).hexdigest()
        heads[run] = {key: data.get(key) for key in ("law", "seed", "provenance")}
    return hashes, heads


def _arm(results: Results, profile: Profile, judged: Judged) -> CertifiedArm:
    run = results.arms[str(judged.budget), judged.arm]
    selection = run.selection
    assert selection is not None  # reports.read refuses an arm without one
    rooms = {text: certified_room(room) for text, room in judged.headroom.items()}
    return CertifiedArm(
        arm=judged.arm,
        budget=judged.budget,
        selector=selection.selector,
        seed=selection.seed,
        total_of=results.study.arm(judged.arm).total_of,
        mask=mask(frozenset(selection.layers), profile.names),
        hash=selection.layers_hash,
        parameters=selection.parameters,
        bytes=selection.bytes,
        outcomes=judged.outcomes,
        headroom=rooms,
        scored=scored(selection.layers_hash, judged.outcomes, rooms),
    )


def certified_room(room: Room) -> CertifiedRoom:
    """One text's scored windows as a record."""
    values = {name: getattr(room, name).tolist() for name in CertifiedRoom.model_fields}
    return CertifiedRoom.model_validate(values)  # tokens are whole numbers, also where an average gave them


def scored(layers: str, outcomes: Mapping[str, float], rooms: Mapping[str, CertifiedRoom]) -> str:
    """The hash that ties an arm's layers to its outcomes and its scored windows."""
    return tied(layers, dict(outcomes), {text: room.model_dump(mode="json") for text, room in rooms.items()})


def _draws(
    results: Results, profile: Profile, judged: Judged, chance: Chance, heads: Mapping[str, Mapping[str, Any]]
) -> CertifiedDraws:
    run = results.controls[str(judged.budget), judged.arm, chance.control]
    head = heads[run.path.parent.name]
    law = Law.model_validate(head["law"])
    assert run.draws is not None  # reports.read refuses a control without draws
    names = profile.names
    layers = [digest([profile.fingerprint, unmask(text, names)]) for text in run.draws.masks.split()]
    outcomes = {text: values.tolist() for text, values in chance.outcomes.items()}
    return CertifiedDraws(
        control=chance.control,
        arm=judged.arm,
        budget=judged.budget,
        law=law,
        seed=head["seed"],
        family=results.budgets if law.chain else None,
        asked=chance.asked,
        mismatch={"mean": chance.mismatch[0], "largest": chance.mismatch[1]},
        hashes=drawn_hashes(layers, outcomes),
        outcomes=outcomes,
    )


def drawn_hashes(layers: list[str], outcomes: Mapping[str, list[float]]) -> list[str]:
    """The hash that ties each draw's layers to its outcomes."""
    return [tied(one, {text: values[at] for text, values in outcomes.items()}) for at, one in enumerate(layers)]


def _provenance(results: Results, heads: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """With what, where and when the runs were made: one value where all agree, else all of them; and the plug-ins."""
    runs = [head["provenance"] for head in heads.values()]
    found: dict[str, Any] = {}
    for key in ("toolkit", "python", "packages", "device", "compute_dtype", "commit", "dirty"):
        values = {digest(run.get(key)): run.get(key) for run in runs}
        seen = [values[name] for name in sorted(values)]
        if seen != [None]:
            found[key] = seen[0] if len(seen) == 1 else seen
    started = sorted(str(run["started"]) for run in runs)
    return found | {
        "started": {"first": started[0], "last": started[-1]},
        "certified_with": __version__,
        "plugins": plugins(results.study),
    }
