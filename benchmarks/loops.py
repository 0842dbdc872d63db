"""A training loop as one writes it by hand, which our Trainer is held against, and NF4 layers as one puts them in.

No clipping, no schedule, no logging: a plain loop with a fused AdamW and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from toolkit.runs.timing.cycling import Ran, synchronize

RATE = 3e-4
"""Learning rate, of the loops and of ours."""


class Loop:
    """A training loop as one writes it by hand, over the list again and again; timed as our Trainer is."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[torch.Tensor],
        target: int,
        device: torch.device,
        autocast: bool,
    ) -> None:
        self._model, self._batches, self._device, self._autocast = model.train(), batches, device, autocast
        self._target = target
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=RATE, fused=True)
        self.steps = len(batches)

    def _step(self, batch: torch.Tensor) -> None:
        ids, last = batch.to(self._device, non_blocking=True), self._target
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=last + 1).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, -last:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def run(
        self,
        *,
        lead: int | None = None,
        seconds: float = 0.0,
        cycles: int = 1,
        begin: Callable[[], Any] | None = None,
        end: Callable[[], Any] | None = None,
    ) -> Ran:
        """As `toolkit.runs.timing.cycling.Driver.run`."""
        for at in range(self.steps if lead is None else lead):
            self._step(self._batches[at % self.steps])
        if begin is not None:
            begin()
        synchronize(self._device)
        started, done = time.perf_counter(), 0
        while done < cycles or time.perf_counter() - started < seconds:
            for batch in self._batches:
                self._step(batch)
            done += 1
        synchronize(self._device)
        ran = Ran(time.perf_counter() - started, done)
        if end is not None:
            end()
        return ran

    def close(self) -> None:
        """Nothing to undo."""


def to_nf4(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with bitsandbytes' layers in place of all projections, as its documentation does it.

    The layers are made without weights, which their constructor would draw on the host first (5 s for a billion, on
    one core), and the model's are quantized where they are.
    """
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name.endswith("lm_head"):
            continue
        layer = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=False,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
            device="meta",
        )
        weight = module.weight.detach()
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.to(device))
    model.is_loaded_in_4bit = True
    return model
