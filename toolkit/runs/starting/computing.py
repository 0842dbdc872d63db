"""Starts of a plan's layers from the weights alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.records.plan import Plan
from toolkit.records.start import StartFile
from toolkit.runs import started
from toolkit.runs.progress import reporting
from toolkit.runs.starting.folder import Folder
from toolkit.runs.starting.sources import source_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.weights.reporting import Progress


def initialize(
    plan: Plan,
    model: str | os.PathLike[str] | nn.Module | None = None,
    out: str | os.PathLike[str] = "starts",
    *,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    beside: Path | None = None,
    progress: Progress | bool | None = None,
) -> StartFile:
    """Compute and write the start of every layer whose initializer is not plain; `build(..., start=out)` reads them.

    One layer is in memory at a time: a model that is named is read file by file, and never built. Each layer is written
    when it is done, the report `start.json` last; the same call goes on where an earlier one was cut short, and a
    finished folder is only read.

    Args:
        plan: what becomes of each layer.
        model: a Hugging Face id, a local directory, `demo`, or a dense model object (unchanged); None: the plan's.
        out: folder to write.
        seed: of the adapters.
        dtype: the compute dtype, which bases are decoded to; by default as `build` has it.
        device: to compute on; by default CUDA where there is one; a model object stays where it is.
        beside: a folder of folders of starts: layers that one of them holds, of the same decision and settings, are
            taken over from there.
        progress: a function, called with (layers done, layers in all, the last one's name); or False: silent. By
            default a bar with the time left on a terminal, and a line every half minute elsewhere.

    Raises:
        InputError: the plan does not fit the model, starts every layer plainly, or asks for calibration; an initializer
            cannot start a layer; or the folder holds something else. Layer and reason are named.
        RunError: the disk is full.
    """
    from toolkit.runs.provenance import Recorder, peak_memory, reset_memory

    source = source_of(plan, model, device=device, dtype=dtype, calibrated=False)
    settings = settings_of(source.asked, source.plan.fingerprint, seed, source.dtype, source.device)
    folder = Folder(out, settings, source.begun, beside)
    if folder.finished:
        return folder.report()
    folder.open(source.plan)
    recorder = Recorder(Path.cwd(), source.device, source.dtype, ignore=[folder.path])
    recorder.start()
    before, began = reset_memory(source.device), time.perf_counter()
    with reporting(progress, len(source.begun), f"starts of {source.model}") as report:
        for done, (name, layer) in enumerate(source.begun.items(), 1):
            if not folder.holds(name):
                weight = source.read(name).to(source.device)
                folder.put(name, *started.computed(name, layer, weight, source.dtype, seed))
                del weight
            report(done, len(source.begun), name)
    peak = peak_memory(source.device)
    return folder.close(
        list(source.begun),
        [],
        1.0,
        model=source.model,
        fingerprint=source.plan.fingerprint,
        reference=source.reference,
        plan=source.asked,
        seed=seed,
        dtype=str(source.dtype).removeprefix("torch."),
        seconds=round(time.perf_counter() - began, 3),
        peak_bytes=above(peak, before),
        provenance=recorder.finish(memory=peak),
    )


initialize_plan = initialize
"""Its name beside `toolkit.initialize`, which starts one weight."""


def settings_of(
    plan: str, fingerprint: str | None, seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    """What starts depend on: the plan, the weights, the seed, the dtype, the kind of device."""
    return {
        "plan": plan,
        "fingerprint": fingerprint,
        "seed": seed,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
    }


def above(peak: dict[str, int], before: dict[str, int]) -> int:
    """Bytes of the peak above what was in use before."""
    return max(0, peak.get("peak_allocated", peak.get("peak_resident", 0)) - next(iter(before.values())))
