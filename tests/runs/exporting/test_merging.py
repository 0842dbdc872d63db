"""Merged checkpoints and merges into quantized bases: exact sums, one rounding, and what survives."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import toolkit as tk
from tests.runs.exporting.conftest import begin, logits, plan_of, stock
from toolkit.errors import InputError
from toolkit.records.exported import Exported
from toolkit.registry import registry
from toolkit.runs import adapters, starts
from toolkit.runs.exporting.changes import Change, Kept, once
from toolkit.runs.starting.calibrating import calibrate
from toolkit.runs.starting.computing import initialize
from toolkit.weights.layers import layers_of


def weights_of(model):
    return {layer.name: layer.weight().contiguous() for layer in layers_of(model)}


def dense(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def parts(folder, name):
    held = load_file(folder / adapters.WEIGHTS)
    return [held[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB"]


# one rounding


def nearest(value: float, dtype: torch.dtype) -> float:
    """To nearest, ties to even, of an exact number, by exact arithmetic over the neighbours in `dtype`."""
    start = torch.tensor(value, dtype=torch.float64).to(dtype)
    bits = int(start.view(torch.uint16))
    around = [torch.tensor((bits + step) & 0xFFFF, dtype=torch.uint16).view(dtype) for step in (-1, 0, 1)]
    finite = [x for x in around if bool(x.isfinite())]
    exact = Fraction(value)
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(torch.uint16)) & 1)).item()


@given(
    mantissa=st.integers(-(2**53) + 1, 2**53 - 1),
    exponent=st.integers(-70, -50),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_float64_is_rounded_once(mantissa, exponent, dtype):
    value = math.ldexp(mantissa, exponent)
    assert once(torch.tensor([value], dtype=torch.float64), dtype).item() == nearest(value, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tie_that_float32_makes_up_is_none(dtype):
    """1 + 2⁻ᵏ + 2⁻⁴⁰ lies above the middle; float32 rounds it to the middle, and twice rounded it falls to 1."""
    step = torch.finfo(dtype).eps
    value = torch.tensor([1 + step / 2 + 2**-40, -(1 + step / 2 + 2**-40)], dtype=torch.float64)
    assert once(value, dtype).tolist() == [1 + step, -1 - step]
    assert value.float().to(dtype).tolist() == [1.0, -1.0]
    assert once(value, torch.float32).tolist() == value.float().tolist()


def test_infinity_and_zero_stay():
    values = torch.tensor([0.0, -0.0, 1e300, -1e300, 7e4], dtype=torch.float64)
    assert once(values, torch.float16).tolist() == [0.0, -0.0, math.inf, -math.inf, math.inf]


# merged in 16 bit


@pytest.mark.parametrize("scaler", ["lora", "rslora"])
@pytest.mark.parametrize("family", ["llama", "untied", "gpt2", "phi3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_layer_is_its_base_and_s_times_ba_rounded_once(tmp_path, source, adapted, scaler, family, dtype):
    adapter, ours = adapted(family, "nf4", dtype=dtype, scaler=scaler)
    s = 16 / (4 if scaler == "lora" else 2)
    report = tk.export(adapter, "merged", tmp_path / "m", model=source(family, dtype))
    got, before = weights_of(dense(tmp_path / "m")), weights_of(dense(source(family, dtype)))
    quantizer = registry.make("quantizer", "nf4")
    assert set(got) == set(before)
    for name, weight in before.items():
        a, b = parts(adapter, name)
        start = quantizer.quantize(weight).dequantize(dtype)
        exact = start.double().numpy() + s * (b.numpy() @ a.numpy())
        assert got[name].dtype == dtype
        if dtype == torch.float32:
            np.testing.assert_allclose(got[name].double().numpy(), exact, rtol=2**-23, atol=1e-9)
        else:
            assert torch.equal(got[name], once(torch.from_numpy(exact), dtype)), name
        assert report.layers[name].merged.share == pytest.approx(1, abs=1e-3)
    scale = logits(ours).abs().max()
    assert (logits(dense(tmp_path / "m")) - logits(ours)).abs().max() < (
        0.05 if dtype == torch.bfloat16 else 1e-4
    ) * scale
    assert report.onto == "base" and report.form == "merged" and report.adapter


def test_peft_merges_to_the_same(tmp_path, source):
    """Stock PEFT over a dense float32 model, s = 8; ours differs by float32 rounding of its sum."""
    adapter_model = tk.build(
        source("llama", torch.float32), plan_of("none", scaler="rslora"), device="cpu", dtype="float32"
    )
    with torch.no_grad():
        for p in adapters.trainable(adapter_model).values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) * 0.05)
    adapters.save(adapter_model, tmp_path / "adapter")
    report = tk.export(
        tmp_path / "adapter", "merged", tmp_path / "m", model=source("llama", torch.float32), onto="dense"
    )
    base = dense(source("llama", torch.float32))
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    for name, weight in weights_of(theirs).items():
        torch.testing.assert_close(weights_of(dense(tmp_path / "m"))[name], weight, rtol=1e-5, atol=1e-6)
    assert report.merged.share == pytest.approx(1, abs=1e-6) and report.onto == "dense"


@pytest.mark.parametrize("quantizer", ["none", "nvfp4"])
def test_dora_merges_by_its_formula(tmp_path, source, adapted, quantizer):
    adapter, ours = adapted("llama", quantizer, dtype=torch.float32, dora=True)
    tk.export(adapter, "merged", tmp_path / "m", model=source("llama", torch.float32))
    merged = dense(tmp_path / "m")
    assert (logits(merged) - logits(ours)).abs().max() < 1e-4 * logits(ours).abs().max()
    name = "model.layers.1.mlp.down_proj"
    magnitude = load_file(adapter / adapters.WEIGHTS)[f"base_model.model.{name}.lora_magnitude_vector"]
    rows = torch.linalg.norm(weights_of(merged)[name].double(), dim=1)
    torch.testing.assert_close(rows, magnitude.double().abs(), rtol=1e-6, atol=0)


def test_a_bias_of_b_is_scaled_too(tmp_path, source):
    """PEFT's `lora_bias`, which our own plans never make, merged as PEFT itself merges it."""
    folder = tmp_path / "adapter"
    base = dense(source("untied", torch.float32))
    config = LoraConfig(r=4, lora_alpha=16, use_rslora=True, lora_bias=True, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, config)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_" in n:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))) * 0.1)
    model.save_pretrained(folder)
    plan = plan_of("none", scaler="rslora")
    names = [f"model.layers.{i}.self_attn.{r}_proj" for i in range(2) for r in "qv"]
    bare = plan.default.model_copy(update={"adapter": None})
    plan.model_copy(update={"default": bare, "layers": dict.fromkeys(names, plan.default)}).save(folder / "plan.json")
    tk.export(folder, "merged", tmp_path / "m", model=source("untied", torch.float32), onto="dense")
    theirs, got = model.merge_and_unload(), dense(tmp_path / "m")
    for name in names:
        one, other = got.get_submodule(name), theirs.get_submodule(name)
        torch.testing.assert_close(one.bias, other.bias, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.weight, other.weight, rtol=1e-5, atol=1e-6)
        assert (one.bias - dense(source("untied", torch.float32)).get_submodule(name).bias).abs().max() > 0.05


def test_dense_and_base_are_what_they_say(tmp_path, source, adapted):
    adapter, _ = adapted("llama", "nf4", ("model.layers.0.mlp.up_proj",))
    name = "model.layers.1.mlp.up_proj"
    a, b = parts(adapter, name)
    before = weights_of(dense(source("llama")))[name]
    for onto, start in (("dense", before), ("base", registry.make("quantizer", "nf4").quantize(before).dequantize())):
        tk.export(adapter, "merged", tmp_path / onto, model=source("llama"), onto=onto)
        got = weights_of(dense(tmp_path / onto))[name]
        assert torch.equal(got, once(start.double() + 8 * b @ a, torch.bfloat16))


def test_a_wider_and_a_narrower_dtype(tmp_path, source, adapted):
    adapter, _ = adapted("llama", "nf4", dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.k_proj"
    a, b = parts(adapter, name)
    base = registry.make("quantizer", "nf4").quantize(weights_of(dense(source("llama")))[name])
    for dtype in (torch.float32, torch.float16):
        tk.export(adapter, "merged", tmp_path / str(dtype), model=source("llama"), dtype=dtype)
        model = dense(tmp_path / str(dtype))
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert torch.equal(weights_of(model)[name], once(base.dequantize(dtype).double() + 8 * b @ a, dtype))


def test_starts_merge_onto_their_own_base_alone(tmp_path, source, adapted):
    folder = begin(tmp_path / "starts", source("llama"), plan_of("nf4", initializer="loftq"))
    adapter, ours = adapted("llama", "nf4", initializer="loftq", start=folder)
    with pytest.raises(InputError, match="added twice"):
        tk.export(adapter, "merged", tmp_path / "d", model=source("llama"), start=folder, onto="dense")
    tk.export(adapter, "merged", tmp_path / "m", model=source("llama"), start=folder)
    scale = logits(ours).abs().max()
    assert (logits(dense(tmp_path / "m")) - logits(ours)).abs().max() < 0.05 * scale
    # the starts alone: nearer to the dense weights than the quantizer's own base is
    begun = tk.export(folder, "merged", tmp_path / "b", model=source("llama"), dtype="float32")
    before, after = weights_of(dense(source("llama"))), weights_of(dense(tmp_path / "b"))
    for name, weight in before.items():
        exact = weight.float()
        plain = registry.make("quantizer", "nf4").quantize(weight).dequantize(torch.float32)
        assert (after[name] - exact).norm() < 0.999 * (plain - exact).norm()
    assert begun.adapter is not None and begun.start == ours.plan.start


@pytest.mark.parametrize("how", ["loftq(iterations=1)", "qera"])
def test_a_fit_over_the_quantizers_own_base_is_not_added_to_the_dense_weights(tmp_path, source, how):
    """The base is Q(W) and has no digest, and A and B hold W − Q(W) all the same."""
    initializer = "loftq(iterations=1)" if how != "qera" else "qera-approx"
    plan = plan_of("nf4", initializer=initializer)
    if how == "qera":
        text = tmp_path / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
        calibrate(plan, str(text), tmp_path / "s", model=source("llama"), windows=2, window=64, device="cpu")
    else:
        initialize(plan, source("llama"), tmp_path / "s", device="cpu")
    ask = {"model": source("llama")}
    with pytest.raises(InputError, match="added twice"):
        tk.export(tmp_path / "s", "merged", tmp_path / "d", onto="dense", **ask)
    tk.export(tmp_path / "s", "merged", tmp_path / "m", dtype="float32", **ask)
    report = tk.export(tmp_path / "s", "bnb", tmp_path / "b", merge=True, least=0, **ask)
    assert report.start is None and report.onto == "base"
    notes = tk.export(tmp_path / "s", "peft", tmp_path / "p", **ask).notes
    assert any("not to the model in 16 bit" in note for note in notes)
    after = weights_of(dense(tmp_path / "m"))
    for name, weight in weights_of(dense(source("llama"))).items():
        start = starts.read(tmp_path / "s", name)
        expected = start.effective(torch.float32)
        assert torch.allclose(after[name], expected, rtol=0, atol=1e-6)
        assert torch.equal(start.base.dequantize(), registry.make("quantizer", "nf4").quantize(weight).dequantize())


def test_starts_of_a_plan_with_protected_layers_merge_too(tmp_path, source):
    """A protected layer has an adapter and starts plainly: the starts hold none of it, and it adds nothing."""
    keep = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj")
    folder = begin(tmp_path / "starts", source("llama"), plan_of("nf4", keep, initializer="loftq"))
    report = tk.export(folder, "merged", tmp_path / "m", model=source("llama"))
    ours = tk.build(source("llama"), plan_of("nf4", keep, initializer="loftq"), device="cpu", start=folder)
    before, after = weights_of(dense(source("llama"))), weights_of(dense(tmp_path / "m"))
    for name, weight in before.items():
        assert torch.equal(after[name], weight) == (name in keep)
        assert (report.layers[name].merged is None) == (name in keep)
    assert (logits(dense(tmp_path / "m")) - logits(ours)).abs().max() < 0.05 * logits(ours).abs().max()
    packed = tk.export(folder, "bnb", tmp_path / "b", model=source("llama"), merge=True, least=0)
    assert {name for name, layer in packed.layers.items() if layer.merged is None} == set(keep)


def test_experts_that_are_quantized_are_decoded(tmp_path, source):
    """Stacked parameters keep their place; an adapter on attention is merged beside them."""
    plan = plan_of("nvfp4")
    bare = plan.default.model_copy(update={"adapter": None})
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    plan = plan.model_copy(update={"default": bare, "layers": dict.fromkeys(names, plan.default)})
    ours = tk.build(source("mixtral"), plan, device="cpu", dtype="bfloat16")
    with torch.no_grad():
        for p in adapters.trainable(ours).values():
            p.add_(0.02)
    adapters.save(ours, tmp_path / "adapter")
    tk.export(tmp_path / "adapter", "merged", tmp_path / "m", model=source("mixtral"))
    before, after = weights_of(dense(source("mixtral"))), weights_of(dense(tmp_path / "m"))
    for name, weight in before.items():
        if name not in names:
            assert torch.equal(after[name], registry.make("quantizer", "nvfp4").quantize(weight).dequantize()), name
    scale = logits(ours).abs().max()
    assert (logits(dense(tmp_path / "m")) - logits(ours)).abs().max() < 0.05 * scale


# merged and quantized again


def test_the_share_is_the_projection_along_the_change():
    before = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    meant = before + torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    after = before + torch.tensor([[0.5, 1.0], [0.0, 2.0]])
    found = Kept.of(before, after, meant).survival()
    assert found.share == pytest.approx((0.5 + 4) / 5) and found.norm == pytest.approx(math.sqrt(5.25 / 5))
    assert found.change == pytest.approx(math.sqrt(5 / 30))
    none = Kept.of(before, before, before).survival()
    assert none.share is None and none.norm is None and none.change == 0


@pytest.mark.parametrize(("form", "quantizer"), [("bnb", "nf4"), ("compressed-tensors", "nvfp4")])
@pytest.mark.parametrize("onto", ["dense", "base"])
def test_a_merge_into_a_quantized_base_reports_what_survives(tmp_path, source, adapted, form, quantizer, onto):
    adapter, _ = adapted("llama", quantizer, size=0.02)
    more = {"fused": "separate"} if form == "compressed-tensors" else {}
    report = tk.export(adapter, form, tmp_path / "m", model=source("llama"), merge=True, onto=onto, least=0, **more)
    maker = registry.make("quantizer", quantizer)
    along = change = 0.0
    for name, weight in weights_of(dense(source("llama"))).items():
        a, b = parts(adapter, name)
        delta = 8 * b @ a
        packed = maker.quantize(weight)
        base = packed.dequantize(torch.float32).double()
        start = weight.double() if onto == "dense" else base
        after = maker.quantize((start + delta).float()).dequantize(torch.float32).double()
        share = ((after - base) * delta).sum() / delta.square().sum()
        assert report.layers[name].merged.share == pytest.approx(share.item(), rel=1e-6, abs=1e-9)
        norm = (after - base).norm() / delta.norm()
        assert report.layers[name].merged.norm == pytest.approx(norm.item(), rel=1e-6)
        along, change = along + float(((after - base) * delta).sum()), change + float(delta.square().sum())
    assert report.merged.share == pytest.approx(along / change, rel=1e-6)
    assert report.onto == onto and {layer.base for layer in report.layers.values()} == {"merged"}
    if form == "bnb":
        theirs = stock(tmp_path / "m", torch.bfloat16)
        name = "model.layers.1.mlp.gate_proj"
        a, b = parts(adapter, name)
        weight = weights_of(dense(source("llama")))[name]
        start = weight.double() if onto == "dense" else maker.quantize(weight).dequantize(torch.float32).double()
        codes = maker.quantize((start + 8 * b @ a).float()).tensors["codes"]
        assert torch.equal(theirs.get_submodule(name).weight.data.view(-1), codes)


def test_a_change_that_rounding_loses_is_refused(tmp_path, source, adapted):
    """Onto the decoded base a small change falls below half a step, and nothing of it arrives."""
    adapter, _ = adapted("llama", "nvfp4", size=0.0005)
    ask = {"model": source("llama"), "merge": True, "onto": "base"}
    with pytest.raises(InputError, match=r"less than 0\.5 in 14 of 14 layers \(model\.layers"):
        tk.export(adapter, "compressed-tensors", tmp_path / "m", **ask)
    assert not (tmp_path / "m").exists()
    report = tk.export(adapter, "compressed-tensors", tmp_path / "m", least=0, **ask)
    assert report.merged.share < 0.2


def test_a_shared_scale_counts_in_what_survives(tmp_path, source, adapted):
    adapter, _ = adapted("llama", "nvfp4", size=0.03)
    ask = {"model": source("llama"), "merge": True, "least": 0}
    shared = tk.export(adapter, "compressed-tensors", tmp_path / "s", **ask)
    apart = tk.export(adapter, "compressed-tensors", tmp_path / "a", fused="separate", **ask)
    moved = [n for n, layer in shared.layers.items() if layer.rescaled is not None]
    assert moved and all(shared.layers[n].merged.share != apart.layers[n].merged.share for n in moved)
    still = [n for n in shared.layers if n not in moved]
    assert still and all(shared.layers[n].merged == apart.layers[n].merged for n in still)


def test_a_protected_layer_is_merged_in_16_bit_beside_the_packed_ones(tmp_path, source, adapted):
    name = "model.layers.0.mlp.down_proj"
    adapter, _ = adapted("llama", "nf4", (name,))
    report = tk.export(adapter, "bnb", tmp_path / "m", model=source("llama"), merge=True, least=0)
    a, b = parts(adapter, name)
    before = weights_of(dense(source("llama")))[name]
    got = stock(tmp_path / "m", torch.bfloat16).get_submodule(name)
    assert type(got) is nn.Linear
    assert torch.equal(got.weight, once(before.double() + 8 * b @ a, torch.bfloat16))
    assert report.layers[name].quantizer is None and report.layers[name].merged.share == pytest.approx(1, abs=1e-3)


def test_an_adapter_that_changes_nothing_survives_nothing_and_is_not_refused(tmp_path, source):
    model = tk.build(source("llama"), plan_of("nf4"), device="cpu", dtype="bfloat16")
    adapters.save(model, tmp_path / "adapter")  # B = 0
    report = tk.export(tmp_path / "adapter", "bnb", tmp_path / "m", model=source("llama"), merge=True)
    assert report.merged.share is None
    assert Exported.load(tmp_path / "m" / "export.json").layers == report.layers


# what is refused


def spoil(folder, edit):
    held = load_file(folder / adapters.WEIGHTS)
    edit(held)
    save_file({k: v.contiguous() for k, v in held.items()}, folder / adapters.WEIGHTS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h.update({next(iter(h)): next(iter(h.values())) * math.nan}), "NaN, infinity"),
        (lambda h: h.pop(sorted(h)[0]), r"holds B of layer model\.layers\.0\.mlp\.down_proj; A and B"),
        (lambda h: [h.pop(k) for k in sorted(h)[:2]], r"no adapter of layer model\.layers\.0\.mlp\.down_proj"),
        (lambda h: h.update({"base_model.model.lm_head.modules_to_save": torch.zeros(2)}), "no LoRA or DoRA"),
        (lambda h: h.update({"base_model.model.model.layers.0.mlp.up_prj.lora_A.weight": torch.zeros(4, 64)}),
         r"adapts layer 'model\.layers\.0\.mlp\.up_prj', which the model has not; did you mean .*up_proj"),
        (lambda h: h.update({k: v[:2] if ".lora_A" in k else v[:, :2] for k, v in h.items()}), r"has rank \{2\}"),
    ],
    ids=["nan", "half", "missing", "other", "name", "rank"],
)  # fmt: skip
def test_a_damaged_adapter_is_refused(tmp_path, source, adapted, edit, message):
    adapter, _ = adapted("llama", "nf4")
    spoil(adapter, edit)
    with pytest.raises(InputError, match=message):
        tk.export(adapter, "merged", tmp_path / "m", model=source("llama"))


@pytest.mark.parametrize(
    ("form", "options", "grow"),
    [
        ("merged", {"dtype": "float16"}, 1e7),
        ("bnb", {"merge": True}, 1e30),
        ("bnb", {"merge": True, "dtype": "float16"}, 1e7),
    ],
    ids=["merged", "quantized", "kept dense"],
)
def test_a_sum_that_its_dtype_cannot_hold_is_refused_by_the_layers_name(tmp_path, source, adapted, form, options, grow):
    """Not written as infinity: in 16 bit, in a base that is quantized again, and in a dense layer beside it."""
    name = "model.layers.1.mlp.up_proj"
    adapter, _ = adapted("llama", "nf4", (name,) if grow == 1e7 and form == "bnb" else ())
    spoil(adapter, lambda h: h.update({k: v * grow for k, v in h.items() if name in k}))
    with pytest.raises(InputError, match=rf"layer {re.escape(name)}\W.*infinity"):
        tk.export(adapter, form, tmp_path / "m", model=source("llama"), **options)
    assert not (tmp_path / "m").exists()


def test_a_scaling_that_stock_peft_reads_otherwise_is_refused(tmp_path, source, adapted):
    from toolkit.records.io import read_json, write_json

    adapter, _ = adapted("llama", "nf4")
    config = read_json(adapter / adapters.CONFIG)
    assert config["use_rslora"] is True and config["lora_alpha"] == 16
    write_json(adapter / adapters.CONFIG, config | {"use_rslora": False})
    with pytest.raises(InputError, match=r"scales layer model\..* by 4, and the plan by 8"):
        tk.export(adapter, "merged", tmp_path / "m", model=source("llama"))


def test_changes_are_computed_in_float64():
    a, b, w = torch.randn(3, 5), torch.randn(7, 3), torch.randn(7, 5)
    exact = w.double().numpy() + 5.65685424949238 * (b.double().numpy() @ a.double().numpy())
    np.testing.assert_allclose(Change(a, b, 5.65685424949238).onto(w).numpy(), exact, rtol=1e-14, atol=1e-14)
