"""What a results folder keeps of a study beside its runs: the study as declared, and the profiles of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.records.finetuning import FineTuning
from toolkit.records.profile import PROFILE, Profile
from toolkit.records.study import STUDY_COPY
from toolkit.runs.finetuning import plans
from toolkit.runs.finetuning.bench import say
from toolkit.runs.finetuning.data import encoded
from toolkit.runs.tasks import Split


def same_study(folder: Path, study: FineTuning) -> None:
    """Keep the study beside its results; what was declared before them cannot change after them.

    Raises:
        InputError: the results there are of another study or form, or were declared with another analysis.
    """
    path = folder / STUDY_COPY
    published = study.published
    if path.exists():
        old = FineTuning.load(path)
        for key in ("name", "form", "analysis", "repeats", "tune"):
            was, now = getattr(old, key), getattr(published, key)
            if was != now:
                raise InputError(
                    f"{folder} holds results that were declared with {key} {_plain(was)}, and the study now "
                    f"has {_plain(now)}: use --out for another folder"
                )
        if old == published:
            return
    published.save(path)


def profile_of(folder: Path, study: FineTuning, *, progress: bool = True) -> Profile:
    """The profile in the folder, where it is of this model and measured what is needed; else a new one.

    Raises:
        InputError: it is of other weights.
    """
    from toolkit.weights.profiling import fingerprint_of, profile

    path = folder / PROFILE
    wanted = plans.quantizers(study)
    if path.exists():
        kept = Profile.load(path)
        found = fingerprint_of(study.model)
        if found != kept.fingerprint:
            raise InputError(
                f"{folder} holds results on {kept.model} (weights {kept.fingerprint[:12]}), and the weights "
                f"of {study.model} are {found[:12]}: another model, or changed weights; use --out for "
                "another folder"
            )
        if set(wanted) <= set(kept.quantizers):
            return kept
        wanted = list(dict.fromkeys([*kept.quantizers, *wanted]))
    made = profile(study.model, wanted, progress=None if progress else False)
    made.save(path)
    return made


def calibrated_for(
    folder: Path, study: FineTuning, task: str, profile: Profile, train: Split, *, device: str
) -> Profile:
    """The profile with what selectors measure on the task's own training rows; the plain one where none does."""
    from toolkit.runs.calibration import asking, calibrated
    from toolkit.runs.models import load_tokenizer

    asked_for = asking(plans.selectors(study))
    if not asked_for:
        return profile
    path = folder / f"profile--{task}.json"
    if path.exists():
        kept = Profile.load(path)
        measured = {s.statistic_key for s in asked_for} <= set(kept.statistics or {})
        if measured and set(profile.quantizers) <= set(kept.quantizers):
            return kept
    count = max(
        choice.calibration_rows for arm in study.arms for _, choice in plans.choices(arm) if asking([choice.selector])
    )
    rows, _ = encoded(load_tokenizer(study.model), train.part(0, count), study.levers_of(task).length)
    say(f"measuring {', '.join(s.statistic_key for s in asked_for)} on {len(rows)} training rows of {task}")
    made = calibrated(
        profile,
        asked_for,
        model=study.model,
        encoded=rows,
        device=device,
        task=study.tasks[task].train or study.tasks[task].task,
        source=train.source,
    )
    made.save(path)
    return made


def _plain(value: Any) -> str:
    return str(value.model_dump(mode="json")) if hasattr(value, "model_dump") else repr(value)
