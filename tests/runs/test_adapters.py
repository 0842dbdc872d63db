"""Adapters: where they start, and their files, which stock PEFT loads over the same base with the same logits."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import toolkit as tk
from tests.conftest import COMMON, configs
from toolkit.errors import InputError
from toolkit.records.plan import Adapter, LayerPlan, Plan
from toolkit.runs import adapters
from toolkit.runs.building import build
from toolkit.weights.layers import layers_of

IDS = torch.arange(48).view(2, 24) * 7 % 256


def make(family: str = "llama", dtype: torch.dtype = torch.bfloat16, blocks: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    config = configs()[family]
    if blocks:
        small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = LlamaConfig(**COMMON, **small, num_hidden_layers=blocks)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.to(dtype).eval()


def trained(model: nn.Module, seed: int = 1) -> nn.Module:
    """Every adapter away from its start, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.trainable(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits.float()


def matrices(model: nn.Module, letter: str = "A") -> dict[str, torch.Tensor]:
    marker = f".lora_{letter}."
    named = model.get_base_model().named_parameters()
    return {name.partition(marker)[0]: p.detach() for name, p in named if marker in name}


# where they start


def test_a_is_peft_s_own_distribution():
    """Kaiming's uniform with a = √5: ±1/√in, whose variance is 1/(3·in)."""
    a = adapters.initial(0, "x", 64, (10, 400))
    assert a.shape == (64, 400) and a.dtype == torch.float32
    assert a.abs().max() <= 1 / 20 and a.abs().max() > 0.99 / 20
    assert abs(a.mean()) < 4 * (1 / 20 / 3**0.5) / 160
    assert math.isclose(a.var().item(), 1 / (3 * 400), rel_tol=0.03)


GOLDEN = [-0.17698431, 0.273667872, 0.456327796, 0.407990515, -0.068351865, -0.354439497, -0.403693259, 0.305228174]


def test_a_stays_what_it_is():
    """Drawn once and written down: runs of other versions must start alike."""
    found = adapters.initial(7, "model.layers.0.mlp.up_proj", 2, (96, 4)).flatten().tolist()
    assert found == pytest.approx(GOLDEN, abs=1e-9)


@given(seed=st.integers(0, 2**40), rank=st.integers(1, 9), name=st.text(max_size=12))
def test_a_is_a_function_of_seed_name_rank_and_shape(seed, rank, name):
    before = torch.get_rng_state()
    a = adapters.initial(seed, name, rank, (6, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a, adapters.initial(seed, name, rank, (6, 8)))
    for other in [
        adapters.initial(seed + 1, name, rank, (6, 8)),
        adapters.initial(seed, name + "x", rank, (6, 8)),
        adapters.initial(seed, name, rank + 1, (6, 8)),
        adapters.initial(seed, name, rank, (7, 8)),
    ]:
        assert not torch.equal(a, other[:rank])


def test_arms_start_alike_wherever_they_both_adapt():
    """At one seed a full arm and a depth arm share every A, at any dtype; at two seeds they share none."""
    full = build(make(), Plan.protecting(None, "nf4", rank=4), dtype="float32", seed=5)
    adapter = Adapter(rank=4, alpha=16, scaler="rslora", scaling=8.0, dora=True)
    names = [layer.name for layer in layers_of(make())][14:]
    layers = {name: LayerPlan(quantizer="none", adapter=adapter) for name in reversed(names)}
    torch.manual_seed(99)
    depth = build(make(), Plan(default=LayerPlan(quantizer="mxfp4"), layers=layers), dtype="bfloat16", seed=5)
    other = build(make(), Plan.protecting(None, "nf4", rank=4), dtype="float32", seed=6)
    a, b, c = matrices(full), matrices(depth), matrices(other)
    assert set(b) == set(names) < set(a)
    assert all(torch.equal(a[name], b[name]) and b[name].dtype == torch.float32 for name in names)
    assert not any(torch.equal(a[name], c[name]) for name in a)
    assert len({tuple(matrix.flatten()[:8].tolist()) for matrix in a.values()}) == len(a)
    assert all(not matrix.any() for matrix in matrices(depth, "B").values())


def test_building_leaves_chance_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = make()
    torch.set_rng_state(before)
    build(model, Plan.protecting(None, "none", rank=4))
    assert torch.equal(torch.get_rng_state(), before)


def test_adapters_are_float32_in_a_16_bit_model_and_nothing_else_is_trained():
    built = build(make(), Plan.protecting(None, "nf4", rank=4, dora=True), dtype="bfloat16")
    trainable = adapters.trainable(built)
    assert len(trainable) == 21 * 3 and {p.dtype for p in trainable.values()} == {torch.float32}
    assert all("lora_" in name for name in trainable)
    assert {p.dtype for n, p in built.named_parameters() if n not in trainable} == {torch.bfloat16, torch.uint8}
    assert built.get_base_model().config.use_cache is False


# files


PLANS = {
    "lora": {"rank": 8, "alpha": 16.0},
    "rslora": {"rank": 5, "alpha": 12.0, "scaler": "rslora"},
    "fixed": {"rank": 3, "scaler": "fixed(value=0.37)"},
    "dora": {"rank": 4, "alpha": 12.0, "dora": True},
    "dora, rslora": {"rank": 3, "alpha": 16.0, "scaler": "rslora", "dora": True},
}


def dequantized(family: str, quantizer: str) -> nn.Module:
    """An ordinary dense float32 model that holds Ŵ."""
    model = make(family)
    packed = [tk.quantizer(quantizer).quantize(layer.weight()) for layer in layers_of(model)]
    model = model.float()
    for layer, each in zip(layers_of(model), packed, strict=True):
        layer.weight().copy_(each.dequantize(torch.float32))
    return model


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
@pytest.mark.parametrize("quantizer", ["none", "nf4(block=32)", "mxfp4"])
def test_stock_peft_gives_the_same_logits(tmp_path, quantizer, family, options):
    built = trained(build(make(family), Plan.protecting(None, quantizer, **options), dtype="float32"))
    expected = logits(built)
    folder = adapters.save(built, tmp_path / "adapter")
    if quantizer == "nf4(block=32)":  # over bitsandbytes' own layers, as they are in QLoRA
        base = build(make(family), Plan(default=LayerPlan(quantizer=quantizer)), dtype="float32")
        base.is_loaded_in_4bit = True
    else:
        base = dequantized(family, quantizer)
    stock = PeftModel.from_pretrained(base, folder).eval()
    assert (logits(stock.get_base_model()) - expected).abs().max() < 1e-4
    with stock.disable_adapter():
        assert (logits(stock) - expected).abs().max() > 1e-2
    assert {p.dtype for p in load_file(folder / adapters.WEIGHTS).values()} == {torch.float32}


def test_mixed_ranks_and_scalings_reach_stock_peft(tmp_path):
    """layers.1 and layers.10, v_proj in all of them: each with its own rank and s."""
    a = {r: Adapter(rank=r, alpha=16, scaler="rslora", scaling=16 / r**0.5) for r in (2, 3)}
    b = Adapter(rank=5, alpha=10, scaler="lora", scaling=2.0)
    layers = {
        "model.layers.1.self_attn.v_proj": LayerPlan(quantizer="none", adapter=a[2]),
        "model.layers.10.self_attn.v_proj": LayerPlan(quantizer="none", adapter=a[3]),
        "model.layers.11.mlp.down_proj": LayerPlan(quantizer="none", adapter=b),
    }
    built = trained(build(make(blocks=12), Plan(default=LayerPlan(quantizer="none"), layers=layers), dtype="float32"))
    folder = adapters.save(built, tmp_path)
    stock = PeftModel.from_pretrained(make(blocks=12).float(), folder)
    found = {n: m for n, m in stock.get_base_model().named_modules() if hasattr(m, "lora_A")}
    assert {n: (m.r["default"], m.scaling["default"]) for n, m in found.items()} == {
        n: (p.adapter.rank, pytest.approx(p.adapter.scaling, rel=1e-15)) for n, p in layers.items()
    }
    assert torch.equal(logits(stock.eval()), logits(built))


def test_an_adapter_comes_back_bit_for_bit(tmp_path):
    plan = Plan.protecting(None, "nf4", rank=4, scaler="rslora", dora=True)
    built = trained(build(make(), plan, dtype="bfloat16"))
    folder = adapters.save(built, tmp_path / "a" / "b")
    other = build(make(), plan, dtype="bfloat16", seed=8)
    adapters.load(other, folder)
    pairs = zip(adapters.trainable(built).items(), adapters.trainable(other).items(), strict=True)
    assert all(n == m and torch.equal(p, q) for (n, p), (m, q) in pairs)
    assert torch.equal(logits(built), logits(other))
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors", "plan.json"]
    saved = Plan.load(folder / "plan.json")
    assert saved.fingerprint == tk.profile(make(), ["nf4"], progress=False).fingerprint


def test_the_base_s_name_is_recorded_and_no_rank_pattern_where_all_are_alike(tmp_path):
    plan = Plan.protecting(None, "none", rank=4, scaler="rslora").model_copy(update={"model": "someone/small"})
    config = json.loads((adapters.save(build(make(), plan), tmp_path) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/small" and config["inference_mode"] is True
    assert config["use_rslora"] is True and config["lora_alpha"] == 16.0 and config["r"] == 4
    assert config["rank_pattern"] == {} and config["alpha_pattern"] == {}


def test_an_adapter_that_peft_saved_loads(tmp_path):
    config = LoraConfig(r=4, lora_alpha=12, use_rslora=True, target_modules=["q_proj", "down_proj"])
    theirs = trained(get_peft_model(make().float(), config))
    theirs.save_pretrained(tmp_path)
    adapter = Adapter(rank=4, alpha=12, scaler="rslora", scaling=6.0)
    layers = {
        layer.name: LayerPlan(quantizer="none", adapter=adapter)
        for layer in layers_of(make())
        if layer.role in ("q_proj", "down_proj")
    }
    ours = build(make(), Plan(default=LayerPlan(quantizer="none"), layers=layers), dtype="float32")
    adapters.load(ours, tmp_path)
    assert torch.equal(logits(ours), logits(theirs))


# refusals


@pytest.fixture
def folder(tmp_path):
    return adapters.save(build(make(), PLAN), tmp_path / "adapter")


PLAN = Plan.protecting(None, "nf4", rank=4, alpha=16)


def test_other_weights_are_refused(folder):
    model = make()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(InputError, match=r"is for .* \(weights [0-9a-f]{12}\), and this model is .*another base"):
        adapters.load(build(model, PLAN), folder)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan.protecting(None, "mxfp4", rank=4), r"q_proj is nf4 there and mxfp4 here \(and 20 layers more\)"),
        (Plan.protecting(None, "nf4", rank=5), "rank 4 and scaling 4 there and an adapter of rank 5"),
        (
            Plan.protecting(None, "nf4", rank=4, scaler="rslora"),
            "scaling 4 there and an adapter of rank 4 and scaling 8",
        ),
        (Plan.protecting(None, "nf4", rank=4, dora=True), "there and a DoRA adapter"),
    ],
)
def test_another_plan_over_the_same_weights_is_refused(folder, plan, says):
    with pytest.raises(InputError, match=says):
        adapters.load(build(make(), plan), folder)


def test_another_architecture_is_refused_by_its_shapes_where_no_plan_is_there(folder):
    (folder / "plan.json").unlink()
    model = build(make(), PLAN)
    adapters.load(model, folder)  # the same: nothing else says otherwise
    with pytest.raises(InputError, match=r"the adapter in .* has '.*layers.0.mlp.down_proj.lora_A.weight'"):
        adapters.load(build(make("gpt2"), PLAN), folder)
    with pytest.raises(InputError, match=r"of shape \(4, 64\), the model's is \(4, 32\)"):
        adapters.load(build(make(blocks=3), PLAN), folder)
    with pytest.raises(InputError, match=r"lacks .*lora_magnitude_vector"):
        adapters.load(build(make(), PLAN.protecting(None, "nf4", rank=4, dora=True)), folder)
    with pytest.raises(InputError, match=r"scales layer model.layers.0.self_attn.q_proj by 4, the model by 8"):
        adapters.load(build(make(), Plan.protecting(None, "nf4", rank=4, scaler="rslora")), folder)


def test_a_refused_adapter_changes_nothing(folder):
    (folder / "plan.json").unlink()
    tensors = load_file(folder / adapters.WEIGHTS)
    last = sorted(tensors)[-1]
    tensors = {name: t + 1 for name, t in tensors.items()}
    tensors[last][0, 0] = float("nan")
    save_file(tensors, folder / adapters.WEIGHTS)
    model = build(make(), PLAN)
    before = {n: p.clone() for n, p in adapters.trainable(model).items()}
    with pytest.raises(InputError, match=r"NaN, infinity or no floats in .*v_proj"):
        adapters.load(model, folder)
    assert all(torch.equal(p, before[n]) for n, p in adapters.trainable(model).items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "holds list where PEFT's settings"),
        ("{", "adapter_config.json"),
        ('{"r": 4}', "gives layer model.layers.0.self_attn.q_proj no scaling"),
        ('{"r": 0, "lora_alpha": 16}', "no scaling"),
        ('{"r": 4, "lora_alpha": 16, "rank_pattern": {"(": 4}}', "no scaling"),
        ('{"r": 4, "lora_alpha": 16, "rank_pattern": {"q_proj": 8}}', "by 2, the model by 4"),
    ],
)
def test_hostile_settings(folder, text, says):
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(InputError, match=says):
        adapters.load(build(make(), PLAN), folder)


def test_an_adapter_on_a_tied_head(tmp_path):
    """The embedding that it shares its weight with stays what it was, and is not saved."""
    adapter = Adapter(rank=2, alpha=8, scaler="lora", scaling=4.0)
    plan = Plan(default=LayerPlan(quantizer="nf4"), layers={"lm_head": LayerPlan(quantizer="none", adapter=adapter)})
    built = trained(build(make(), plan, dtype="float32"))
    folder = adapters.save(built, tmp_path)
    assert set(load_file(folder / adapters.WEIGHTS)) == {f"base_model.model.lm_head.lora_{x}.weight" for x in "AB"}
    base = build(make(), Plan(default=LayerPlan(quantizer="nf4")), dtype="float32")
    assert torch.equal(logits(PeftModel.from_pretrained(base, folder).eval()), logits(built))
    other = build(make(), plan, dtype="float32", seed=3)
    adapters.load(other, folder)
    assert torch.equal(logits(other), logits(built))


def test_damaged_and_missing_files(folder):
    model = build(make(), PLAN)
    (folder / adapters.WEIGHTS).write_bytes((folder / adapters.WEIGHTS).read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cannot read .*adapter_model.safetensors"):
        adapters.load(model, folder)
    (folder / adapters.WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"holds no adapter_model.safetensors.*found adapter_config.json, plan.json"):
        adapters.load(model, folder)
    with pytest.raises(InputError, match="found nothing"):
        adapters.load(model, folder / "absent")


def test_a_model_without_adapters_has_none_to_save_or_load(tmp_path, folder):
    bare = build(make(), Plan(default=LayerPlan(quantizer="nf4")))
    with pytest.raises(InputError, match="has no adapters to save"):
        adapters.save(bare, tmp_path)
    with pytest.raises(InputError, match="has no adapters to load into"):
        adapters.load(bare, folder)
    with pytest.raises(InputError, match=r"not made by build\(\)"):
        adapters.save(get_peft_model(make(), LoraConfig(target_modules=["q_proj"])), tmp_path)


# computing in 16 bit


@pytest.mark.parametrize("quantizer", ["none", "mxfp4"])
def test_uncast_adapters_compute_the_same_under_autocast_and_save_less(quantizer):
    results = []
    for fast in (False, True):
        built = trained(build(make(), Plan.protecting(None, quantizer, rank=4), dtype="bfloat16"))
        saved: dict[int, int] = {}

        def keep(t: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            if fast:
                with adapters.uncast(built):
                    loss = built(input_ids=IDS, labels=IDS, use_cache=False).loss
            else:
                loss = built(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), [p.grad for p in adapters.trainable(built).values()], sum(saved.values())))
    (slow, slow_gradients, slow_bytes), (quick, quick_gradients, quick_bytes) = results
    assert torch.equal(slow, quick)
    assert all(torch.equal(a, b) for a, b in zip(slow_gradients, quick_gradients, strict=True))
    assert quick_bytes < slow_bytes


def test_uncast_leaves_dora_s_norms_in_float32():
    built = build(make(), Plan.protecting(None, "mxfp4", rank=4, dora=True), dtype="bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = logits(built)
        with adapters.uncast(built):
            assert torch.equal(logits(built), expected)


def test_after_uncast_a_model_computes_without_autocast_again():
    built = build(make(), Plan.protecting(None, "none", rank=4), dtype="bfloat16")
    expected = logits(built)
    with pytest.raises(RuntimeError, match="dtype"), adapters.uncast(built):
        logits(built)
    assert torch.equal(logits(built), expected)
