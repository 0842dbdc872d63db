"""What a results folder keeps of a study beside its runs: the study as declared, and the profiles of its model."""

from __future__ import annotations

from pathlib import Path

from toolkit.records.finetuning import FineTuning
from toolkit.records.profile import Profile
from toolkit.runs import results
from toolkit.runs.finetuning import plans
from toolkit.runs.finetuning.data import encoded
from toolkit.runs.progress import say
from toolkit.runs.tasks import Split


def same_study(folder: Path, study: FineTuning) -> None:
    """Keep the study beside its results, or refuse one that declares something else (`toolkit.runs.results`)."""
    results.same_study(folder, study.published, ("name", "form", "analysis", "repeats", "tune"))


def profile_of(folder: Path, study: FineTuning, *, progress: bool = True) -> Profile:
    """The profile of the study's model, with every quantizer that it needs (`toolkit.runs.results`).

    A folder stands by its name alone: where it lies is the machine's matter, and reports are published.
    """
    name = study.published.model if Path(study.model).is_dir() else None
    return results.profile_of(folder, study.model, plans.quantizers(study), name=name, progress=progress)


def calibrated_for(
    folder: Path, study: FineTuning, task: str, profile: Profile, train: Split, *, device: str
) -> Profile:
    """The profile with what selectors measure on the task's own training rows; the plain one where none does.

    One that is there is used where it was measured on these very rows.
    """
    from toolkit.runs.calibration import asking, calibrated, digest_of
    from toolkit.runs.models import load_tokenizer

    asked_for = asking(plans.selectors(study))
    if not asked_for:
        return profile
    path = folder / f"profile--{task}.json"
    count = plans.calibration_rows(study)
    rows, _ = encoded(load_tokenizer(study.model), train.part(0, count), study.levers_of(task).length)
    if path.exists():
        kept = Profile.load(path)
        found = [(kept.statistics or {}).get(s.statistic_key) for s in asked_for]
        on_these = all(one is not None and one.sha256 == digest_of(rows) for one in found)
        if on_these and set(profile.quantizers) <= set(kept.quantizers):
            return kept
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
