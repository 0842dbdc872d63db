"""Decoder blocks whose nonlinear operations are fused with the rounding, found in a model as transformers builds it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator

import torch
from torch import nn

from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.gated import gated
from toolkit_plugins.dataflows.pact.norm import PactNorm
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.pact.weights import PactLinear

NORMS = {
    "input_layernorm": ("self_attn", ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)),
    "post_attention_layernorm": ("mlp", ("gate_proj", "up_proj"), ("gate_up_proj",)),
}
"""A block's norm → the module whose projections read it, and their names: apart, or fused as in Phi-3."""

OUTPUTS = ("o_proj", "down_proj")
"""Projections that read no norm."""


@dataclasses.dataclass(frozen=True)
class Left:
    """A part of a block that keeps its own code, and why."""

    name: str
    reason: str


def fuse(
    model: nn.Module, execution: Execution, settings: Settings, dtype: torch.dtype, *, adapted: bool = True
) -> tuple[list[str], list[Left]]:
    """Replace norms whose readers are all NVFP4, and the product of gate and up before an NVFP4 down projection.

    Args:
        model: with its frozen layers and adapters in place; changed.
        dtype: the compute dtype.
        adapted: whether adapters are trained, and nothing else is unless it asks for gradients; without, nothing is
            trained, and the weights of fused norms ask for none from now on.

    Returns:
        The paths of what is fused, and what is left.
    """
    fused: list[str] = []
    left: list[Left] = []
    tried: dict[type[nn.Module], str | None] = {}
    for path, block in _blocks(model):
        for name in NORMS:
            where, reason = f"{path}.{name}", _norm_differs(block, name, adapted)
            if reason is not None:
                left.append(Left(where, reason))
                continue
            norm = getattr(block, name)
            norm.weight.requires_grad_(False)
            setattr(block, name, PactNorm(norm.weight, norm.variance_epsilon, dtype, execution, settings))
            fused.append(where)
        where, reason = f"{path}.mlp", _mlp_differs(block.mlp)
        if reason is None:
            if type(block.mlp) not in tried:  # the code is the class's
                tried[type(block.mlp)] = _computes_otherwise(block)
            reason = tried[type(block.mlp)]
        if reason is not None:
            left.append(Left(where, reason))
            continue
        forward = _fused if hasattr(block.mlp, "gate_up_proj") else _apart
        block.mlp.pact = (dtype, execution, settings)
        block.mlp.forward = types.MethodType(forward, block.mlp)
        fused.append(where)
    if not fused and not left:
        left.append(Left(type(model).__name__, "no block of a known shape was found"))
    return fused, left


def _apart(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x), *mlp.pact))


def _fused(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(gated(*mlp.gate_up_proj(x).chunk(2, dim=-1), *mlp.pact))


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with two norms, an attention and an MLP of projections by the usual names, and nothing else."""
    expected = {*NORMS, "self_attn", "mlp"}
    for path, module in model.named_modules():
        names = {name for name, child in module.named_children() if list(child.modules()) and not _empty(child)}
        if names == expected and _projections(module.self_attn, NORMS["input_layernorm"]):
            yield path, module


def _empty(child: nn.Module) -> bool:
    """Dropout and the like: nothing is computed, or nothing in evaluation."""
    return isinstance(child, nn.Dropout | nn.Identity)


def _projections(module: nn.Module, of: tuple[str, tuple[str, ...], tuple[str, ...]]) -> list[nn.Module]:
    for names in of[1:]:
        if all(hasattr(module, name) for name in names):
            return [getattr(module, name) for name in names]
    return []


def _frozen(module: nn.Module) -> nn.Module:
    """The layer below PEFT's."""
    return getattr(module, "base_layer", module)


def _norm_differs(block: nn.Module, name: str, adapted: bool) -> str | None:
    """Why a norm is not replaced, or None."""
    norm = getattr(block, name)
    reading = getattr(block, NORMS[name][0])
    readers = _projections(reading, NORMS[name])
    if not readers:
        return "what reads it has no projections by the usual names"
    known = {id(reader) for reader in readers}
    readers += [
        child
        for each, child in reading.named_children()
        if hasattr(child, "in_features") and each not in OUTPUTS and id(child) not in known
    ]
    others = [type(_frozen(reader)).__name__ for reader in readers if not isinstance(_frozen(reader), PactLinear)]
    if others:
        return f"{len(others)} of its {len(readers)} readers {'are' if len(others) > 1 else 'is'} not in NVFP4"
    if getattr(norm, "variance_epsilon", None) is None or getattr(norm, "weight", None) is None:
        return f"{type(norm).__name__} is no RMSNorm with a weight and an epsilon"
    if adapted and norm.weight.requires_grad:
        return "its weight is trained"
    return None if _is_rms(norm) else f"{type(norm).__name__} computes something else than w·x/rms(x)"


@torch.no_grad()
def _is_rms(norm: nn.Module) -> bool:
    """Whether the module computes w·x/√(mean x² + ε), tried on numbers."""
    width = norm.weight.numel()
    x = torch.linspace(-3, 5, 2 * width, device=norm.weight.device).view(2, width)
    rstd = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    expected = norm.weight.float() * x * rstd
    return bool((norm(x).float() - expected).abs().max() <= 1e-2 * expected.abs().max())


def _mlp_differs(mlp: nn.Module) -> str | None:
    """Why an MLP keeps its own code, or None."""
    down = getattr(mlp, "down_proj", None)
    if down is None or not _projections(mlp, NORMS["post_attention_layernorm"]):
        return "it has no gate, up and down projections by the usual names"
    if not isinstance(_frozen(down), PactLinear):
        return "its down projection is not in NVFP4"
    usual = {"act_fn", "activation_fn", *OUTPUTS, *sum(NORMS["post_attention_layernorm"][1:], ())}
    if more := [name for name, _ in mlp.named_children() if name not in usual]:
        return f"it has parts of its own: {', '.join(more)}"
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    sample = torch.linspace(-6, 6, 49)
    if activation is None or not torch.allclose(activation(sample), nn.functional.silu(sample)):
        return "its activation is not SiLU"
    return None


@torch.no_grad()
def _computes_otherwise(block: nn.Module) -> str | None:
    """Why an MLP of the usual parts keeps its code: it is no down(silu(gate) ∘ up), tried on numbers; or None."""
    mlp, weight = block.mlp, block.post_attention_layernorm.weight
    x = torch.linspace(-1, 2, 2 * weight.numel(), device=weight.device).view(2, -1).to(weight.dtype)
    pair = mlp.gate_up_proj(x).chunk(2, dim=-1) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj(x), mlp.up_proj(x))
    expected = mlp.down_proj(nn.functional.silu(pair[0]) * pair[1]).float()
    # a 16-bit product that was rounded elsewhere may move codes of the down projection's input
    same = bool((mlp(x).float() - expected).norm() <= 0.05 * expected.norm())
    return None if same else f"{type(mlp).__name__} computes something else than down(silu(gate) ∘ up)"
