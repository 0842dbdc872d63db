"""Checkpoints of a run: what is trained, the optimizer, the schedule, chance, and the place in the data.

A checkpoint is a folder that appears whole or not at all: it is written under another name, put on the disk, and
renamed. Tensors are safetensors and the rest is JSON; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from toolkit.errors import InputError, RunError

if TYPE_CHECKING:
    from toolkit.runs.training.fair_trainer import FairTrainer

PREFIX = "checkpoint-"
STATE = "state.json"
ADAPTERS = "adapters.safetensors"
OPTIMIZER = "optimizer.safetensors"
TRAINER = "trainer_state.json"


def save(trainer: FairTrainer, folder: Path) -> None:
    """Write a checkpoint of the step just done, then remove those before it.

    Raises:
        RunError: the disk is full or cannot be written; the checkpoints before it stay.
    """
    final = folder / f"{PREFIX}{trainer.state.global_step}"
    partial = final.with_name(f".{final.name}.partial")
    first, rank = trainer.args.process_index == 0, trainer.args.process_index
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _together(trainer)
        _write_chance(partial, rank)
        _together(trainer)
        if first:
            _write(trainer, partial)
            for path in [*partial.iterdir(), partial]:
                _flush(path)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            _flush(folder)
            for other in found(folder)[:-1]:
                shutil.rmtree(other, ignore_errors=True)
        _together(trainer)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"cannot write the checkpoint {final}: {getattr(error, 'strerror', None) or error}; those before it stay"
        ) from error


def _together(trainer: FairTrainer) -> None:
    if trainer.args.world_size > 1:
        torch.distributed.barrier()


def _flush(path: Path) -> None:
    """Onto the disk, so that a renamed folder is whole even after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def found(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the latest last; what a kill left half written is not among them."""
    numbers = {}
    for path in folder.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX)
        if number.isdigit() and path.is_dir():
            numbers[int(number)] = path
    return [numbers[step] for step in sorted(numbers)]


def latest(folder: Path, identity: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """The last checkpoint that can be read whole, and its state; None where there is none.

    Raises:
        InputError: it is of another run: other levers, seeds, data or adapters.
    """
    for path in reversed(found(folder)):
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            before, _, _ = state["identity"].get, state["position"].get, state["step"] + 1
            if any((path / name).stat().st_size != size for name, size in state["files"].items()):
                continue
            for name in (ADAPTERS, OPTIMIZER):
                with safe_open(path / name, "pt"):
                    pass
        except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError):
            continue
        for key, value in json.loads(json.dumps(identity)).items():
            if before(key) != value:
                raise InputError(
                    f"{path} is of a run with other {key} ({_short(before(key), value)}); "
                    "remove its folder to start anew, or give the run another one"
                )
        return path, state
    return None


def _short(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return f"{keys[0]}: {before.get(keys[0])!r}, and {now.get(keys[0])!r} now"
    return f"{before!r}, and {now!r} now"


def remove(folder: Path) -> None:
    """Remove every checkpoint and what a kill left of one."""
    for path in [*found(folder), *folder.glob(f".{PREFIX}*.partial")]:
        shutil.rmtree(path, ignore_errors=True)


def _write(trainer: FairTrainer, folder: Path) -> None:
    trained = {path: p.detach().cpu().contiguous() for path, p in trainer.model.named_parameters() if p.requires_grad}
    save_file(trained, folder / ADAPTERS)
    optimizer = trainer.optimizer.state_dict()
    tensors, plain = {}, {}
    for index, state in optimizer["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{key}"] = value.detach().cpu().contiguous()
            else:
                plain[f"{index}.{key}"] = value
    save_file(tensors, folder / OPTIMIZER)
    trainer.state.save_to_json(str(folder / TRAINER))
    scaler = trainer.accelerator.scaler
    state = {
        "step": trainer.state.global_step,
        "identity": trainer.identity,
        "position": trainer.position(),
        "groups": optimizer["param_groups"],
        "plain": plain,
        "schedule": trainer.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "files": {path.name: path.stat().st_size for path in folder.iterdir()},
    }
    (folder / STATE).write_text(json.dumps(state), encoding="utf-8")


def load_adapters(trainer: FairTrainer, folder: Path) -> None:
    """Put the checkpoint's values into the parameters that are trained."""
    stored = load_file(folder / ADAPTERS)
    with torch.no_grad():
        for path, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(stored[path])


def load_optimizer(trainer: FairTrainer, folder: Path) -> None:
    """Restore the optimizer, the schedule and the loss scale."""
    saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*load_file(folder / OPTIMIZER).items(), *saved["plain"].items()]:
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    trainer.optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
    trainer.lr_scheduler.load_state_dict(saved["schedule"])
    if saved["scaler"] and trainer.accelerator.scaler is not None:
        trainer.accelerator.scaler.load_state_dict(saved["scaler"])


def _write_chance(folder: Path, rank: int) -> None:
    tensors = {"cpu": torch.get_rng_state(), "numpy": torch.from_numpy(np.random.get_state()[1].copy())}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / f"chance-{rank}.safetensors")
    name, _, *rest = np.random.get_state()
    version, numbers, further = random.getstate()
    plain = {"numpy": [name, *rest], "python": [version, list(numbers), further]}
    (folder / f"chance-{rank}.json").write_text(json.dumps(plain), encoding="utf-8")


def load_chance(trainer: FairTrainer, folder: Path) -> None:
    """Restore the states of Python's, numpy's and torch's generators, of this process."""
    rank = trainer.args.process_index
    if not (folder / f"chance-{rank}.json").is_file():
        return  # resumed on more processes than before
    plain = json.loads((folder / f"chance-{rank}.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / f"chance-{rank}.safetensors")
    version, numbers, further = plain["python"]
    random.setstate((version, tuple(numbers), further))
    name, *rest = plain["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy(), *rest))
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
