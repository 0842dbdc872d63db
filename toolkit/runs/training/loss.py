"""The completion-only loss, computed at the target tokens alone.

    L = Σ over target tokens of −log p(token | all before it) / N,    N: target tokens of the whole optimizer step

The output head sees only the hidden states that a target token follows: the other logits, most of a batch's memory,
have no part in the loss. Whatever the model does to its logits (scaling, capping) stays its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.runs.training.backward import bare_model
from toolkit.weights.layers import head_of


class TargetLoss:
    """Cross-entropy in float32 of a model's next-token logits at given positions, summed and divided by a count.

    Args:
        model: a causal language model, with or without adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        bare = bare_model(model)
        head = head_of(bare)
        self._positions: torch.Tensor | None = None
        self._chosen = False
        self._handle = None
        if head is not None:
            self._handle = bare.get_submodule(head).register_forward_pre_hook(self._choose)

    def _choose(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._positions is None or not args or args[0].ndim != 3:
            return None  # evaluation, or a head of another form: all logits, chosen from afterwards
        hidden = args[0]
        self._chosen = True
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._positions).unsqueeze(0), *args[1:])

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor], count: float) -> torch.Tensor:
        """The loss of one micro-batch, a scalar float32 whose sum over a step's micro-batches is the step's loss.

        Args:
            model: the same model, however it is wrapped.
            batch: of `toolkit.runs.training.batches.collate`.
            count: target tokens of the whole step.
        """
        self._positions, self._chosen = batch["positions"], False
        try:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        finally:
            self._positions = None
        logits = logits.reshape(-1, logits.shape[-1])
        if not self._chosen:
            logits = logits.index_select(0, batch["positions"])
        loss = nn.functional.cross_entropy(logits.float(), batch["targets"], reduction="sum")
        return loss / count

    def remove(self) -> None:
        """Take the hook off the model."""
        if self._handle is not None:
            self._handle.remove()
