"""The stock data flow: what is built computes what was planned, from packed weights, with PEFT's adapters."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Phi3Config

import toolkit as tk
from toolkit.errors import InputError, RunError
from toolkit.records.plan import Adapter, LayerPlan, Plan
from toolkit.runs.audit import audit, built_layers
from toolkit.runs.building import build, decide
from toolkit.runs.frozen import FrozenLinear
from toolkit.weights.layers import layers_of

SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "phi3": lambda: Phi3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0),
    "gpt2": lambda: GPT2Config(vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=64),
    "mixtral": lambda: MixtralConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
}
QUANTIZERS = ["nf4", "nf4(block=128,double=false)", "nvfp4", "mxfp4", "fp4-e2m1", "residual(inner=nvfp4)"]
IDS = torch.arange(48).view(2, 24) * 7 % 128


def make(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()


def replaced_by_hand(model: nn.Module, quantizer: str, keep: set[str], dtype: torch.dtype) -> nn.Module:
    """The oracle: an ordinary dense model whose weights were written over by their dequantized values."""
    for layer in layers_of(model):
        if layer.name not in keep:
            layer.weight().copy_(tk.quantizer(quantizer).quantize(layer.weight()).dequantize(torch.float32))
    return model.to(dtype)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits.float()


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_built_model_equals_one_written_by_hand(family, quantizer):
    protected = [layer.name for layer in layers_of(make(family))][1:4]
    plan = Plan(default=LayerPlan(quantizer=quantizer), layers={n: LayerPlan(quantizer="none") for n in protected})
    # float32 weights of 16-bit values: the oracle can hold Ŵ without rounding it again
    oracle = replaced_by_hand(make(family).float(), quantizer, set(protected), torch.float32)
    built = build(make(family), plan, dtype="float32")
    expected, found = logits(oracle), logits(built)
    assert (expected - logits(make(family).float())).abs().max() > 1e-2  # rounding shows
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_protected_layers_and_the_head_are_untouched():
    model = make()
    name = "model.layers.1.mlp.up_proj"
    before = model.get_submodule(name).weight.data_ptr(), model.lm_head.weight.data_ptr()
    built = build(model, Plan(default=LayerPlan(quantizer="nf4"), layers={name: LayerPlan(quantizer="none")}))
    layer = built.get_submodule(name)
    assert type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16
    assert (layer.weight.data_ptr(), built.lm_head.weight.data_ptr()) == before
    assert built.lm_head.weight is built.get_input_embeddings().weight


def test_a_named_head_is_quantized_and_the_tied_embedding_is_not():
    model = make()
    embedding = model.get_input_embeddings().weight
    values = embedding.detach().clone()
    plan = Plan(default=LayerPlan(quantizer="none"), layers={"lm_head": LayerPlan(quantizer="nvfp4")})
    built = build(model, plan)
    assert isinstance(built.lm_head, FrozenLinear)
    assert torch.equal(built.get_input_embeddings().weight, values)
    assert not torch.equal(built.lm_head.weight, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_reach_the_input_and_equal_the_dense_ones(family, dtype):
    quantizer = "mxfp4"
    plan = Plan(default=LayerPlan(quantizer=quantizer))
    dense = replaced_by_hand(make(family, torch.float32), quantizer, set(), dtype)
    built = build(make(family, torch.float32), plan, dtype=dtype)
    gradients = []
    for model in (dense, built):
        x = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=x, use_cache=False).logits.float().square().mean().backward()
        gradients.append(x.grad.float())
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    scale = gradients[0].abs().max()
    assert scale > 0
    assert (gradients[0] - gradients[1]).abs().max() <= tolerance * scale


def test_backward_keeps_no_weight_and_no_input():
    weight = torch.randn(48, 80)
    layer = FrozenLinear(tk.quantizer("nvfp4").quantize(weight), None, torch.float32)
    kept = []
    x = torch.randn(5, 80, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert kept == []
    y.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, 80))


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_frozen_layer_is_dequantize_then_multiply(compute, rows):
    weight, bias = torch.randn(48, 80, dtype=torch.bfloat16), torch.randn(48, dtype=torch.bfloat16)
    packed = tk.quantizer("fp4-e2m1").quantize(weight)
    layer = FrozenLinear(packed, bias, compute)
    x = torch.randn(rows, 80, dtype=torch.bfloat16)
    expected = nn.functional.linear(x.to(compute), packed.dequantize(compute)) + bias.to(compute)
    assert torch.equal(layer(x), expected.to(torch.bfloat16))
    assert layer(x).dtype == torch.bfloat16


def test_frozen_layer_keeps_its_scales_when_the_model_is_cast():
    layer = FrozenLinear(tk.quantizer("fp4-e2m1").quantize(torch.randn(16, 64)), None, torch.float32)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.to(torch.bfloat16)
    assert any(v.dtype == torch.float32 for v in before.values())
    for key, value in layer.state_dict().items():
        assert value.dtype == before[key].dtype and torch.equal(value, before[key])


def test_state_survives_save_and_load(tmp_path):
    from safetensors.torch import load_file, save_file

    plan = Plan(default=LayerPlan(quantizer="nvfp4"))
    built = build(make("mixtral"), plan)
    save_file({k: v.contiguous() for k, v in built.state_dict().items()}, tmp_path / "built.safetensors")
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(CONFIGS["mixtral"]()).to(torch.bfloat16).eval()
    other = build(other, plan)
    assert not torch.equal(logits(other), logits(built))
    other.load_state_dict(load_file(tmp_path / "built.safetensors"))
    assert torch.equal(logits(other), logits(built))


# adapters


@pytest.mark.parametrize("quantizer", ["nf4", "mxfp4", "none"])
@pytest.mark.parametrize("scaler", ["lora", "rslora", "fixed(value=0.37)"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapter_adds_s_times_ba(family, scaler, quantizer):
    rank, alpha = 5, 12.0
    s = {"lora": alpha / rank, "rslora": alpha / rank**0.5, "fixed(value=0.37)": 0.37}[scaler]
    plan = Plan.protecting(None, quantizer, rank=rank, alpha=alpha, scaler=scaler)
    built = build(make(family), plan, dtype="float32")
    name = {"llama": "model.layers.1.mlp.down_proj", "gpt2": "transformer.h.1.mlp.c_proj"}[family]
    layer = built.get_base_model().get_submodule(name)
    assert layer.scaling["default"] == s
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape == (rank, layer.in_features) and b.shape == (layer.out_features, rank)
    nn.init.normal_(b)
    x = torch.randn(4, layer.in_features)
    expected = layer.get_base_layer()(x) + s * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_adapters_stand_on_exactly_the_named_layers_each_with_its_own_rank():
    """`layers.1` must not catch `layers.11`, and two ranks must not become one."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL | {"num_hidden_layers": 12}, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    names = {"model.layers.1.mlp.up_proj": 2, "model.layers.2.self_attn.q_proj": 7}
    layers = {
        n: LayerPlan(quantizer="nf4", adapter=Adapter(rank=r, alpha=16, scaler="rslora", scaling=16 / r**0.5))
        for n, r in names.items()
    }
    built = build(model, Plan(default=LayerPlan(quantizer="nf4"), layers=layers))
    found = {n: m for n, m in built.get_base_model().named_modules() if hasattr(m, "lora_A")}
    assert {n: m.r["default"] for n, m in found.items()} == names
    trainable = {n for n, p in built.named_parameters() if p.requires_grad}
    assert len(trainable) == 4 and all("lora_" in n for n in trainable)


def test_merging_into_a_packed_weight_is_refused():
    built = build(make(), Plan.protecting(None, "nvfp4", rank=2))
    with pytest.raises(InputError, match="packed weight"):
        built.merge_and_unload()


def test_adapter_on_an_expert_is_refused_by_name():
    with pytest.raises(InputError, match=r"gate_up_proj\[0\].*no adapter on one expert"):
        build(make("mixtral"), Plan.protecting(None, "nf4", rank=4))


def test_compute_dtype_of_a_protected_layer():
    name = "model.layers.0.mlp.down_proj"
    plan = Plan(default=LayerPlan(quantizer="nf4"), layers={name: LayerPlan(quantizer="none", compute_dtype="float32")})
    model = make()
    weight = model.get_submodule(name).weight.detach().clone()
    layer = build(model, plan).get_submodule(name)
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    assert layer.packed.nbytes == 2 * weight.numel()  # storage unchanged
    assert torch.equal(layer(x), nn.functional.linear(x.float(), weight.float()).bfloat16())


# refusals and the audit


def test_what_is_no_plan_is_refused():
    with pytest.raises(InputError, match=r"plan is 'nf4' \(str\), and a Plan is asked for"):
        build(make(), "nf4")


def test_adapters_are_added_without_a_warning_that_is_not_for_the_user():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(make(), Plan.protecting(None, "nf4", rank=4))


def test_building_says_nothing_of_kernels_that_it_does_not_use():
    script = "import toolkit as tk; tk.quantizer('nf4'); import bitsandbytes"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "kernels" not in done.stdout + done.stderr


def test_unknown_layer_names_the_closest():
    plan = Plan(default=LayerPlan(quantizer="nf4"), layers={"model.layers.1.mlp.up_porj": LayerPlan(quantizer="none")})
    with pytest.raises(InputError, match=r"no layer 'model.layers.1.mlp.up_porj'.*model.layers.1.mlp.up_proj"):
        build(make(), plan)


def test_plan_for_other_weights_is_refused():
    profile = tk.profile(make(), ["nf4"], progress=False)
    protected = tk.select("top-error", profile, budget=tk.Budget(layers="0.2"))
    build(make(), Plan.protecting(protected))
    other = make()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(InputError, match="another model, or changed weights"):
        build(other, Plan.protecting(protected))


def test_unknown_quantizer_is_refused_before_anything_changes():
    model = make()
    with pytest.raises(InputError, match=r"layer model.layers.0.mlp.up_proj.*did you mean 'nf4'"):
        build(
            model,
            Plan(
                default=LayerPlan(quantizer="none"),
                layers={"model.layers.0.mlp.up_proj": LayerPlan(quantizer="nf5")},
            ),
        )
    assert all(type(layer.module) is nn.Linear for layer in layers_of(model))


def test_scaling_that_the_scaler_does_not_give_is_refused():
    adapter = Adapter(rank=8, alpha=16, scaler="rslora", scaling=2.0)
    with pytest.raises(InputError, match=r"rslora gives 5\.65"):
        build(make(), Plan(default=LayerPlan(quantizer="nf4", adapter=adapter)))


@pytest.mark.parametrize("quantizer", ["nf4", "mxfp4", "residual(inner=nvfp4)"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_audit_catches_a_layer_of_the_wrong_storage(family, quantizer):
    plan = Plan(default=LayerPlan(quantizer=quantizer))
    built = build(make(family), plan)
    layers = decide(make(family), plan)
    assert len(audit(built, layers, torch.bfloat16)) == len(layers)
    wrong = dict(layers)
    first = next(iter(wrong))
    wrong[first] = LayerPlan(quantizer="none")
    with pytest.raises(RunError, match="planned in 16 bit"):
        audit(built, wrong, torch.bfloat16)
    wrong[first] = LayerPlan(quantizer="nf4(block=512)" if quantizer == "nf4" else "nf4")
    with pytest.raises(RunError, match="planned"):
        audit(built, wrong, torch.bfloat16)


def test_audit_looks_at_storage_and_not_at_the_class():
    """A layer labelled 4-bit that holds 16-bit weights."""
    plan = Plan(default=LayerPlan(quantizer="nf4"))
    built = build(make(), plan)
    layer = built.model.layers[0].mlp.up_proj
    label = type(layer)
    layer.weight = nn.Parameter(torch.zeros(96, 64, dtype=torch.bfloat16), requires_grad=False)
    assert type(layer) is label
    with pytest.raises(RunError, match=r"layers.0.mlp.up_proj.*planned nf4 .*found 12288 bytes of bfloat16"):
        audit(built, decide(make(), plan), torch.bfloat16)


def test_audit_catches_scaling_rank_and_strays():
    plan = Plan.protecting(None, "nf4", rank=4, alpha=16, scaler="rslora")
    built = build(make(), plan)
    layers = decide(make(), plan)
    layer = built.get_base_model().model.layers[2].self_attn.v_proj
    layer.scaling["default"] = 4.0
    with pytest.raises(
        RunError, match=r"layers.2.self_attn.v_proj: the adapter's scaling is planned as 8.0, found 4.0"
    ):
        audit(built, layers, torch.bfloat16)
    layer.scaling["default"] = 8.0
    bare = {n: p.model_copy(update={"adapter": None}) for n, p in layers.items()}
    with pytest.raises(RunError, match="there and not planned"):
        audit(built, bare, torch.bfloat16)


def test_experts_are_packed_one_by_one():
    plan = Plan(
        default=LayerPlan(quantizer="nvfp4"),
        layers={"model.layers.1.mlp.experts.down_proj[2]": LayerPlan(quantizer="none")},
    )
    built = build(make("mixtral"), plan)
    sizes = {a.name: a.storage for a in audit(built, decide(make("mixtral"), plan), torch.bfloat16)}
    kept = sizes["model.layers.1.mlp.experts.down_proj[2]"]
    packed = sizes["model.layers.1.mlp.experts.down_proj[1]"]
    assert kept.bytes == 2 * 64 * 96 and kept.dtype == "bfloat16"
    assert packed.bytes < 0.3 * kept.bytes
    assert len(built_layers(built)) == len(layers_of(make("mixtral"))) + 1  # and the head
    # no dense stack is left behind
    assert sum(p.numel() for n, p in built.named_parameters() if "experts" in n) == 64 * 96
