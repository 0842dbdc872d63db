"""Every method of the papers as one plan: what is stored, what is trained, what is scaled, and what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import toolkit as tk
from tests.conftest import configs
from toolkit.errors import InputError, RunError
from toolkit.records.budget import Budget
from toolkit.records.plan import Plan
from toolkit.runs import adapters, guard
from toolkit.runs.audit import audit, built_layers
from toolkit.runs.building import build, decide
from toolkit.runs.frozen import FrozenLinear
from toolkit.weights.layers import layers_of

IDS = torch.arange(48).view(2, 24) * 7 % 256
FAMILIES = ["llama", "phi3", "gpt2"]

# base, share protected, share adapted, scaler, DoRA, further options of the protected layers
ARMS = {
    "LoRA": ("none", None, None, "lora", False, {}),
    "DoRA": ("none", None, None, "lora", True, {}),
    "QLoRA": ("nf4", None, None, "lora", False, {}),
    "rsLoRA": ("nf4", None, None, "rslora", False, {}),
    "QDoRA": ("nf4", None, None, "lora", True, {}),
    "AQLoRA-q": ("nf4", 0.2, None, "lora", False, {}),
    "AQLoRA-q, rsLoRA": ("nf4", 0.2, None, "rslora", False, {}),
    "AQLoRA-s": ("nf4", 0.2, 0.85, "lora", False, {}),
    "AQLoRA-s, rsLoRA": ("nf4", 0.2, 0.85, "rslora", False, {}),
    "AQLoRA-s, DoRA": ("nf4", 0.2, 0.85, "rslora", True, {}),
    "AQLoRA-q over NVFP4": ("nvfp4", 0.2, None, "lora", False, {}),
    "AQLoRA-s over MXFP4": ("mxfp4", 0.2, 0.85, "lora", False, {}),
    "DoRA over MXFP4": ("mxfp4", 0.2, None, "rslora", True, {}),
    "a second stage as protection": ("nf4", 0.2, None, "lora", False, {"protect": "residual"}),
    "FP4, float32 in protected layers": ("fp4-bnb", 0.2, None, "lora", False, {"compute_dtype": "float32"}),
    "float32 in protected layers, DoRA": ("nf4", 0.2, None, "lora", True, {"compute_dtype": "float32"}),
    "range guard": ("nf4", 0.2, 0.85, "rslora", False, {"range_guard": True}),
}


def make(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs()[family])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def profiles():
    return {
        (family, dtype): tk.profile(make(family, dtype), ["nf4"], progress=False)
        for family in FAMILIES
        for dtype in (torch.bfloat16, torch.float16)
    }


def plan_of(profile, arm: str) -> Plan:
    base, protected, adapted, scaler, dora, options = ARMS[arm]
    protect = tk.select("top-error", profile, budget=Budget(layers=str(protected))) if protected else None
    adapt = tk.select("depth", profile, budget=Budget(layers=str(adapted))) if adapted else None
    return Plan.protecting(protect, base, adapt=adapt, rank=3, alpha=16.0, scaler=scaler, dora=dora, **options)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits.float()


@pytest.mark.parametrize(
    ("family", "compute"),
    [
        ("llama", "bfloat16"),
        ("llama", "float16"),
        ("gpt2", "float32"),
        pytest.param("phi3", "bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_what_its_plan_says(profiles, arm, family, compute):
    stored = torch.float16 if compute == "float16" else torch.bfloat16
    plan = plan_of(profiles[family, stored], arm)
    built = build(make(family, stored), plan, dtype=compute, seed=4)
    _, protected, adapted, scaler, dora, options = ARMS[arm]
    planned = decide(make(family, stored), plan)
    found = {each.name: each for each in audit(built, planned, getattr(torch, compute))}
    assert len([p for n, p in planned.items() if n in plan.layers and p.quantizer != plan.default.quantizer]) == (
        round(0.2 * len(planned) + 0.49) if protected else 0
    )
    s = {"lora": 16 / 3, "rslora": 16 / 3**0.5}[scaler]
    trainable = adapters.trainable(built)
    parts = 3 if dora else 2
    number = sum(p.adapter is not None for p in planned.values())
    assert (number == len(planned)) == (adapted is None) and len(trainable) == parts * number
    assert all(p.dtype == torch.float32 for p in trainable.values())
    layers = {layer.name: layer for layer in built_layers(built)}
    dense = {layer.name: layer for layer in layers_of(make(family, stored))}
    inner = built.get_base_model()
    for name, decision in planned.items():
        each, layer = found[name], layers[name]
        assert (each.rank, each.scaling) == ((3, s) if decision.adapter else (None, None))
        if decision.quantizer == "none":  # 16-bit storage, bit for bit; in a float32 model it may be widened
            weight = dense[name].weight()
            held = layer.module.decoded() if isinstance(layer.module, FrozenLinear) else layer.weight()
            assert torch.equal(held.float(), weight.float())
            assert each.storage.bytes == weight.numel() * (4 if compute == "float32" else 2)
        else:
            assert each.storage.bytes < 1.2 * dense[name].parameters
        wrapper = inner.get_submodule(layer.path)
        assert hasattr(wrapper, "lora_A") == (decision.adapter is not None)
        guarded = bool(options.get("range_guard")) and name in plan.layers and decision.range_guard
        assert each.guarded == (guarded and compute == "float16")
    head = inner.get_output_embeddings()
    assert type(head) is nn.Linear and head.weight.dtype == getattr(torch, compute)
    assert built.plan.fingerprint == profiles[family, stored].fingerprint

    bare = plan.model_copy(
        update={
            "default": plan.default.model_copy(update={"adapter": None}),
            "layers": {n: p.model_copy(update={"adapter": None}) for n, p in plan.layers.items()},
        }
    )
    base = logits(build(make(family, stored), bare, dtype=compute))
    # DoRA computes m/‖Ŵ‖ in PEFT's own rounding
    tolerance = 0.05 if dora and compute != "float32" else 1e-5 if dora else 0
    assert (logits(built) - base).abs().max() <= tolerance * base.abs().max()


@pytest.mark.parametrize("arm", ["QLoRA", "AQLoRA-s", "DoRA over MXFP4", "range guard"])
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_an_arm_trains_in_16_bit_under_autocast(profiles, arm, compute):
    """Loss and gradients near those of the float32 model; every adapter gets one."""
    stored = getattr(torch, compute)
    plan = plan_of(profiles["llama", stored], arm)
    results = []
    for dtype in ("float32", compute):
        built = build(make("llama", stored), plan, dtype=dtype, seed=4)
        with torch.autocast("cpu", dtype=stored, enabled=dtype != "float32"):
            loss = built(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        results.append((loss.item(), {n: p.grad for n, p in adapters.trainable(built).items() if "lora_B" in n}))
    (exact, wanted), (found, gradients) = results
    assert abs(found - exact) < 0.02 * exact
    cosines = [torch.cosine_similarity(gradients[n].flatten(), wanted[n].flatten(), dim=0).item() for n in wanted]
    assert set(gradients) == set(wanted) and min(cosines) > 0.97


def test_float32_layers_of_a_float16_model_end_the_overflow():
    """A weight so large that float16 overflows inside: the plan's cure, at unchanged 16-bit storage."""
    name = "model.layers.1.mlp.down_proj"

    def big() -> nn.Module:
        model = make("llama", torch.float16)
        with torch.no_grad():
            model.get_submodule(name).weight.fill_(40)  # terms that cancel, with partial sums beyond float16
            model.get_submodule("model.layers.1.mlp.up_proj").weight *= 50
        return model

    def planned(**options) -> Plan:
        plain = Plan.protecting(None, "none", rank=4)
        kept = plain.default.model_copy(update=options)
        return plain.model_copy(update={"layers": {name: kept}})

    oracle = logits(build(big(), planned(), dtype="float32"))
    guarded = build(big(), planned(range_guard=True), dtype="float16")
    assert logits(guarded).isfinite().all()
    assert (logits(guarded) - oracle).abs().max() <= 0.02 * oracle.abs().max()
    counted = guard.counts(guarded)[name]
    assert counted.scaled > 0 and counted.saturated == 0
    wide = build(big(), planned(compute_dtype="float32"), dtype="float16")
    finite = logits(wide).isfinite().all()
    assert finite == (guard.counts(wide)[name].saturated == 0)  # never silent
    layer = {layer.name: layer for layer in built_layers(wide)}[name]
    assert {t.dtype for t in layer.module.packed.tensors.values()} == {torch.float16}


def test_mixtral_adapts_what_is_no_expert():
    model = make("mixtral")
    names = [layer.name for layer in layers_of(model) if layer.index is None]
    plain = Plan.protecting(None, "nf4", rank=3, scaler="rslora", dora=True)
    plan = plain.model_copy(
        update={
            "default": plain.default.model_copy(update={"adapter": None}),
            "layers": dict.fromkeys(names, plain.default),
        }
    )
    built = build(model, plan, dtype="bfloat16")
    assert len(adapters.trainable(built)) == 3 * len(names) == 3 * 12
    built(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(p.grad.abs().sum() > 0 for n, p in adapters.trainable(built).items() if "lora_B" in n)


def test_dora_equals_its_equation_at_a_scaling_other_than_one():
    """y = m ⊙ (Ŵ + s·BA)x / ‖Ŵ + s·BA‖ + b, over a packed weight, a bitsandbytes one and a dense Conv1D."""
    for family, quantizer, name in [
        ("llama", "mxfp4", "model.layers.1.mlp.down_proj"),
        ("llama", "nf4(block=32)", "model.layers.1.mlp.down_proj"),
        ("gpt2", "mxfp4", "transformer.h.1.mlp.c_fc"),
        ("gpt2", "none", "transformer.h.1.mlp.c_fc"),
    ]:
        plan = Plan.protecting(None, quantizer, rank=3, alpha=16, scaler="rslora", dora=True)
        built = build(make(family), plan, dtype="float32")
        layer = built.get_base_model().get_submodule(name)
        base = {each.name: each for each in layers_of(make(family))}[name].weight()
        weight = tk.quantizer(quantizer).quantize(base).dequantize(torch.float32).double()
        m = layer.lora_magnitude_vector["default"].weight
        torch.testing.assert_close(m.double(), weight.norm(dim=1), rtol=1e-6, atol=0)
        generator = torch.Generator().manual_seed(1)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        with torch.no_grad():
            b.copy_(torch.randn(b.shape, generator=generator))
            m.mul_(1 + torch.rand(m.shape, generator=generator))
            bias = getattr(layer.get_base_layer(), "bias", None)
            if bias is not None:
                bias.copy_(torch.randn(bias.shape, generator=generator))
        x = torch.randn(4, layer.in_features, generator=generator)
        whole = weight + 16 / 3**0.5 * (b.double() @ a.double())
        expected = (m.double() / whole.norm(dim=1)) * (x.double() @ whole.T) + (0 if bias is None else bias.double())
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_dora_on_some_adapters_only_is_refused_before_anything_is_loaded():
    plain, dora = (Plan.protecting(None, "nf4", rank=3, dora=flag) for flag in (False, True))
    name = "model.layers.0.mlp.up_proj"
    mixed = plain.model_copy(update={"layers": {name: dora.default}})
    with pytest.raises(InputError, match=f"layer {name} has DoRA and layer default has not"):
        build("/nowhere", mixed)


def test_the_audit_sees_dora_and_the_guard():
    plan = Plan.protecting(None, "none", rank=3, dora=True)
    built = build(make(dtype=torch.float16), plan, dtype="float16")
    planned = decide(make(), plan)
    name = next(iter(planned))
    bare = planned[name].adapter.model_copy(update={"dora": False})
    wrong = planned | {name: planned[name].model_copy(update={"adapter": bare})}
    with pytest.raises(RunError, match=f"{name}: the adapter is planned without DoRA"):
        audit(built, wrong, torch.float16)
    wrong = planned | {name: planned[name].model_copy(update={"range_guard": True})}
    with pytest.raises(RunError, match=f"{name}: the range guard is planned and missing"):
        audit(built, wrong, torch.float16)


def test_the_audit_sees_another_compute_dtype():
    name = "model.layers.0.mlp.up_proj"
    plan = Plan.protecting(None, "mxfp4")
    built = build(make(), plan, dtype="bfloat16")
    built.get_submodule(name).compute_dtype = torch.float32
    with pytest.raises(RunError, match=f"{name}: it is planned to compute in bfloat16, found float32"):
        audit(built, decide(make(), plan), torch.bfloat16)


def test_attention_is_the_one_asked_for(checkpoints):
    plan = Plan.protecting(None, "none")
    for model in (checkpoints("llama"), make()):
        assert build(model, plan, device="cpu", attention="eager").config._attn_implementation == "eager"
    model = build(make(), plan, attention="eager")
    assert build(model, plan).config._attn_implementation == "eager"  # its own, where none is asked for
    with pytest.raises(InputError, match="cannot attend by 'none such'"):
        build(make(), plan, attention="none such")
    with pytest.raises(InputError, match="cannot load the model"):
        build(checkpoints("llama"), plan, device="cpu", attention="none such")


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["LoRA", "QLoRA", "QDoRA", "AQLoRA-s, rsLoRA", "DoRA over MXFP4", "range guard"])
def test_on_a_gpu_an_arm_starts_and_trains_as_on_the_cpu(profiles, arm, tmp_path):
    plan = plan_of(profiles["llama", torch.float16], arm)
    here = build(make("llama", torch.float16), plan, dtype="float32", seed=4)
    there = build(make("llama", torch.float16), plan, device="cuda", dtype="float16", seed=4)
    for name, parameter in adapters.trainable(here).items():
        if "lora_A" in name:
            assert torch.equal(parameter, adapters.trainable(there)[name].cpu())
    losses = []
    for model, device in ((here, "cpu"), (there, "cuda")):
        ids = IDS.to(device)
        with torch.autocast(device, dtype=torch.float16, enabled=device == "cuda"), adapters.uncast(model):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad.isfinite().all() for p in adapters.trainable(model).values())
    assert abs(losses[0] - losses[1]) < 0.02 * losses[0]
    folder = adapters.save(there, tmp_path)
    adapters.load(here, folder)
