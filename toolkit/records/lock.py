"""The lock file: a study's analysis, sealed before its first run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from toolkit.records.finetuning import Contrasts, FineTuning
from toolkit.records.initialization import Initialization, StartContrasts
from toolkit.records.io import File
from toolkit.records.study import Analysis, Study

LOCK = "lock.json"


class Lock(File):
    """What was declared, with which code, on which weights and texts, and when; `hash` is what reports carry.

    Attributes:
        analysis: of a controlled ablation, of a fine-tuning study, or of a study of starts.
        declaration: `Study.declaration` of the whole study, seeds, draws and arms included.
        code: what computes the results: versions, and a hash of the sources.
        texts: name → SHA-256 of the text; of a fine-tuning study, of each split of each task; of a study of starts,
            also of the text that is calibrated on.
        created: UTC, ISO 8601.
    """

    kind: Literal["lock"] = "lock"
    study: str
    form: Literal["full", "small"]
    analysis: Analysis | Contrasts | StartContrasts
    declaration: str
    code: dict[str, str]
    model: str
    fingerprint: str
    texts: dict[str, str] = Field(min_length=1)
    created: str


def differences(
    lock: Lock,
    study: Study | FineTuning | Initialization,
    fingerprint: str,
    texts: Mapping[str, str],
    code: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """What a lock declares otherwise than a study, weights, texts (name → SHA-256) and code, in words.

    The model's name is not compared, which the weights stand for; nor is code where None is given.
    """
    if (lock.study, lock.form) != (study.name, study.form):
        yield f"{LOCK} is of study {lock.study!r} ({lock.form} form), and this is {study.name!r} ({study.form} form)"
    if lock.analysis != study.analysis:
        old, new = lock.analysis.model_dump(mode="json"), study.analysis.model_dump(mode="json")
        changed = ", ".join(f"{k} was {old[k]!r} and is now {new[k]!r}" for k in old if old[k] != new[k])
        yield f"the analysis was changed after it was locked: {changed}"
    elif lock.declaration != study.declaration:
        yield (
            "the study was changed after it was locked (its arms, controls, texts, seed or settings): its declaration "
            f"has hash {study.declaration[:12]}, and {lock.declaration[:12]} was locked"
        )
    if lock.fingerprint != fingerprint:
        yield (
            f"the weights are not those that were locked: fingerprint {fingerprint[:12]}, and "
            f"{lock.fingerprint[:12]} ({lock.model}) was locked"
        )
    for name in sorted(lock.texts.keys() | texts.keys()):
        locked, found = lock.texts.get(name), texts.get(name)
        if locked is None:
            yield f"text {name!r} was not locked"
        elif found is None:
            yield f"text {name!r} was locked, and is not there"
        elif locked != found:
            yield f"text {name!r} is not the one that was locked: SHA-256 {found[:12]}, and {locked[:12]} was locked"
    if code is not None:
        for name in sorted(lock.code.keys() | code.keys()):
            was, now = lock.code.get(name, "absent"), code.get(name, "absent")
            if was != now:
                yield f"code {name!r} was {was[:12]} and is now {now[:12]}"
