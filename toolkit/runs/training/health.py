"""Health checks: what ends a bad run, with a clear reason, and what is flagged in its report."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.records.trained import Flag
from toolkit.runs.frozen import FrozenLinear
from toolkit.runs.training.batches import collate

if TYPE_CHECKING:
    from toolkit.runs.training.fair_trainer import FairTrainer

PADDING = 0.25
"""Share of padding in the computed tokens from which it is flagged; ours."""

SCALE_FLOOR = 1.0
"""A loss scale that is no larger does not protect small gradients: float16's own range is exceeded. Ours."""

PATIENCE = 2
"""Looks in a row, `settings.LOG` steps apart, that find the scale at its floor before the run ends."""


class Unhealthy(Exception):
    """Ends a run; holds the flag."""

    def __init__(self, flag: Flag) -> None:
        super().__init__(flag.reason)
        self.flag = flag


def fatal(check: str, reason: str, step: int | None = None, layer: str | None = None) -> Unhealthy:
    """What ends a run."""
    return Unhealthy(Flag(check=check, severity="fatal", reason=reason, step=step, layer=layer))


def check_gradients(model: nn.Module, step: int) -> None:
    """Before the first update: every adapter has a gradient, and B's is not zero (A's is, while B is zero).

    Raises:
        Unhealthy: it names the adapters.
    """
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    without = [path for path, p in trained.items() if p.grad is None]
    if without:
        raise fatal("no-gradient", f"{_named(without)} received no gradient at step {step}", step, _layer(without[0]))
    chosen = [path for path in trained if _is_b(path)] or list(trained)
    sizes = torch.stack([trained[path].grad.abs().amax().float() for path in chosen])
    empty = [path for path, size in zip(chosen, sizes.tolist(), strict=True) if size == 0]
    if empty:
        raise fatal("zero-gradient", f"the gradient of {_named(empty)} is zero at step {step}", step, _layer(empty[0]))


def beginnings(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameter path → a copy on the CPU of every B that does not start at zero, for `check_moved`."""
    found = {path: p.detach() for path, p in model.named_parameters() if p.requires_grad and _is_b(path)}
    return {path: p.to("cpu", copy=True) for path, p in found.items() if bool(p.any())}


def check_moved(model: nn.Module, step: int, began: Mapping[str, torch.Tensor]) -> None:
    """After the first updates: no B is still as it started, zero or, under an initializer that fits one, another.

    Args:
        began: `beginnings` of the model before its first update.

    Raises:
        Unhealthy: it names the adapters.
    """
    held = {path: p.detach() for path, p in model.named_parameters() if p.requires_grad and _is_b(path)}
    zero = {path: p for path, p in held.items() if path not in began}
    if zero:
        sizes = torch.stack([p.abs().amax().float() for p in zero.values()]).tolist()
        still = [path for path, size in zip(zero, sizes, strict=True) if size == 0]
        if still:
            raise fatal("adapter-still-zero", f"{_named(still)} still zero after step {step}", step, _layer(still[0]))
    still = [path for path, start in began.items() if path in held and torch.equal(held[path].cpu(), start)]
    if still:
        reason = f"{_named(still)} still as {'it' if len(still) == 1 else 'they'} started after step {step}"
        raise fatal("adapter-did-not-move", reason, step, _layer(still[0]))


def _is_b(path: str) -> bool:
    return "lora_B" in path.split(".")


def _named(paths: list[str]) -> str:
    shown = ", ".join(_layer(path) for path in paths[:3])
    verb = "adapter of " if len(paths) == 1 else f"{len(paths)} adapters, of "
    return verb + shown + (", …" if len(paths) > 3 else "")


def _layer(path: str) -> str:
    """The layer's name in the model that transformers builds, from the path of its adapter's parameter."""
    return bare(path).partition(".lora_")[0]


def bare(path: str) -> str:
    """A module path without what PEFT puts around the model and its layers."""
    path = path.removeprefix("module.").removeprefix("base_model.model.")
    return ".".join(part for part in path.split(".") if part != "base_layer")


def not_finite(trainer: FairTrainer, step: int, loss: float) -> Unhealthy:
    """The end of a run whose loss or gradient is not finite: at which step, and from which layer on.

    The step's micro-batches are computed again, with what the run had learned before it.

    Args:
        step: the first that was not finite, counted from 1.
        loss: its loss.
    """
    layer, where = locate(trainer, step)
    what = "the gradient's norm" if _finite(loss) else f"the loss ({loss})"
    found = f"; first in the {where} of {layer}" if layer else "; its layer was not found again"
    return fatal("non-finite-loss", f"{what} is not finite at step {step}{found}", step, layer)


def _finite(number: float) -> bool:
    return number - number == 0


def locate(trainer: FairTrainer, step: int) -> tuple[str | None, str]:
    """The first layer whose output, else whose incoming gradient, is not finite in that step: (layer, which).

    Modules without children are looked at, frozen layers (which may hold parts) and adapted ones as a whole. Memory as
    for one micro-batch.
    """
    first: list[tuple[str, str]] = []
    handles = []
    for path, module in trainer.model.named_modules():
        whole = isinstance(module, FrozenLinear) or isinstance(getattr(module, "base_layer", None), nn.Module)
        if any(True for _ in module.children()) and not whole:
            continue

        def forward(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            if not first and _bad(output):
                first.append((bare(path), "output"))

        def backward(module: nn.Module, inputs: Any, outputs: Any, path: str = path) -> None:
            if not first and _bad(inputs):
                first.append((bare(path), "gradient"))

        handles += [module.register_forward_hook(forward), module.register_full_backward_hook(backward)]
    try:
        for rows in trainer.plan.steps[step - 1]:
            batch = collate([trainer.data[row] for row in rows], trainer.pad)
            inputs = trainer._prepare_inputs(batch)
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=trainer.plan.target[step - 1])
            if not first:
                with warnings.catch_warnings(action="ignore"):  # of the hook on the lowest adapted layer
                    loss.backward()
            if not first:
                named = trainer.model.named_parameters()
                first += [
                    (_layer(path), "adapter's gradient") for path, p in named if p.grad is not None and _bad(p.grad)
                ]
            if first:
                break
    except RuntimeError:  # the hooks do not suit this model; the run ends all the same
        pass
    finally:
        for handle in handles:
            handle.remove()
        trainer.model.zero_grad(set_to_none=True)
    return first[0] if first else (None, "")


def _bad(value: Any) -> bool:
    tensors = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(t, torch.Tensor) and t.is_floating_point() and not torch.isfinite(t).all() for t in tensors)


def flags_of(padding: float, *, is_fused: bool, not_graphed: str | None = None) -> list[Flag]:
    """What stands in the report of a run that went well."""
    found = []
    if padding > PADDING:
        reason = f"{padding:.0%} of the computed tokens are padding (flagged above {PADDING:.0%})"
        found.append(Flag(check="padding-waste", severity="flag", reason=reason))
    if not is_fused:
        reason = "AdamW has no fused kernel on this device; the plain one was used"
        found.append(Flag(check="optimizer-not-fused", severity="flag", reason=reason))
    if not_graphed is not None:
        found.append(Flag(check="not-graphed", severity="flag", reason=f"computed without CUDA graphs: {not_graphed}"))
    return found
