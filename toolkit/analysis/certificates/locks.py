"""Whether results are confirmatory: made under an analysis sealed before the first run, and not changed since."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.analysis.reading.missing import missing
from toolkit.errors import InputError
from toolkit.records.lock import LOCK, Lock, differences

if TYPE_CHECKING:
    from toolkit.analysis.reading.reports import Mark, Results
    from toolkit.records.finetuning import FineTuning
    from toolkit.records.initialization import Initialization
    from toolkit.records.study import Study


@dataclass(frozen=True)
class Status:
    """Confirmatory, or exploratory for these reasons.

    Attributes:
        reasons: one sentence part each; empty where the results are confirmatory.
        hash: of the lock file; None where there is none, or none that can be read.
    """

    confirmatory: bool
    reasons: tuple[str, ...]
    hash: str | None


def standing(exploratory: Iterable[str], descriptive: bool) -> str:
    """`exploratory`, `descriptive` (locked, with too few draws for the level) or `confirmatory`."""
    return "exploratory" if list(exploratory) else "descriptive" if descriptive else "confirmatory"


def status(results: Results) -> Status:
    """Whether a study's results are confirmatory, from the files in its folder alone.

    They are where the lock file beside them declares this very study (analysis, declaration, form), of these
    weights and texts, was written before the first run started, every report carries its hash, and every declared run
    is there.
    """
    hashes = {name: text.sha256 for name, text in results.texts.items()}
    return judged(results.folder, results.study, results.fingerprint, hashes, results.marks, missing(results))


def judged(
    folder: Path,
    study: Study | FineTuning | Initialization,
    fingerprint: str,
    texts: Mapping[str, str],
    marks: Sequence[Mark],
    lost: Sequence[str],
) -> Status:
    """As `status`, of a study of any kind.

    Args:
        folder: of the results.
        texts: name → SHA-256 of what the reports tell of.
        marks: one a report.
        lost: declared runs that are missing, in words.
    """
    path = folder / LOCK
    carried = [mark for mark in marks if mark.lock is not None]
    if not path.exists():
        reason = f"there is no {LOCK}: the analysis was not locked before the first run (toolkit lock STUDY)"
        if carried:
            reason = f"{LOCK} is missing, although {_some(carried, len(marks))} {_carry(carried)} the hash of a lock"
        return Status(False, (reason,), None)
    try:
        lock = Lock.load(path)
    except InputError as error:
        return Status(False, ("the lock is damaged: " + str(error).replace(str(path), LOCK),), None)
    found = lock.hash
    reasons = [
        *differences(lock, study, fingerprint, texts),
        *_carried(found, marks),
        *_younger(lock, marks),
        *_incomplete(lost),
    ]
    return Status(not reasons, tuple(reasons), found)


def _incomplete(lost: Sequence[str]) -> Iterator[str]:
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        yield f"the study is incomplete: {len(lost)} of its runs are missing ({', '.join(lost[:5])}{more})"


def _carried(lock: str, marks: Iterable[Mark]) -> Iterator[str]:
    """Reports that were not made under this lock."""
    marks = list(marks)
    without = [mark for mark in marks if mark.lock is None]
    if without:
        yield f"{_some(without, len(marks))} {_carry(without)} no lock"
    other = [mark for mark in marks if mark.lock not in (None, lock)]
    if other:
        seen = Counter(str(mark.lock)[:12] for mark in other)
        yield (
            f"{_some(other, len(marks))} {_carry(other)} another lock ({', '.join(sorted(seen)[:3])}; {LOCK} has "
            f"{lock[:12]})"
        )


def _younger(lock: Lock, marks: Iterable[Mark]) -> Iterator[str]:
    """A lock that was written after a run had started. Runs record whole seconds, and so does the comparison."""
    try:
        created = _time(lock.created).replace(microsecond=0)
    except ValueError:
        yield f"{LOCK} does not say when it was made: created is {lock.created!r}"
        return
    marks = list(marks)
    early, undated = [], []
    for mark in marks:
        try:
            started = _time(mark.started)
        except ValueError:
            undated.append(mark)
            continue
        if started < created:
            early.append((started, mark))
    if undated:
        yield f"{_some(undated, len(marks))} {'do' if len(undated) > 1 else 'does'} not say when the run started"
    if early:
        first = min(early, key=lambda item: (item[0], str(item[1].path)))[1]
        yield (
            f"the lock is younger than the first run: made {lock.created}, and {_place(first)} started {first.started}"
        )


def _time(text: str | None) -> datetime.datetime:
    """A moment in UTC; one without a zone is taken for UTC. A ValueError where it is none."""
    if text is None:
        raise ValueError("no moment")
    moment = datetime.datetime.fromisoformat(text)
    return moment.replace(tzinfo=datetime.UTC) if moment.tzinfo is None else moment.astimezone(datetime.UTC)


def _some(marks: list[Mark], of: int) -> str:
    """How many reports, and the first of them."""
    first = min(marks, key=lambda mark: str(mark.path))
    return f"{len(marks)} of {of} reports (the first is {_place(first)})"


def _carry(marks: list[Mark]) -> str:
    return "carries" if len(marks) == 1 else "carry"


def _place(mark: Mark) -> str:
    """A report's run and file, without the folders above."""
    return f"{mark.path.parent.name}/{mark.path.name}"
