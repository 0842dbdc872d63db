"""The starts of an arm's layers: made once a plan, kept beside the runs, read by every run of that plan.

results/starts/<digest>/start.json    what was done; layers/<layer>.safetensors beside it

A start is a function of the plan, the weights, the compute dtype, the kind of device and the calibration text, and not
of a run's seeds: where it adds nothing (B = 0), a run's A is its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.errors import InputError
from toolkit.records.initialization import CalibrationUse
from toolkit.records.io import digest
from toolkit.records.plan import Plan
from toolkit.records.start import StartFile
from toolkit.records.trained import Begun
from toolkit.runs import starts
from toolkit.runs.progress import say
from toolkit.runs.started import initializers

SEED = 0
"""Of what an initializer draws for itself: a start is the same for runs of every seed."""


def text_of(calibration: CalibrationUse | None) -> dict[str, str]:
    """Name → SHA-256 of the calibration text, as a lock names it; empty where there is none.

    Raises:
        InputError: it cannot be read.
    """
    if calibration is None:
        return {}
    from toolkit.runs.texts.documents import read_text

    return {"calibration": read_text(calibration.text).sha256}


def start_for(
    folder: Path,
    plan: Plan,
    *,
    model: str | os.PathLike[str],
    device: str,
    dtype: str,
    calibration: CalibrationUse | None = None,
    progress: bool = True,
) -> Path | None:
    """The folder of a plan's starts, made where it is not there whole; None where every layer starts plainly.

    What a killed process left of it is gone on with, and tensors that were kept apart from their report are made again.
    Without calibration, layers that another plan of the study starts alike, as another draw of a random selection does,
    are taken from its folder; a calibrated layer's start depends on all layers before it.

    Args:
        folder: of all starts of the study.
        plan: with the weights' fingerprint.

    Raises:
        InputError: an initializer that is calibrated, and no text; or what an initializer cannot do.
        RunError: the disk is full; or too many layers could not be started as asked for.
    """
    found = initializers(plan)
    if not found:
        return None
    calibrated = [each.key for each in found if each.needs_calibration]
    if calibrated and calibration is None:
        raise InputError(f"initializer {calibrated[0]} is calibrated: name a text under `calibration`")
    what: dict[str, object] = {"plan": plan.hash, "dtype": dtype, "device": device.partition(":")[0]}
    if calibrated and calibration is not None:
        what |= text_of(calibration) | {"windows": calibration.windows, "window": calibration.window}
    where = folder / digest(what)[:16]
    if starts.whole(where):
        return where
    say(f"starting layers by {', '.join(each.key for each in found)} ({where.name})")
    shown = None if progress else False
    if calibrated:
        from toolkit.runs.starting.calibrating import calibrate

        assert calibration is not None
        calibrate(
            plan,
            calibration.text,
            where,
            model=model,
            windows=calibration.windows,
            window=calibration.window,
            seed=SEED,
            device=device,
            dtype=dtype,
            progress=shown,
        )
    else:
        from toolkit.runs.starting.computing import initialize

        initialize(plan, model, where, seed=SEED, device=device, dtype=dtype, beside=folder, progress=shown)
    _free(device)
    return where


def _free(device: str) -> None:
    """Give back what the starts took on the device: the runs' memory is their own."""
    import gc

    import torch

    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def begun(folder: Path) -> Begun:
    """What a run's report says of its starts."""
    file = StartFile.load(folder / starts.REPORT)
    layers = list(file.layers.values())
    return Begun(
        folder=folder.name,
        base=file.base if any(each.base is not None for each in layers) else None,
        layers=len(layers),
        zero=_mean([each.residuals[0] for each in layers]),
        residual=_mean([each.residuals[each.kept] for each in layers]),
        changed=sum(each.kept > 0 for each in layers),
        calibration=None if file.calibration is None else file.calibration.sha256,
        fallbacks=starts.counts(file.layers),
    )


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 8)
