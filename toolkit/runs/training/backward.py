"""Where the backward pass ends: below the lowest adapted block there is nothing to train.

transformers' checkpointing (`activation_checkpointing_enable`, once `gradient_checkpointing_enable`) turns on
gradients of the embeddings' output, and `Trainer.train` enables it anew: backward then runs, and recomputes, through
every block. What is done here must therefore come after it, from `on_train_begin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from toolkit.weights.layers import block_count, layers_of


def bare_model(model: nn.Module) -> nn.Module:
    """The model that transformers built, inside PEFT's."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def blocks_of(model: nn.Module) -> dict[int, nn.Module]:
    """Block index → block, of the blocks that hold layers."""
    bare = bare_model(model)
    found: dict[int, nn.Module] = {}
    for layer in layers_of(bare):
        if layer.block is None or layer.block in found:
            continue
        module, inside = bare, False
        for part in layer.path.split("."):
            module, inside, within = getattr(module, part), isinstance(module, nn.ModuleList), inside
            if inside and not within:
                found[layer.block] = module
                break
    return found


def lowest_block(model: nn.Module) -> int | None:
    """Index of the lowest block with a parameter to train, below which backward has nothing to do.

    Returns:
        The number of blocks where only what follows them is trained (an adapter on the head); None where backward
        must run through all of them, because the embeddings are trained, or where nothing is.
    """
    if any(p.requires_grad for module in _embeddings(bare_model(model)) for p in module.parameters()):
        return None
    for index, block in sorted(blocks_of(model).items()):
        if any(p.requires_grad for p in block.parameters()):
            return index
    return block_count(model) if any(p.requires_grad for p in model.parameters()) else None


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
    bare = bare_model(model)
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

    embeddings = list({id(m): m for m in _embeddings(bare_model(model))}.values())
    handles = [module.register_forward_hook(require_grads) for module in embeddings]

    class Handles:
        def remove(self) -> None:
            for handle in handles:
                handle.remove()

    return Handles()
