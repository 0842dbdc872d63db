"""Where the backward pass ends: below the lowest adapted block there is nothing to train.

transformers' checkpointing (`activation_checkpointing_enable`, once `gradient_checkpointing_enable`) turns on
gradients of the embeddings' output, and `Trainer.train` enables it anew: backward then runs, and recomputes, through
every block. What is done here must therefore come after it, from `on_train_begin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from toolkit.weights.layers import _bare, _Blocks, block_count


def lowest_block(model: nn.Module) -> int | None:
    """Index of the lowest block with a parameter to train, below which backward has nothing to do.

    Returns:
        The number of blocks where only what follows them is trained (an adapter on the head); None where backward
        must run through all of them, because something before the blocks is trained, or nothing is.
    """
    bare = _bare(model)
    blocks = _Blocks(bare)
    count = block_count(bare)
    lowest = None
    before = {id(p) for module in _embeddings(bare) for p in module.parameters()}
    for path, parameter in bare.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in before:
            return None
        block = blocks.of(path)
        lowest = min(count if lowest is None else lowest, count if block is None else block)
    return lowest


def _embeddings(bare: nn.Module) -> Iterator[nn.Module]:
    for module in bare.modules():
        getter = getattr(module, "get_input_embeddings", None)
        try:
            found = getter() if callable(getter) else None
        except NotImplementedError:
            continue
        if isinstance(found, nn.Module):
            yield found


def stop_backward(model: nn.Module) -> None:
    """Let backward end at the lowest adapted block: no input of the blocks asks for a gradient.

    Hooks that transformers and PEFT left on the embeddings are removed too: enabling twice leaves the first one
    behind, which `disable_input_require_grads` no longer finds.
    """
    bare = _bare(model)
    if hasattr(bare, "disable_input_require_grads"):
        bare.disable_input_require_grads()
    for module in _embeddings(bare):
        for key, hook in list(module._forward_hooks.items()):
            if "require_grad" in getattr(hook, "__qualname__", ""):
                del module._forward_hooks[key]


def run_through(model: nn.Module) -> Any:
    """Let backward run through all blocks, whether or not there is something to train in them.

    Returns:
        A handle whose `remove` ends it.
    """
    stop_backward(model)

    def require_grads(module: nn.Module, args: Any, output: Any) -> None:
        output.requires_grad_(True)

    embeddings = list({id(m): m for m in _embeddings(_bare(model))}.values())
    handles = [module.register_forward_hook(require_grads) for module in embeddings]

    class Handles:
        def remove(self) -> None:
            for handle in handles:
                handle.remove()

    return Handles()
