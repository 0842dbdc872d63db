"""The levers as Trainer's own settings."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments

from toolkit.errors import InputError, closest

if TYPE_CHECKING:
    from toolkit.records.levers import Levers, Seeds

LOG = 10
"""Steps between two looks at the losses, each of which waits for the device; trackers hear as often."""


def arguments(
    levers: Levers,
    seeds: Seeds,
    steps: int,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    report_to: Sequence[str] = (),
    name: str = "",
) -> TrainingArguments:
    """Trainer's own settings for the levers.

    Raises:
        InputError: an unknown tracker, or an accumulation that the number of processes does not divide.
    """
    trackers = _trackers(report_to)
    schedule = levers.schedule
    warmup = math.ceil(levers.warmup * steps)
    if schedule == "constant" and warmup:
        schedule = "constant_with_warmup"
    with _on(device):
        args = TrainingArguments(
            output_dir=str(folder),
            use_cpu=device.type == "cpu",
            max_steps=steps,
            per_device_train_batch_size=levers.batch,
            gradient_accumulation_steps=levers.accumulation,
            learning_rate=levers.learning_rate,
            lr_scheduler_type=schedule,
            warmup_steps=warmup,
            weight_decay=levers.weight_decay,
            max_grad_norm=levers.clip,
            optim="adamw_torch_fused" if fused(device) else "adamw_torch",
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16 and device.type == "cuda",  # the CPU has no loss scale in accelerate
            **_checkpointing(levers),
            seed=seeds.data,
            data_seed=seeds.data,
            save_strategy="no",
            logging_strategy="steps" if trackers else "no",
            logging_steps=LOG,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            remove_unused_columns=False,
            report_to=trackers or "none",
            run_name=name or None,
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,  # packed weights are buffers, alike in every process and never changed
        )
        args._n_gpu = min(args.n_gpu, 1)  # never torch's DataParallel: several devices are for several processes
    world = args.world_size
    if levers.accumulation % world:
        raise InputError(
            f"accumulation {levers.accumulation} does not divide among {world} processes; a step must hold the same "
            "examples on any number of them"
        )
    args.gradient_accumulation_steps = levers.accumulation // world
    return args


def _checkpointing(levers: Levers) -> dict[str, Any]:
    """Under the name that the installed transformers gives it."""
    if not levers.checkpointing:
        return {}
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}


def fused(device: torch.device) -> bool:
    """Whether AdamW has a fused kernel on the device."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Have accelerate choose the model's own device, where no launcher has chosen one."""
    import os

    if device.type != "cuda" or "LOCAL_RANK" in os.environ or "ACCELERATE_TORCH_DEVICE" in os.environ:
        yield
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"cuda:{device.index or 0}"
    try:
        yield
    finally:
        del os.environ["ACCELERATE_TORCH_DEVICE"]


def _trackers(names: Sequence[str]) -> list[str]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise InputError(f"report_to names {name!r}, which is no tracker; {closest(name, INTEGRATION_TO_CALLBACK)}")
    return list(names)
