"""An independent account of the data flow: transformers' own dense blocks in float64, differentiated by autograd.

A `Recorder` computes as `reference` does and keeps what was rounded to what. `slow` is the dense model that holds those
very values: wherever the run rounded, the value of the run stands (and must be the rounding of what this model has
there), and the gradient passes straight through; an output gradient is replaced by what the run rounded it to, once it
agrees with what the run had. Only settings and recorded values are shared with the code under test.
"""

from __future__ import annotations

import copy

import torch
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.norm import PactNorm
from toolkit_plugins.dataflows.pact.weights import PactLinear
from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from toolkit.records.plan import Adapter, LayerPlan, Plan
from toolkit.runs.building import build

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig, "phi3": Phi3Config,
}  # fmt: skip
IDS = torch.arange(22).view(2, 11) * 7 % 128
ADAPTER = Adapter(rank=3, alpha=5.0, scaler="lora", scaling=5.0 / 3)


def dense(family: str = "llama", dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """A small random model whose norms differ from one, and whose biases from zero."""
    torch.manual_seed(0)
    config = FAMILIES[family](**SMALL | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    made = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15, generator=made)
        elif "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5, generator=made)
        else:
            nn.init.normal_(parameter, std=0.2, generator=made)
    return model.to(dtype).eval()


def planned(flow: str = "pact", adapter: Adapter | None = ADAPTER, layers: dict | None = None) -> Plan:
    return Plan(dataflow=flow, default=LayerPlan(quantizer="nvfp4", adapter=adapter), layers=layers or {})


def built(model: nn.Module, flow: str = "pact", dtype: str = "float32", **more) -> nn.Module:
    """A built model whose every B is random, so that both factors get gradients."""
    made = build(model, planned(flow, **more), dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2, generator=generator)
    return made


def inner(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def lora(model: nn.Module) -> dict[str, torch.Tensor]:
    """Adapter gradients by name."""
    return {name: p.grad for name, p in model.named_parameters() if "lora_" in name}


class Recorder(Execution):
    """The reference, and what it rounded: by layer, by norm weight, and by MLP in the order of forward.

    Args:
        near: how near the run's values must be to the slow ones, relative to the largest.
        share: of the codes, how many may fall on the other side of a midpoint.
    """

    def __init__(self, near: float = 2e-5, share: float = 0.01) -> None:
        self.near, self.share = near, share
        self.inputs: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.norms: dict[int, tuple[torch.Tensor, ...]] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.hidden: list[torch.Tensor] = []
        self.gates: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._last: torch.Tensor | None = None

    def record(self, model: nn.Module) -> Recorder:
        """Compute this model from now on."""
        for module in inner(model).modules():
            if isinstance(module, PactLinear | PactNorm):
                module.execution = self
            elif hasattr(module, "pact"):
                dtype, _, settings = module.pact
                module.pact = (dtype, self, settings)
        return self

    def quantize(self, x, noise=None):
        rows = super().quantize(x, noise)
        self._last = rows.values().double()
        return rows

    def product(self, rows, layer, dtype, values=None):
        self.inputs[id(layer)] = rows.values().double()
        return super().product(rows, layer, dtype, values)

    def input_gradient(self, gradient, layer, dtype, how="nearest"):
        found = super().input_gradient(gradient, layer, dtype, how)
        rounded = gradient.double() if how == "16bit" else self._last
        self.gradients[id(layer)] = gradient.double(), rounded
        return found

    def norm(self, x, weight, eps, dtype, *, rounded):
        y, rows, rstd = super().norm(x, weight, eps, dtype, rounded=rounded)
        self.norms[id(weight)] = x.double(), y.double(), rstd.double()
        return y, rows, rstd

    def gated(self, gate, up, dtype):
        h, rows = super().gated(gate, up, dtype)
        self.hidden.append((gate.double(), up.double(), rows.values().double()))
        return h, rows

    def gated_gradient(self, gradient, gate, up):
        wide = [(t if isinstance(t, torch.Tensor) else t.values()).double() for t in (gate, up)]
        self.gates.insert(0, tuple(wide))
        return super().gated_gradient(gradient, gate, up)


def close(found: torch.Tensor, expected: torch.Tensor, relative: float = 2e-5, share: float = 0.0) -> None:
    """Equal to float32 precision, measured at the size of the whole; but for a share of values."""
    scale = expected.abs().max().clamp(min=1e-30)
    off = (found.double() - expected.double()).abs() > relative * scale
    assert off.double().mean() <= share, f"{int(off.sum())} of {off.numel()} differ"


def rounds_to(x: torch.Tensor, rounded: torch.Tensor, share: float) -> None:
    """The recorded values are the rounding of these, but where the run's sum fell on the other side of a midpoint."""
    again = quantize_rows(x.detach().float().reshape(rounded.shape)).values()
    close(again, rounded, 1e-6, share=share)
    close(x.detach().reshape(rounded.shape), rounded, 0.2)


def through(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Another value, the gradient as it comes."""
    return x + (value.reshape(x.shape) - x).detach()


class SlowLinear(nn.Module):
    """x̂Ŵᵀ + b + s·x̃AᵀBᵀ; a gradient enters W̃ as the run rounded it."""

    def __init__(self, wrapper: nn.Module, run: Recorder, rounded: bool) -> None:
        super().__init__()
        layer = getattr(wrapper, "base_layer", wrapper)
        self.key, self.run, self.rounded = id(layer), run, rounded
        self.forth = layer.packed.dequantize(torch.float32).double()
        other = layer.packed if layer.transposed is None else layer.transposed.packed
        back = other.dequantize(torch.float32).double()
        self.back = back if layer.transposed is None else back.mT
        self.bias = None if layer.bias is None else layer.bias.detach().double()
        if hasattr(wrapper, "lora_A"):
            self.A, self.B = (
                nn.Parameter(m["default"].weight.detach().double()) for m in (wrapper.lora_A, wrapper.lora_B)
            )
            self.s = ADAPTER.alpha / ADAPTER.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.run.inputs[self.key]
        rounds_to(x, rows, self.run.share)
        seen = through(x, rows)
        back = seen @ self.back.mT
        if back.requires_grad:
            back.register_hook(self.entering)
        y = (seen @ self.forth.mT).detach() + back - back.detach()
        y = y if self.bias is None else y + self.bias
        return y + self.s * ((seen if self.rounded else x) @ self.A.mT @ self.B.mT) if hasattr(self, "A") else y

    def entering(self, gradient: torch.Tensor) -> torch.Tensor:
        raw, rounded = self.run.gradients[self.key]
        close(gradient.reshape(raw.shape), raw, self.run.near)
        return rounded.reshape(gradient.shape)


class SlowNorm(nn.Module):
    """RMSNorm at the point x̃ = n̂/rstd that is left of x, n̂ = ŷ/w: autograd there gives backward its reconstruction."""

    def __init__(self, norm: PactNorm, run: Recorder) -> None:
        super().__init__()
        self.key, self.run, self.eps = id(norm.weight), run, norm.variance_epsilon
        self.settings, self.weight = norm.settings, norm.weight.detach().double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, y, rstd = self.run.norms[self.key]
        shape, w = x.shape, self.weight
        if self.settings.nonlinear == "nvfp4":
            rounds_to(x, seen, self.run.share)
        else:
            close(x.reshape(seen.shape), seen, self.run.near)
        plain = seen * (seen.square().mean(-1, keepdim=True) + self.eps).rsqrt() * w
        close(rstd, (seen.square().mean(-1) + self.eps).rsqrt(), self.run.near)
        if self.settings.norm == "nvfp4":
            rounds_to(plain, y, self.run.share)
        else:
            close(y, plain, self.run.near)
        there = torch.where(w == 0, 0.0, y / w) / rstd[:, None]
        missing = (rstd[:, None] ** -2 - there.square().mean(-1, keepdim=True)).reshape(*shape[:-1], 1)
        point = through(x, there)
        return w * point * (point.square().mean(-1, keepdim=True) + missing).rsqrt()


class SlowMlp(nn.Module):
    """down(silu(gate) ∘ up), differentiated at what was kept of gate and up."""

    def __init__(self, mlp: nn.Module, at: int, run: Recorder, settings) -> None:
        super().__init__()
        self.at, self.run, self.settings = at, run, settings
        for name, child in mlp.named_children():
            setattr(self, name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = (
            self.gate_up_proj(x).chunk(2, -1) if hasattr(self, "gate_up_proj") else (self.gate_proj(x), self.up_proj(x))
        )
        *seen, hidden = self.run.hidden[self.at]
        for each, value in zip(pair, seen, strict=True):
            if self.settings.nonlinear == "nvfp4":
                rounds_to(each, value, self.run.share)
            else:
                close(each.reshape(value.shape), value, self.run.near)
        forth = nn.functional.silu(seen[0]) * seen[1]
        rounds_to(forth, hidden, self.run.share)
        gate, up = (through(each, kept) for each, kept in zip(pair, self.run.gates[self.at], strict=True))
        return self.down_proj(through(nn.functional.silu(gate) * up, hidden))


def slow(run_model: nn.Module, run: Recorder, source: nn.Module, settings) -> nn.Module:
    """The dense model in float64 with what the run held and rounded; call it after a forward and a backward pass."""
    model = copy.deepcopy(source).double()
    found = inner(run_model)
    at = 0
    for name, module in list(found.named_modules()):
        parent, _, last = name.rpartition(".")
        if isinstance(module, PactNorm):
            setattr(model.get_submodule(parent), last, SlowNorm(module, run))
        elif isinstance(getattr(module, "base_layer", module), PactLinear):
            dense16 = settings.norm == "16bit" and last not in ("o_proj", "down_proj")
            if not name.endswith("base_layer"):
                setattr(model.get_submodule(parent), last, SlowLinear(module, run, rounded=not dense16))
    for name, module in found.named_modules():
        if hasattr(module, "pact"):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, SlowMlp(model.get_submodule(name), at, run, settings))
            at += 1
    return model
