"""Families: what is fused and what is left, what the fused blocks compute, and what users do with such a model."""

from __future__ import annotations

import copy

import pytest
import torch
from toolkit_plugins.dataflows.pact.norm import PactNorm
from toolkit_plugins.quantizers.nvfp4 import NVFP4
from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    StableLmConfig,
)

import toolkit as tk
from tests.plugins.dataflows.slow import ADAPTER, FAMILIES, IDS, SMALL, built, dense, inner, lora, planned
from toolkit.errors import InputError
from toolkit.records.dataflow import Flow
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import LayerPlan, Plan
from toolkit.runs import adapters
from toolkit.runs.building import build
from toolkit.runs.tasks.encoding import Encoded
from toolkit.runs.training import train

EVERY = [
    f"model.layers.{at}.{part}" for at in range(2) for part in ("input_layernorm", "mlp", "post_attention_layernorm")
]


def rounded(x: torch.Tensor) -> torch.Tensor:
    return quantize_rows(x.reshape(-1, x.shape[-1])).values(x.dtype).view(x.shape)


class Slow(nn.Module):
    """A linear layer that rounds its input, whoever made it; with the adapter by its equation."""

    def __init__(self, layer: nn.Linear, wrapper: nn.Module) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.weight, self.bias = NVFP4().quantize(weight).dequantize(torch.float32), layer.bias
        self.ba = None
        if hasattr(wrapper, "lora_A"):
            a, b = (m["default"].weight.detach() for m in (wrapper.lora_A, wrapper.lora_B))
            self.ba = ADAPTER.alpha / ADAPTER.rank * (b @ a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = rounded(x)
        y = nn.functional.linear(x, self.weight, self.bias)
        return y if self.ba is None else y + x @ self.ba.mT


def composed(source: nn.Module, model: nn.Module) -> nn.Module:
    """transformers' own blocks, every planned linear layer of which rounds what it reads."""
    made = copy.deepcopy(source)
    found = inner(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            parent, _, last = name.rpartition(".")
            setattr(made.get_submodule(parent), last, Slow(module, found.get_submodule(name)))
    return made


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for values whose float32 sum fell on the other side of a midpoint, which spread."""
    assert (found - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_and_what_is_fused(family):
    source = dense(family)
    model = built(copy.deepcopy(source))
    flow = model.dataflow
    assert isinstance(flow, Flow) and sorted(flow.fused) == sorted(EVERY) and flow.left == {}
    assert flow.layers == {"phi3": 8}.get(family, 14) and flow.others == 0 and 0.03 < flow.gap < 0.2
    expected = logits(composed(source, model))
    close(logits(model), expected)
    assert (logits(source) - expected).norm() > 0.02 * expected.norm()  # rounding shows


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_widths_that_are_no_multiples_of_16(family):
    source = dense(family, hidden_size=60, intermediate_size=90, num_attention_heads=6, num_key_value_heads=3)
    model = built(copy.deepcopy(source))
    close(logits(model), logits(composed(source, model)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_are_the_models_and_gradients_float32(dtype):
    model = built(dense(), dtype=dtype)
    norm = model.get_base_model().model.layers[0].input_layernorm
    assert isinstance(norm, PactNorm) and norm.weight.dtype == norm.dtype == getattr(torch, dtype)
    found = model(input_ids=IDS, use_cache=False).logits
    assert found.dtype == getattr(torch, dtype) and found.isfinite().all()
    found.float().logsumexp(-1).mean().backward()
    for gradient in lora(model).values():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all() and gradient.any()


# models and layers that keep their own code


SHAPE = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
OTHERS = {
    "gpt2": (GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4), 0, {"no block of a known shape": 1}),
    "gemma": (
        GemmaConfig(**SHAPE, **HEADS, head_dim=16),
        0,
        {"GemmaRMSNorm is no RMSNorm": 4, "activation is not SiLU": 2},
    ),
    "stablelm": (StableLmConfig(**SHAPE, **HEADS), 2, {"LayerNorm is no RMSNorm": 4}),
    "mixtral": (
        MixtralConfig(**SHAPE, **HEADS, num_local_experts=2, num_experts_per_tok=1),
        2,
        {"no projections by the usual names": 2, "no gate, up and down": 2},
    ),
    "gelu": (LlamaConfig(**SHAPE, **HEADS, hidden_act="gelu"), 4, {"activation is not SiLU": 2}),
}


@pytest.mark.parametrize("family", list(OTHERS))
def test_another_block_keeps_its_code_and_says_so(family):
    config, fused, reasons = OTHERS[family]
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    model = build(copy.deepcopy(source), planned(adapter=None), dtype="float32")
    flow = model.dataflow
    assert len(flow.fused) == fused and len(flow.left) == len(reasons)
    for reason, count in reasons.items():
        (paths,) = [paths for said, paths in flow.left.items() if reason in said]
        assert len(paths) == count
    if family in ("gemma", "stablelm", "gelu"):
        close(logits(model), logits(composed(source, model)))
    assert logits(model).isfinite().all()


def test_readers_in_16_bit_leave_a_norm_alone():
    """A protected k, a protected down and a gate in NF4: three parts of two blocks keep their code."""
    layers = {
        "model.layers.0.self_attn.k_proj": LayerPlan(quantizer="none", adapter=ADAPTER),
        "model.layers.0.mlp.down_proj": LayerPlan(quantizer="none"),
        "model.layers.1.mlp.gate_proj": LayerPlan(quantizer="nf4", adapter=ADAPTER),
    }
    source = dense()
    model = build(copy.deepcopy(source), planned(layers=layers), dtype="float32")
    left = {path: reason for reason, paths in model.dataflow.left.items() for path in paths}
    assert left == {
        "model.layers.0.input_layernorm": "1 of its 3 readers is not in NVFP4",
        "model.layers.0.mlp": "its down projection is not in NVFP4",
        "model.layers.1.post_attention_layernorm": "1 of its 2 readers is not in NVFP4",
    }
    assert sorted([*model.dataflow.fused, *left]) == sorted(EVERY) and model.dataflow.others == 3
    expected = composed(source, model)  # B = 0
    for name, plan in layers.items():
        layer = copy.deepcopy(source.get_submodule(name))
        layer.weight.data = tk.quantizer(plan.quantizer).quantize(layer.weight.data).dequantize(torch.float32)
        parent, _, last = name.rpartition(".")
        setattr(expected.get_submodule(parent), last, layer)
    close(logits(model), logits(expected))


def test_an_mlp_that_computes_something_else_is_left():
    """The usual names and SiLU, and a factor of its own."""
    source = dense()
    kind = type(source.model.layers[0].mlp)

    class Scaled(kind):
        def forward(self, x):
            return self.down_proj(0.7 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    for block in source.model.layers:
        block.mlp.__class__ = Scaled
    model = built(copy.deepcopy(source))
    assert list(model.dataflow.left) == ["Scaled computes something else than down(silu(gate) ∘ up)"]
    close(logits(model), logits(composed(source, model)))


def test_a_plan_without_nvfp4_and_dora_are_refused():
    with pytest.raises(InputError, match="the plan has none: its default is nf4"):
        build(dense(), Plan(dataflow="pact", default=LayerPlan(quantizer="nf4")))
    with pytest.raises(InputError, match="LoRA and not DoRA"):
        build(dense(), planned(adapter=ADAPTER.model_copy(update={"dora": True})))


# checkpointing, autocast, copies, adapters


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(input_ids=IDS, use_cache=False).logits.float().logsumexp(-1).mean().backward()
    return {name: gradient.clone() for name, gradient in lora(model).items()}


@pytest.mark.parametrize("flow", ["pact", "pact(gradients=stochastic,norm=16bit)"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_gives_the_same_bits(flow, dtype):
    """Non-reentrant: what is recomputed draws no noise, so that backward's stays the same."""
    model = built(dense(), flow, dtype=dtype).train()
    plain = gradients(model)
    calls = []
    model.get_base_model().model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda *_: calls.append(1))
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model)
    assert len(calls) == 2  # it was recomputed
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast_changes_no_layer_of_the_flow(dtype):
    """A float32 model's layers stay float32; a 16-bit one is the same with it and without."""
    model = built(dense(), dtype=dtype)
    block = model.get_base_model().model.layers[0]
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)).requires_grad_()

    def passed():
        y = block.mlp(block.post_attention_layernorm(x))
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
        return y.detach(), gradient

    plain = passed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = passed()
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(plain, cast, strict=True))


def test_a_copy_is_a_model_of_its_own():
    model = built(dense())
    before = logits(model)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), before) and other.dataflow == model.dataflow
    with torch.no_grad():
        other.get_base_model().model.layers[0].mlp.down_proj.lora_B["default"].weight.add_(1)
        other.get_base_model().model.layers[1].input_layernorm.weight.mul_(2)
    assert torch.equal(logits(model), before) and not torch.equal(logits(other), before)


def test_adapters_can_be_switched_off_and_are_not_merged():
    model = built(dense())
    bare = build(dense(), planned(adapter=None), dtype="float32")
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(bare))
    assert not torch.equal(logits(model), logits(bare))
    with pytest.raises(InputError, match="packed weight"):
        model.merge_and_unload()


def test_a_saved_adapter_loads_in_stock_peft_over_the_dequantized_weights(tmp_path):
    """It differs by the rounding of activations alone: over layers that round theirs it is the same."""
    from peft import PeftModel

    source = dense("qwen2")
    model = built(copy.deepcopy(source))
    adapters.save(model, tmp_path)
    plain = copy.deepcopy(source)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = NVFP4().quantize(module.weight.data).dequantize(torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    for module in inner(loaded).modules():
        if hasattr(module, "lora_A"):
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
    close(logits(model), logits(loaded))
    other = build(dense("qwen2"), planned(), dtype="float32")
    adapters.load(other, tmp_path)
    assert torch.equal(logits(other), logits(model))


def test_a_row_does_not_depend_on_its_batch():
    """Neither on other rows nor on how many there are: every token is rounded by itself."""
    model = built(dense())
    whole, alone = logits(model), logits(model, IDS[:1])
    torch.testing.assert_close(whole[:1], alone, rtol=1e-4, atol=1e-4)
    harmed = IDS.clone()
    harmed[1] = 5
    assert torch.equal(logits(model, harmed)[0], whole[0])


# what is not finite


def test_nan_is_seen_in_its_row_and_not_hidden():
    model = built(dense())
    x = model.get_input_embeddings()(IDS).detach().clone()
    x[1, 4, 7] = float("nan")
    found = model(inputs_embeds=x, use_cache=False).logits
    assert found[1, 4].isnan().all() and found[0].isfinite().all()  # SDPA lets what is masked into its sums


@pytest.mark.parametrize("what", ["output", "gradient"])
@pytest.mark.parametrize(
    ("module", "adapted"),
    [("model.layers.1.input_layernorm", True), ("model.layers.0.self_attn.o_proj", True),
     ("model.layers.1.mlp.down_proj", False)],
)  # fmt: skip
def test_the_health_check_names_step_and_layer(tmp_path, module, adapted, what):
    """From the third step on the module's output, or the gradient that enters it, is infinite."""
    layers = {} if adapted else {module: LayerPlan(quantizer="nvfp4")}
    model = build(dense(), planned(layers=layers), dtype="float32")
    steps = []
    model.get_base_model().model.embed_tokens.register_forward_hook(lambda *_: steps.append(1))

    def harm(_, args, output):
        if len(steps) < 3:
            return None
        if what == "output":
            return output * float("inf")
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return None

    model.get_base_model().get_submodule(module).register_forward_hook(harm)
    data = [Encoded(tuple(range(1 + at, 9 + at)), (False,) * 4 + (True,) * 4) for at in range(24)]
    levers = Levers(batch=4, accumulation=1, steps=5, learning_rate=1e-2)
    outcome = train(model, data, levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    (flag,) = [flag for flag in outcome.flags if flag.severity == "fatal"]
    assert (flag.check, flag.step, flag.layer) == ("non-finite-loss", 3, module)
    assert what in flag.reason
