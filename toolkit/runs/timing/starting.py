"""From a study's file to a session's: what is timed is read and checked, and what is written is said."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError
from toolkit.records.declared import KINDS, kind_of
from toolkit.records.finetuning import FineTuning
from toolkit.records.session import TIMING, Session

if TYPE_CHECKING:
    import torch

    from toolkit.records.plan import Plan
    from toolkit.registry import Registry
    from toolkit.runs.asking import Asked

ALLOCATOR = "expandable_segments:True"
"""PyTorch's allocator grows its blocks in place, for every arm alike, as in the paper (AQLoRA §4)."""


def time(
    study: str | os.PathLike[str] | FineTuning,
    *,
    model: str | os.PathLike[str] | None = None,
    data: Mapping[str, str | os.PathLike[str]] | Iterable[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    small: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    arms: Sequence[str] | None = None,
    seed: int | None = None,
    beside_others: bool = False,
    progress: bool = True,
) -> Path:
    """Make one timing session of a fine-tuning study; its file.

    All timed arms, the baseline three times or more and the noisiest other arm twice, train on one fixed list of the
    task's batches, by the Trainer that trains them. In each round, in a random order, each goes through whole cycles
    of the list until `timing.seconds` have passed. Memory and a profile have passes of their own.

    Args:
        study: a study's folder or its `study.yaml`; or a FineTuning, and then `out` is needed.
        model, data, out, small, device, dtype: as for `toolkit.runs.finetuning.run`.
        arms: only these, and the baseline.
        seed: of the rounds' orders; a new one each time where it is left out. It is recorded.
        beside_others: time on a CPU that others keep busy; a label says so. A GPU that others use is never timed.
        progress: show on stderr what is done.

    Raises:
        InputError: the study, its model or its data cannot be used; too few rows for the list; arms that would need
            different lists; or the folder holds results of another study or other weights.
        RunError: another process computes on the device; or memory does not suffice (the arm is named).
    """
    from toolkit.runs import results
    from toolkit.runs.finetuning.asking import asked
    from toolkit.runs.models import choose_device, compute_dtype
    from toolkit.runs.timing.order import timed_arms

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("a timing session is one process on one device: start it without torchrun")
    if not isinstance(study, FineTuning) and (kind := kind_of(study)) != KINDS[1]:
        raise InputError(f"{study} is a study of kind {kind}, and sessions time the arms of one of kind {KINDS[1]}")
    what = asked(study, model=model, data=data, out=out, small=small)
    names = timed_arms(what.study, arms)
    target = choose_device(device)
    if target.type == "cuda":
        _allocator()
    with results.locked(what.folder):
        results.tidy(what.folder)
        return _session(what, names, target, compute_dtype(target, dtype), seed, beside_others, progress)


def _allocator() -> None:
    """The paper's allocator setting, unless another was chosen; it counts from the first CUDA tensor on."""
    if not any(os.environ.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = ALLOCATOR


def _session(
    what: Asked[FineTuning],
    names: list[str],
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    beside_others: bool,
    progress: bool,
) -> Path:
    import torch

    from toolkit.registry import registry
    from toolkit.runs.finetuning import kept
    from toolkit.runs.finetuning.data import encoded, read_rows
    from toolkit.runs.finetuning.plans import plan
    from toolkit.runs.finetuning.starting import start_for
    from toolkit.runs.models import load_tokenizer
    from toolkit.runs.progress import say
    from toolkit.runs.provenance import Recorder
    from toolkit.runs.starts import STARTS
    from toolkit.runs.tasks import padding
    from toolkit.runs.timing import machine, session
    from toolkit.runs.timing.batches import fixed, shared
    from toolkit.runs.timing.order import quantized_layers

    started = datetime.datetime.now(datetime.UTC)
    watch = machine.watch(device)
    watch.refuse(beside_others)  # before anything of ours is on the device
    watch.claim(lambda: torch.zeros(1, device=device))
    study, folder = what.study, what.folder
    task = study.timing.task or next(iter(study.tasks))
    levers = {name: study.levers_of(task, name) for name in names}
    common = shared(levers)
    read = read_rows(study, task).train
    kept.same_study(folder, study)
    profile = kept.profile_of(folder, study, progress=progress)
    profile = kept.calibrated_for(folder, study, task, profile, read, device=str(device))
    seeds = study.runs_of_an_arm[0]
    arms = {}
    for name in names:
        made = plan(study, name, profile, seeds, task=task)[0]
        start = start_for(
            folder.absolute() / STARTS,
            made,
            model=study.model,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            calibration=study.calibration,
            progress=progress,
        )
        arms[name] = session.Arm(name, made, levers[name], start)
    layers = [layer.name for layer in profile.layers]
    dense = {key for arm in arms.values() for key in _dense(arm.plan, registry)}
    tokenizer = load_tokenizer(study.model)
    rows, _ = encoded(tokenizer, read, common.length)
    batches = fixed(rows, common, study.timing.batches, seeds.data)
    with tempfile.TemporaryDirectory(prefix="toolkit-timing-") as scratch:
        bench = session.Bench(
            model=study.model,
            arms=arms,
            batches=batches,
            seeds=seeds,
            device=device,
            dtype=dtype,
            pad=padding(tokenizer),
            folder=Path(scratch),
        )
        timed = session.make(
            study,
            bench,
            task=task,
            fingerprint=profile.fingerprint,
            quantized={name: quantized_layers(arm.plan, layers, dense) for name, arm in arms.items()},
            watch=watch,
            recorder=Recorder(what.home, device, dtype, ignore=[folder]),
            seed=seed,
            earlier=[Session.load(path) for path in sorted((folder / TIMING).glob("*.json"))],
            name=_free_name(folder / TIMING, started),
            say=say if progress else (lambda text: None),
        )
    return timed.save(folder / TIMING / f"{timed.session}.json")


def _dense(plan: Plan, registry: Registry) -> set[str]:
    """The keys of a plan's quantizers that keep a 16-bit weight as it is."""
    import torch

    keys = {plan.default.quantizer, *(layer.quantizer for layer in plan.layers.values())}
    return {key for key in keys if registry.make("quantizer", key).keeps(torch.bfloat16)}


def _free_name(folder: Path, started: datetime.datetime) -> str:
    """The time of the start, UTC; with a number where another session began in the same second."""
    name = started.strftime("%Y%m%dT%H%M%SZ")
    taken = {path.stem for path in folder.glob("*.json")}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if n not in taken)
