"""`verify`: a certificate is refused where anything in it is not what the profile, the declaration and the seed give.

The most specific complaint comes first: a score that is no number, the profile, the declaration and its lock, the
arms, every draw and law, every number of the verdicts, and last the seal and the bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit import __version__
from toolkit.analysis.certificates import methods
from toolkit.analysis.certificates.agreement import TOLERANCE, Agreement, short
from toolkit.analysis.certificates.certifying import collected, evidence_of, scored
from toolkit.analysis.certificates.completeness import complaints as whole
from toolkit.analysis.certificates.draw_check import draw_complaints, law_complaints
from toolkit.analysis.certificates.regeneration import Regeneration
from toolkit.analysis.reading import reports
from toolkit.analysis.reading.missing import named
from toolkit.analysis.statistics.comparisons import LARGEST
from toolkit.analysis.statistics.verdicts import verdicts
from toolkit.errors import InputError
from toolkit.records.certificate import Certificate, CertifiedArm, CertifiedDraws, render, seal_of
from toolkit.records.io import read_bytes, read_json
from toolkit.records.lock import differences
from toolkit.records.report import REPORT, mask

SHOWN = 5


@dataclass(frozen=True)
class Verified:
    """A sound certificate, and what was checked.

    Attributes:
        certificate: with the verdicts as computed now; they are those stated but for what follows.
        arms, controls, draws: selections made again, and laws counted again.
        numbers: of the verdicts, computed again; `rounded` of them agree to within `TOLERANCE` only.
        reworded: sentences that another version of the toolkit worded otherwise.
        reports: reports that were compared; None where none were given.
    """

    certificate: Certificate
    arms: int
    controls: int
    draws: int
    numbers: int
    rounded: int
    reworded: int
    reports: int | None = None

    @property
    def text(self) -> str:
        """What was checked and what was not, the methods paragraph, the BibTeX entry and the identifier."""
        certificate, about = self.certificate, self.certificate.study
        exact = (
            "exactly" if not self.rounded else f"{self.rounded:,} of them to within {TOLERANCE:g}, the others exactly"
        )
        given = "not compared with its reports (--results FOLDER does that)"
        if self.reports is not None:
            given = f"{self.reports:,} reports have the hashes and the outcomes that it states"
        lines = [
            f"{methods.identifier(certificate)} is sound: study {about.name} on {certificate.profile.model}, "
            f"{methods.called(certificate)}",
            f"- {_count(self.arms, 'selection')} and {_count(self.draws, 'draw')} of "
            f"{_count(self.controls, 'control')} were made again from the profile and seed {about.seed}: each is the "
            "one certified, none is missing or additional",
            "- their laws were counted again: feasible subsets, inclusion probabilities and mismatch agree",
            f"- {self.numbers:,} numbers of the verdicts were computed again, and agree {exact}",
            *(
                [f"- {self.reworded:,} of the sentences are worded otherwise by this version, as below"]
                if self.reworded
                else []
            ),
            "- the file is byte for byte what was sealed",
            f"- {given}",
            "This does not show that the losses were measured as stated: for that, the study is run again.",
        ]
        lines += ["", methods.paragraph(certificate), "", methods.bibtex(certificate), ""]
        return "\n".join([*lines, methods.identifier(certificate)])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def verify(path: str | os.PathLike[str], results: str | os.PathLike[str] | None = None) -> Verified:
    """Make every selection and draw of a certificate again, and compute every number again; no model is needed.

    What this cannot show is that the losses were measured as stated: for that the study is run again. With
    `results`, they are compared with the reports.

    Args:
        path: the certificate.
        results: the study's results folder.

    Raises:
        InputError: the file is damaged, or anything in it was altered, left out or added: it is named.
    """
    certificate = Certificate.load(path)
    refusal = f"{path} is not sound"
    found = check(certificate, refusal)
    _sealed(path, refusal)
    if results is None:
        return found
    return Verified(**{**vars(found), "reports": _reported(certificate, results, refusal)})


def sealed(path: str | os.PathLike[str]) -> Certificate:
    """A certificate whose seal and bytes are sound; nothing of it is made or computed again.

    Raises:
        InputError: the file is damaged, or was edited after it was sealed.
    """
    certificate = Certificate.load(path)
    _sealed(path, f"{path} is not sound")
    return certificate


def check(certificate: Certificate, refusal: str) -> Verified:
    """Everything but the seal, the bytes and the reports.

    Raises:
        InputError: starting with `refusal`.
    """
    certified_with = str(certificate.provenance.get("certified_with"))
    same = certified_with == __version__
    numbers = Agreement(prose=not same)
    try:
        for complaints in (_finite(certificate), _profile(certificate), _declared(certificate)):
            _raise(refusal, complaints)
        made = Regeneration(certificate.study, certificate.profile, certificate.provenance.get("plugins"))
        for arm in certificate.arms:
            _raise(refusal, _arm(arm, made))
        draws = sum(_control(item, made, refusal) for item in certificate.controls)
        _raise(refusal, _locked(certificate))
        _raise(refusal, whole(certificate))
        computed = verdicts(evidence_of(certificate))
        _raise(refusal, numbers.differences(certificate.verdicts, computed, "verdicts"))
    except InputError as error:
        text = str(error) if str(error).startswith(refusal) else f"{refusal}: {error}"
        raise InputError(
            text if same else f"{text} (it was certified with toolkit {certified_with}, and this is {__version__})"
        ) from None
    return Verified(
        certificate.model_copy(update={"verdicts": computed}),
        arms=len(certificate.arms),
        controls=len(certificate.controls),
        draws=draws,
        numbers=numbers.count,
        rounded=numbers.rounded,
        reworded=numbers.reworded,
    )


def _raise(refusal: str, complaints: Iterator[str]) -> None:
    found = list(complaints)
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise InputError(f"{refusal}: " + "; ".join(found[:SHOWN]) + more)


def _finite(certificate: Certificate) -> Iterator[str]:
    """Scores that are no finite number, or too large to be compared."""
    for arm in certificate.arms:
        where = named(arm.arm, arm.budget)
        for text, value in arm.outcomes.items():
            if not abs(value) <= LARGEST:
                yield f"{where}: its outcome on {text} is {value}"
        for text, room in arm.headroom.items():
            for key in type(room).model_fields:
                bad = [at for at, value in enumerate(getattr(room, key)) if not abs(value) <= LARGEST]
                if bad:
                    yield f"{where}: number {bad[0]} of the {key} windows on {text} is {getattr(room, key)[bad[0]]}"
    for item in certificate.controls:
        where = named(item.arm, item.budget, item.control)
        for text, values in item.outcomes.items():
            for at, value in enumerate(values):
                if not abs(value) <= LARGEST:
                    yield f"draw {at} of {where}: its outcome on {text} is {value}"


def _profile(certificate: Certificate) -> Iterator[str]:
    try:
        found = certificate.profile.hash
    except ValueError:  # a number of it is not finite
        found = "not a number"
    if found != certificate.profile_hash:
        yield (
            f"the profile is not the one that the certificate was made with: its hash is {found[:12]}, and "
            f"{certificate.profile_hash[:12]} is stated"
        )


def _declared(certificate: Certificate) -> Iterator[str]:
    """Arms, controls and texts that the study does not declare, that stand twice, or that are left out."""
    study = certificate.study
    texts = set(study.texts)
    if set(certificate.texts) != texts:
        yield f"it is of texts {', '.join(certificate.texts)}, and the study declares {', '.join(study.texts)}"
    wanted = {named(a.label, str(b)) for a in study.arms for b in study.budgets}
    wanted |= {named(a, str(b), c.label) for c in study.controls for a in study.likes(c) for b in study.budgets}
    found: set[str] = set()
    items: list[CertifiedArm | CertifiedDraws] = [*certificate.arms, *certificate.controls]
    for item in items:
        where = named(item.arm, item.budget, getattr(item, "control", None))
        if where in found:
            yield f"{where} stands twice"
        elif where not in wanted:
            yield f"{where} is additional: the study declares no such thing"
        found.add(where)
        if set(item.outcomes) != set(certificate.texts):
            yield f"{where} has outcomes on {', '.join(item.outcomes) or 'no text'}, not on {', '.join(study.texts)}"
    missing = set(certificate.missing)
    # draws without their arm judge nothing: where the arm left no run, they are not certified either
    missing |= {
        named(a, str(b), c.label)
        for c in study.controls
        for a in study.likes(c)
        for b in study.budgets
        if named(a, str(b)) in missing
    }
    for where in sorted(wanted - found - missing):
        yield f"{where} is missing"
    if missing and not certificate.exploratory:
        yield f"it lacks {len(certificate.missing)} declared runs, and states no reason to be exploratory"


def _locked(certificate: Certificate) -> Iterator[str]:
    """What makes a certificate exploratory that it does not say."""
    if certificate.lock is None:
        if not certificate.exploratory:
            yield "it holds no lock, and states no reason to be exploratory"
        return
    texts = {name: text.sha256 for name, text in certificate.texts.items()}
    profile = certificate.profile
    for reason in differences(certificate.lock, certificate.study, profile.fingerprint, texts):
        if reason not in certificate.exploratory:
            yield reason


def _arm(arm: CertifiedArm, made: Regeneration) -> Iterator[str]:
    where = named(arm.arm, arm.budget)
    expected = made.arm(arm.arm, made.budgets[str(arm.budget)])
    facts = {
        "selector": expected.selector,
        "seed": expected.seed,
        "total_of": made.study.arm(arm.arm).total_of,
        "mask": mask(frozenset(expected.layers), made.profile.names),
        "hash": expected.layers_hash,
        "parameters": expected.parameters,
        "bytes": expected.bytes,
    }
    for key, value in facts.items():
        if getattr(arm, key) != value:
            yield (
                f"{where} was altered: its {key} is {short(getattr(arm, key))}, and the selector gives "
                f"{short(value)} from the profile"
            )
            return
    if scored(arm.hash, arm.outcomes, arm.headroom) != arm.scored:
        yield f"{where} was altered: its outcomes or scored windows are not those that its hash {arm.scored} tells of"


def _control(item: CertifiedDraws, made: Regeneration, refusal: str) -> int:
    """Check one control; how many draws it holds."""
    where = named(item.arm, item.budget, item.control)
    declared = next(c for c in made.study.controls if c.label == item.control)
    budget = made.budgets[str(item.budget)]
    for key, found, wanted in (("asked", item.asked, declared.draws), ("seed", item.seed, made.study.seed)):
        if found != wanted:
            raise InputError(f"{refusal}: {where} was altered: its {key} is {found}, and the study declares {wanted}")
    try:
        expected = made.draws(declared, item.arm, budget)
    except InputError as error:
        raise InputError(f"{refusal}: the draws of {where} cannot be made again: {error}") from None
    _raise(refusal, draw_complaints(item, [selection.layers_hash for selection in expected], where))
    like = made.arm(item.arm, budget)
    _raise(refusal, law_complaints(item, expected, like, declared, made, where))
    return len(item.hashes)


def _sealed(path: str | os.PathLike[str], refusal: str) -> None:
    """The seal is that of the content, and the file is byte for byte what `certify` writes of it."""
    content, data = read_bytes(path), read_json(path)
    try:
        seal, text = seal_of(data), render(data).encode()
    except ValueError as error:
        raise InputError(f"{refusal}: it holds a value that no certificate holds: {error}") from None
    if seal != data.get("seal"):
        raise InputError(
            f"{refusal}: it was edited after it was sealed: the seal of what it holds is {seal[:12]}, and "
            f"{str(data.get('seal'))[:12]} is stated"
        )
    if content != text:
        lines = zip(content.splitlines(keepends=True), text.splitlines(keepends=True), strict=False)
        line = next((at for at, (a, b) in enumerate(lines, 1) if a != b), "the last")
        raise InputError(
            f"{refusal}: its bytes were edited, although it still says the same: line {line} is not as "
            "`toolkit certify` writes it"
        )


def _reported(certificate: Certificate, given: str | os.PathLike[str], refusal: str) -> int:
    """Compare a certificate with the reports that it was made of: their hashes, and every outcome."""
    folder = reports.locate(given)
    there = {path.parent.name: path for path in sorted(folder.glob(f"*/{REPORT}"))}
    stated = certificate.reports
    complaints = [f"report {run} is missing in {folder}" for run in sorted(stated.keys() - there.keys())]
    complaints += [f"report {run} in {folder} is additional" for run in sorted(there.keys() - stated.keys())]
    for run, path in there.items():
        found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        if run in stated and found != stated[run]:
            complaints.append(f"report {run} in {folder} is another: SHA-256 {found[:12]}, and not the one certified")
    _raise(refusal, iter(complaints))
    again = collected(reports.read(folder), partial=True)
    numbers = Agreement()
    for key in ("profile", "texts", "lock", "exploratory", "missing", "settings", "arms", "controls"):
        a, b = certificate.model_dump(mode="json")[key], again.model_dump(mode="json")[key]
        _raise(refusal, (f"the reports in {folder} say otherwise: {c}" for c in numbers.differences(a, b, key)))
    return len(there)
