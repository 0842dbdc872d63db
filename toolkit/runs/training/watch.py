"""What happens after every step: the losses are looked at, checkpoints are written, and the run waits when asked to."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback

from toolkit.runs.progress import Progress, say
from toolkit.runs.training.course import Clock, Curve
from toolkit.runs.training.fair_trainer import FairTrainer
from toolkit.runs.training.health import (
    PATIENCE,
    SCALE_FLOOR,
    beginnings,
    check_gradients,
    check_moved,
    fatal,
    not_finite,
)
from toolkit.runs.training.pacing import Pacer
from toolkit.runs.training.settings import LOG


class Watch(TrainerCallback):
    """Looks at the losses every `LOG` steps, so that the device is waited for no more often than that.

    Args:
        trainer: watched.
        curve, clock: what is kept.
        pacer: or None.
        save_steps, save_seconds: a checkpoint at least so often; None: not by steps.
        shown: whether progress is printed.
    """

    def __init__(
        self,
        trainer: FairTrainer,
        curve: Curve,
        clock: Clock,
        *,
        pacer: Pacer | None,
        save_steps: int | None,
        save_seconds: float,
        resumed: int,
        progress: Progress,
        name: str,
    ) -> None:
        self.trainer, self.curve, self.clock, self.pacer = trainer, curve, clock, pacer
        self.resumed, self.stopped = resumed, False
        self.scale: float | None = None
        self._save_steps, self._save_seconds = save_steps, save_seconds
        self._saved, self._at_floor, self._updates = time.monotonic(), 0, 0
        self._progress, self._name, self._shown = progress, name, 0
        self._rates: list[float] = []
        self._several = trainer.args.world_size > 1
        self._starts = beginnings(trainer.model)  # a checkpoint's are loaded later
        self._began: tuple[float, int] | None = None
        trainer.position = lambda: {
            "seconds": clock.seconds,
            "paused": clock.paused,
            "resumed": self.resumed,
            "at_floor": self._at_floor,
            "updates": self._updates,
        }

    def restore(self, position: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self._at_floor, self._updates = position["at_floor"], position["updates"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock starts when everything is set up."""
        self.clock.start()
        self._began = (self.clock.seconds, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The rate that the step is done with."""
        self._rates.append(self.trainer._get_learning_rate())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first gradients."""
        if self._updates == 0:
            check_gradients(self.trainer.model, state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look, save, wait."""
        step = state.global_step
        last = step >= state.max_steps
        if self._updates < 2:
            self._first_updates(step, last)
        if step % LOG == 0 or last or (self._progress_due and not self._several):
            self.look()
        if last or (self._several and step % LOG and not self._by_steps(step)):
            return
        self._pace(control)
        if self._by_steps(step) or self.stopped or self._by_seconds():
            self.save()

    def _first_updates(self, step: int, last: bool) -> None:
        """Once two updates were done, or the only one, every adapter must have moved.

        Under a loss scale the fused optimizer skips steps by itself, and its own count tells how many were done.
        """
        if self._rates[-1] == 0:
            return
        if self.trainer.accelerator.scaler is None:
            self._updates += 1
        elif step % LOG == 0 or last:
            optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
            self._updates = min((int(state["step"]) for state in optimizer.state.values()), default=0)
        if self._updates >= 2 or (self._updates and last):
            self.look()
            check_moved(self.trainer.model, step, self._starts)
            self._starts = {}

    @property
    def _progress_due(self) -> bool:
        return self.trainer.args.device.type == "cpu"

    def _by_steps(self, step: int) -> bool:
        return self._save_steps is not None and step % self._save_steps == 0

    def _by_seconds(self) -> bool:
        return self._agreed(time.monotonic() - self._saved >= self._save_seconds)

    def _agreed(self, value: Any) -> Any:
        """The first process decides for all."""
        if self._several:
            box = [value]
            torch.distributed.broadcast_object_list(box, src=0)
            return box[0]
        return value

    def save(self) -> None:
        """Write a checkpoint, and the curve up to it."""
        self.look()
        self.clock.stop()
        self.trainer._save_checkpoint(self.trainer.model, None)
        self._saved = time.monotonic()
        self.clock.start()

    def look(self) -> None:
        """Take the losses since the last look; raise where one is not finite, or the scale stays at its floor."""
        trainer = self.trainer
        if not trainer.losses:
            return
        found = torch.stack([torch.stack(trainer.losses), torch.stack([n.float() for n in trainer.norms])])
        if self._several:
            losses = found[0].contiguous()
            torch.distributed.all_reduce(losses)  # each holds its share times the processes
            found[0] = losses / trainer.args.world_size
        losses, norms = found.tolist()
        trainer.losses.clear()
        trainer.norms.clear()
        first = trainer.state.global_step - len(losses) + 1
        scaler = trainer.accelerator.scaler
        seconds = round(self.clock.seconds, 3)
        rows = []
        for at, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            step = first + at
            rows.append([step, loss, self._rates[at], norm, trainer.plan.target[step - 1], seconds])
        self._rates = self._rates[len(losses) :]
        self.curve.add(rows)
        for row in rows:
            if row[1] - row[1] != 0 or (scaler is None and row[3] - row[3] != 0):
                raise not_finite(trainer, row[0], row[1])
        if scaler is not None:
            self.scale = scaler.get_scale()
            self._at_floor = self._at_floor + 1 if self.scale <= SCALE_FLOOR else 0
            if self._at_floor >= PATIENCE:
                raise fatal(
                    "loss-scale-at-floor",
                    f"the loss scale is {self.scale:g} at step {rows[-1][0]}, at its floor for {LOG * (PATIENCE - 1)} "
                    "steps or more: gradients leave float16's range; compute the protected layers in float32",
                    rows[-1][0],
                )
        self._tell(rows[-1][0], losses[-1])

    def _tell(self, step: int, loss: float) -> None:
        began, start = self._began or (0.0, 0)
        seconds = max(self.clock.seconds - began, 1e-9)
        speed = sum(self.trainer.plan.real[start:step]) / seconds
        name = f"{self._name}, " if self._name else ""
        self._progress.step(f"{name}loss {loss:.4f}, {speed:,.0f} tokens/s, step", step - self._shown)
        self._shown = step

    def begin(self, step: int) -> None:
        """Steps done before count as shown."""
        self._shown = step

    def _pace(self, control: Any) -> None:
        if self.pacer is None:
            return
        decided = self._agreed((self.pacer.ended, self.pacer.reason()) if self._first else None)
        ended, reason = decided
        if not ended and reason is None:
            return
        if not ended:
            self.save()
            self.clock.stop()
            since = time.monotonic()
            if self._first and self._progress.shown:
                say(f"{self._name or 'the run'} waits: {reason}")
            while not ended and reason is not None:
                time.sleep(self.pacer.pacing.poll)
                ended, reason = self._agreed((self.pacer.ended, self.pacer.reason()) if self._first else None)
            self.clock.paused += time.monotonic() - since
            self.clock.start()
        if ended:
            self.stopped = True
            control.should_training_stop = True

    @property
    def _first(self) -> bool:
        return self.trainer.args.process_index == 0
