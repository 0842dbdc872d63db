"""`train`: one fine-tuning run, from a built model to trained adapters and the course it took."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.errors import RunError
from toolkit.records.trained import Course, Flag
from toolkit.runs.progress import Progress
from toolkit.runs.provenance import out_of_memory
from toolkit.runs.training import checkpoints
from toolkit.runs.training.course import Clock, Curve, course, reaches
from toolkit.runs.training.deterministic import deterministic
from toolkit.runs.training.fair_trainer import trainer
from toolkit.runs.training.health import Unhealthy, flags_of
from toolkit.runs.training.pacing import Pacer, Pacing
from toolkit.runs.training.settings import fused
from toolkit.runs.training.watch import Watch

if TYPE_CHECKING:
    from torch import nn

    from toolkit.records.levers import Levers, Seeds
    from toolkit.runs.tasks.encoding import Encoded

SAVE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        course: what was done, and the losses.
        flags: health checks that did not pass; a fatal one ended the run.
        finished: all planned steps were done.
        curve: the file with one line a step.
        stopped: it ended early because it was asked to; the same call resumes it.
    """

    course: Course
    flags: list[Flag]
    finished: bool
    curve: Path
    stopped: bool = False


def train(
    model: nn.Module,
    data: Sequence[Encoded],
    levers: Levers,
    seeds: Seeds,
    *,
    folder: str | Path,
    pad: int,
    pacing: Pacing | None = None,
    report_to: Sequence[str] = (),
    progress: bool = True,
    name: str = "",
    save_steps: int | None = None,
    save_seconds: float = SAVE_SECONDS,
) -> Outcome:
    """Train a built model's adapters in place; go on from the folder's last checkpoint where there is one.

    Loss: −log p of the target tokens, summed over an optimizer step and divided by their number in it (AQLoRA §4:
    completion-only; gradients of micro-batches so add up to that of one large batch).

    A run that is killed at any moment goes on from its last checkpoint, on a CPU to the very same bits. Under
    `torchrun` or `accelerate launch` the processes share the micro-batches of each step, and the first one writes.

    Args:
        model: a built model with adapters, on its device; it comes back in evaluation mode.
        data: encoded examples in a fixed order.
        levers: what it is trained with; `length` and `rank` were used before.
        seeds: the data seed fixes the order.
        folder: of this run; the curve is written here, and checkpoints until it is finished.
        pad: id of the token that fills rows up.
        pacing: when to wait.
        report_to: trackers, by Trainer's names; none by default.
        progress: print step, loss, tokens a second and time left on stderr.
        name: of the run, for progress and trackers.
        save_steps, save_seconds: a checkpoint at least so often.

    Returns:
        The outcome; a run that went wrong (non-finite loss, no memory left, adapters that do not learn) is not
        finished and has a fatal flag.

    Raises:
        InputError: what cannot be trained as asked; the folder's checkpoint is of another run.
        RunError: a checkpoint or the curve cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the run's folder {folder}: {error.strerror or error}") from error
    with deterministic(levers.deterministic):
        made = trainer(model, data, levers, seeds, folder=folder, pad=pad, report_to=report_to, name=name)
        first = made.args.process_index == 0
        pacer = None if pacing is None else Pacer(pacing, str(made.args.device))
        resumed = checkpoints.latest(folder, made.identity)
        if resumed and not reaches(folder, resumed[1]["step"]):
            resumed = None  # its first steps are not known any more: they are done again
        path, saved = resumed if resumed else (None, None)
        position = saved["position"] if saved else {}
        step = saved["step"] if saved else 0
        clock = Clock(position.get("seconds", 0.0), position.get("paused", 0.0))
        curve = Curve(folder, step=step, written=first)
        shown = progress and first
        with Progress(len(made.plan.steps), done=step, shown=shown) as bar, made.ready():
            watch = Watch(
                made,
                curve,
                clock,
                pacer=pacer,
                save_steps=save_steps,
                save_seconds=save_seconds,
                resumed=position.get("resumed", 0) + (1 if saved else 0),
                progress=bar,
                name=name,
            )
            watch.begin(step)
            if saved:
                watch.restore(position)
            made.add_callback(watch)
            flags: list[Flag] = []
            try:
                made.train(resume_from_checkpoint=None if path is None else str(path))
            except Unhealthy as end:
                flags.append(end.flag)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                at = made.state.global_step + 1
                reason = f"out of memory at step {at}: {' '.join(str(error).split())[:200]}"
                flags.append(Flag(check="out-of-memory", severity="fatal", reason=reason, step=at))
            clock.stop()
            done = made.state.global_step
        if any(flag.check == "out-of-memory" for flag in flags):
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        result = course(
            made.plan,
            curve.losses,
            clock,
            steps=done,
            resumed=watch.resumed,
            lowest=made.lowest,
            scale=watch.scale,
            trainable=sum(p.numel() for p in made.trained),
            replayed=made.graphs.replayed if made.graphs is not None else 0,
        )
        waste = made.plan.waste(done)
        flags += flags_of(waste, is_fused=fused(made.args.device), not_graphed=made.not_graphed)
        finished = done == len(made.plan.steps) and not any(flag.severity == "fatal" for flag in flags)
        if first and not watch.stopped:
            checkpoints.remove(folder)
        made.model = made.model_wrapped = made.optimizer = made.graphs = None
        return Outcome(result, flags, finished, curve.path, watch.stopped)
