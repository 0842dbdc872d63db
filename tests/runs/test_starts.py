"""Starts in built models: what a layer holds and computes, what is read back, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

import toolkit as tk
from tests.conftest import configs
from toolkit.cli import main
from toolkit.errors import InputError
from toolkit.interfaces import Given, Initializer, Start
from toolkit.records.plan import Adapter, LayerPlan, Plan
from toolkit.records.start import StartFile
from toolkit.registry import registry
from toolkit.runs import adapters, starts
from toolkit.runs.audit import built_layers
from toolkit.runs.building import build
from toolkit.runs.frozen import FrozenLinear
from toolkit.weights.layers import layers_of
from toolkit.weights.profiling import fingerprint_of

IDS = torch.arange(48).view(2, 24) * 7 % 256
S2 = {"rank": 8, "alpha": 16.0, "scaler": "lora"}
S566 = {"rank": 8, "alpha": 16.0, "scaler": "rslora"}


def make(family: str = "llama", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs()[family])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.to(dtype).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits.float()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {layer.name: layer.weight() for layer in layers_of(model)}


def expected(plan: Plan, model: nn.Module, seed: int = 0, dtype=torch.float32) -> dict[str, Start]:
    """The starts by `tk.initialize`, a layer at a time."""
    found = {}
    for name, weight in weights(model).items():
        layer = plan.of(name)
        about = {}
        if layer.adapter is not None:
            about = {"rank": layer.adapter.rank, "alpha": layer.adapter.alpha, "scaler": layer.adapter.scaler}
        found[name] = tk.initialize(
            weight, layer.initializer, layer.quantizer, seed=seed, name=name, dtype=dtype, **about
        )
    return found


def put(model: nn.Module, effective: dict[str, torch.Tensor]) -> nn.Module:
    """A dense float32 model with these weights (out, in)."""
    model = model.float()
    with torch.no_grad():
        for layer in layers_of(model):
            layer.weight().copy_(effective[layer.name])
    return model


def written(folder: Path, plan: Plan, model: nn.Module, seed: int = 0) -> Path:
    """A folder of starts as the layout says, made from `tk.initialize`."""
    layers, bases = {}, {}
    dense = weights(model)
    for name, start in expected(plan, model, seed).items():
        layer = plan.of(name)
        base = starts.changed(start, dense[name])
        if base is not None:
            bases[name] = base
        layers[name] = {
            "initializer": layer.initializer,
            "quantizer": layer.quantizer,
            "rank": layer.adapter.rank if layer.adapter else None,
            "scaling": start.scaling,
            "residuals": list(start.residuals),
            "kept": start.kept,
            "base": base,
        }
        starts.write(folder, name, start)
    StartFile(
        fingerprint=fingerprint_of(model),
        plan=plan.hash,
        dtype="float32",
        base=starts.digest_over(bases),
        layers=layers,
    ).save(folder / starts.REPORT)
    return folder


def held(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """A, B and s of every adapter, by layer."""
    found = {}
    for name, module in model.get_base_model().named_modules():
        if getattr(module, "lora_A", None):
            found[name] = {
                "A": module.lora_A["default"].weight.detach(),
                "B": module.lora_B["default"].weight.detach(),
                "s": module.scaling["default"],
            }
    return found


# what is built


@pytest.mark.parametrize("initializer", ["loftq(iterations=2)", "pissa"])
@pytest.mark.parametrize(
    "quantizer", ["nf4", "nf4(double=false)", "fp4-bnb", "fp4-e2m1", "nvfp4", "mxfp4", "residual", "none"]
)
def test_a_built_model_is_its_starts(quantizer, initializer):
    """Every A and B, and logits those of a dense float32 model with the weights Ŵ + s·BA; s = 2 and 5.66."""
    about = S566 if initializer == "pissa" else S2
    plan = Plan.protecting(None, quantizer, initializer=initializer, **about)
    found = expected(plan, make())
    model = build(make(), plan, dtype="float32")
    inside = held(model)
    s = 16 / 8**0.5 if about is S566 else 2.0
    assert set(inside) == set(found)
    for name, start in found.items():
        assert torch.equal(inside[name]["A"], start.A) and torch.equal(inside[name]["B"], start.B)
        assert inside[name]["s"] == start.scaling == pytest.approx(s, rel=1e-12)
    dense = put(make(), {name: start.effective(torch.float32) for name, start in found.items()})
    truth = logits(dense)
    assert (logits(model) - truth).abs().max() < 2e-5 * truth.abs().max()
    records = model.starts
    assert {n: r.residuals for n, r in records.items()} == {n: list(each.residuals) for n, each in found.items()}
    if quantizer != "none" and initializer != "pissa":
        assert all(r.residuals[r.kept] < r.residuals[0] for r in records.values())


@pytest.mark.parametrize("family", ["gpt2", "phi3", "mixtral"])
def test_other_families_start_alike(family):
    """Conv1D stores its weight the other way round; fused layers are one; experts start plainly."""
    names = [layer.name for layer in layers_of(make(family)) if layer.index is None]
    adapter = Adapter(rank=3, alpha=16, scaler="rslora", scaling=16 / 3**0.5)
    layer = LayerPlan(quantizer="nvfp4", adapter=adapter, initializer="loftq(iterations=2)")
    plan = Plan(default=LayerPlan(quantizer="nvfp4"), layers=dict.fromkeys(names, layer))
    found = expected(plan, make(family))
    model = build(make(family), plan, dtype="float32")
    assert set(held(model)) == set(names) == set(model.starts)
    dense = put(make(family), {name: start.effective(torch.float32) for name, start in found.items()})
    truth = logits(dense)
    assert (logits(model) - truth).abs().max() < 2e-5 * truth.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_16_bit_base_is_replaced_where_the_initializer_changes_it(family):
    """PiSSA over 16 bit, computed as it is stored: the dense layers hold W − s·BA, rounded to bfloat16."""
    plan = Plan.protecting(None, "none", initializer="pissa", **S2)
    before = weights(make(family))
    found = expected(plan, make(family), dtype=torch.bfloat16)
    model = build(make(family), plan, dtype="bfloat16")
    for layer in built_layers(model):
        if layer.name in found:
            start = found[layer.name]
            assert torch.equal(layer.weight(), start.base.dequantize(torch.bfloat16))
            assert not torch.equal(layer.weight(), before[layer.name])
    assert model.plan.start is not None


def test_an_untied_head_leaves_the_embeddings_as_they_were():
    head = LayerPlan(
        quantizer="none", adapter=Adapter(rank=2, alpha=8, scaler="lora", scaling=4.0), initializer="pissa"
    )
    plan = Plan(default=LayerPlan(quantizer="nf4"), layers={"lm_head": head})
    model = build(make(), plan, dtype="bfloat16")
    inner = model.get_base_model()
    assert torch.equal(inner.get_input_embeddings().weight, make().get_input_embeddings().weight)
    assert not torch.equal(inner.lm_head.base_layer.weight, inner.get_input_embeddings().weight)


@pytest.mark.parametrize("quantizer", ["nf4", "nvfp4", "none"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_starts_at_the_effective_weight(quantizer, family):
    """m = ‖Ŵ + s·BA‖ by rows, so that DoRA computes Ŵ + s·BA; ‖Ŵ‖ would scale rows wrongly."""
    plan = Plan.protecting(None, quantizer, dora=True, initializer="loftq(iterations=1)", **S566)
    if quantizer == "none":
        plan = Plan.protecting(None, quantizer, dora=True, initializer="pissa", **S566)
    found = expected(plan, make(family))
    model = build(make(family), plan, dtype="float32")
    inner = model.get_base_model()
    for name, start in found.items():
        effective = start.effective(torch.float32)
        m = inner.get_submodule(name).lora_magnitude_vector["default"].weight.detach()
        assert torch.allclose(m, effective.double().norm(dim=1).float(), rtol=1e-6)
    dense = put(make(family), {name: start.effective(torch.float32) for name, start in found.items()})
    truth = logits(dense)
    assert (logits(model) - truth).abs().max() < 5e-5 * truth.abs().max()


def test_layers_that_start_plainly_are_as_before():
    """A protected layer and a plain base beside LoftQ: no start is recorded for them, and B is zero."""
    profile = tk.profile(make(), ["nf4"], progress=False)
    top = tk.select("top-error", profile, "layers=0.2")
    plan = Plan.protecting(top, "nf4", initializer="loftq(iterations=1)", **S2)
    model = build(make(), plan, dtype="float32", seed=3)
    inside = held(model)
    for name in inside:
        assert (name in model.starts) == (name not in top.layers) == bool(inside[name]["B"].any())
        if name in top.layers:
            shape = weights(make())[name].shape
            assert torch.equal(inside[name]["A"], adapters.initial(3, name, 8, tuple(shape)))
    assert build(make(), Plan.protecting(top, "nf4", **S2)).plan.start is None


# read from a folder


class Shifted(Initializer):
    """A base of another weight, with no adapter's part: what methods that only compensate errors give."""

    name = "shifted"
    needs_rank = False
    needs_calibration = True

    def initialize(self, given: Given) -> Start:
        b = None if given.rank is None else torch.zeros(given.weight.shape[0], given.rank)
        return Start(given.quantizer.quantize(given.weight * 0.9), given.A, b, given.scaling, (0.1, 0.2), 1)


class Fitted(Shifted):
    """The same without calibration."""

    name = "fitted"
    needs_calibration = False


@pytest.fixture
def component():
    made = []

    def register(cls):
        tk.register(cls)
        made.append(f"{cls.__module__}.{cls.__qualname__}:inline")
        return cls

    yield register
    for name in made:
        registry.manager.unregister(name=name)


@pytest.mark.parametrize("quantizer", ["nf4", "nvfp4", "none"])
def test_built_saved_and_built_again(tmp_path, quantizer):
    """From its folder, at another seed, with the trained adapter: the same logits bit for bit."""
    plan = Plan.protecting(None, quantizer, initializer="pissa(iterations=2)", **S566)
    folder = written(tmp_path / "starts", plan, make())
    inline, model = build(make(), plan, dtype="float32"), build(make(), plan, dtype="float32", start=folder)
    assert torch.equal(logits(inline), logits(model))
    assert inline.plan == model.plan and model.plan.start == StartFile.load(folder / starts.REPORT).base
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.trainable(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    truth = logits(model)
    saved = adapters.save(model, tmp_path / "adapter")
    again = build(make(), Plan.load(saved / adapters.PLAN), dtype="float32", seed=9, start=folder)
    assert not torch.equal(logits(again), truth)
    adapters.load(again, saved)
    assert torch.equal(logits(again), truth)
    config = json.loads((saved / adapters.CONFIG).read_text())
    assert config["use_rslora"] is True and (config["r"], config["lora_alpha"]) == (8, 16.0)
    assert model.plan.start[:12] in config["base_model_name_or_path"]


def test_stock_peft_loads_it_over_the_same_base(tmp_path):
    """Over the dense decoded bases, in stock PEFT: the same logits; s by rsLoRA as recorded."""
    plan = Plan.protecting(None, "nvfp4", initializer="loftq(iterations=2)", **S566)
    model = build(make(), plan, dtype="float32")
    saved = adapters.save(model, tmp_path / "adapter")
    bases = {name: start.base.dequantize(torch.float32) for name, start in expected(plan, make()).items()}
    stock = PeftModel.from_pretrained(put(make(), bases), saved).eval()
    truth = logits(model)
    assert (logits(stock) - truth).abs().max() < 2e-5 * truth.abs().max()


def test_an_adapter_is_refused_on_another_base(tmp_path):
    """The same weights and adapters: only the start tells the bases apart."""
    loftq, plain = (Plan.protecting(None, "nf4", initializer=i, **S2) for i in ("loftq(iterations=2)", "zero"))
    model, other = build(make(), loftq, dtype="float32"), build(make(), plain, dtype="float32")
    longer = build(make(), Plan.protecting(None, "nf4", initializer="pissa", **S2), dtype="float32")
    saved = adapters.save(model, tmp_path / "adapter")
    assert len({each.plan.start for each in (model, other, longer)}) == 3
    for target in (other, longer):
        with pytest.raises(InputError, match=r"another base.*start"):
            adapters.load(target, saved)
    with pytest.raises(InputError, match="start"):
        adapters.load(model, adapters.save(longer, tmp_path / "longer"))
    from_longer = Plan.load(tmp_path / "longer" / adapters.PLAN)
    with pytest.raises(InputError, match="no initializer has changed this one"):
        build(make(), plain.model_copy(update={"start": from_longer.start}), dtype="float32")


def test_a_start_that_adds_nothing_takes_the_runs_own_a(tmp_path, component):
    """One folder serves runs of every seed, which start alike wherever they adapt: A of (seed, name, rank, shape)."""
    component(Shifted)
    plan = Plan.protecting(None, "nvfp4", initializer="shifted", **S2)
    folder = written_calibrated(tmp_path / "starts", plan, make())
    model = build(make(), plan, dtype="float32", seed=5, start=folder)
    for name, each in held(model).items():
        assert torch.equal(each["A"], adapters.initial(5, name, 8, tuple(weights(make())[name].shape)))
        assert not each["B"].any()
    assert model.plan.start is not None


def written_calibrated(folder: Path, plan: Plan, model: nn.Module) -> Path:
    """Starts of `shifted`, as if calibrated."""
    layers, bases = {}, {}
    for name, weight in weights(model).items():
        layer = plan.of(name)
        rank, s = (None, 1.0) if layer.adapter is None else (layer.adapter.rank, layer.adapter.scaling)
        a = None if rank is None else adapters.initial(0, name, rank, tuple(weight.shape))
        quantizer = registry.make("quantizer", layer.quantizer)
        start = Shifted().initialize(Given(name, weight, quantizer, rank, s, a))
        bases[name] = starts.digest_of(start.base)
        layers[name] = {
            "initializer": "shifted",
            "quantizer": layer.quantizer,
            "rank": rank,
            "scaling": s,
            "residuals": [0.1, 0.2],
            "kept": 1,
            "base": bases[name],
        }
        starts.write(folder, name, start)
    StartFile(
        fingerprint=fingerprint_of(model),
        plan=plan.hash,
        dtype="float32",
        base=starts.digest_over(bases),
        layers=layers,
    ).save(folder / starts.REPORT)
    return folder


def test_experts_take_a_base_that_was_made_for_them(component):
    """Stacked experts get no adapter; a base alone they take."""
    component(Fitted)
    plan = Plan(default=LayerPlan(quantizer="nf4", initializer="fitted"))
    model = build(make("mixtral"), plan, dtype="float32")
    dense = weights(make("mixtral"))
    found = registry.make("quantizer", "nf4")
    truth = put(make("mixtral"), {n: found.quantize(w * 0.9).dequantize(torch.float32) for n, w in dense.items()})
    assert (logits(model) - logits(truth)).abs().max() < 2e-5 * logits(truth).abs().max()
    assert any(name.endswith("]") for name in model.starts)


def test_a_library_s_own_layer_holds_the_packed_weight_bit_for_bit():
    """bitsandbytes' layer, whose tensors are the start's."""
    plan = Plan.protecting(None, "nf4", initializer="pissa", **S2)
    found = expected(plan, make())
    model = build(make(), plan, dtype="float32")
    for layer in built_layers(model):
        if layer.name not in found:
            continue
        start = found[layer.name]
        if isinstance(layer.module, FrozenLinear):  # 96 columns are no whole number of blocks
            mine = layer.module.packed.tensors
            assert all(torch.equal(mine[key], tensor) for key, tensor in start.base.tensors.items())
        else:
            state = layer.module.weight.quant_state
            assert torch.equal(layer.module.weight.data.flatten(), start.base.tensors["codes"].flatten())
            assert torch.equal(state.absmax, start.base.tensors["absmax"])
            assert torch.equal(state.state2.absmax, start.base.tensors["nested_absmax"])


# from the shell


def test_a_plan_from_the_shell_starts_so(checkpoints, tmp_path, capsys):
    """Protected layers start plainly; --initializer without a rank, or of no such name, is refused with what to do."""
    source, profile, top, path = checkpoints("llama"), *(tmp_path / f"{n}.json" for n in ("profile", "top", "plan"))

    def toolkit(*arguments):
        return main([str(each) for each in arguments])

    assert toolkit("profile", source, "-o", profile) == 0
    assert toolkit("select", "top-error", "--profile", profile, "--budget", "layers=0.2", "-o", top) == 0
    made = "plan", "--protect", top, "--base", "nf4", "--scaler", "rslora", "--initializer", "pissa"
    assert toolkit(*made, "--rank", 4, "-o", path) == 0
    plan = Plan.load(path)
    assert plan.default.initializer.startswith("pissa") and {p.initializer for p in plan.layers.values()} == {"zero"}
    model = build(str(source), plan, dtype="float32")
    assert len(model.starts) == 21 - 5 and model.plan.start is not None
    capsys.readouterr()
    for arguments, said in (
        (made[:5] + made[7:], "--initializer pissa fits an adapter, and a plan without --rank has none"),
        (("plan", "--base", "nf4", "--rank", 4, "--initializer", "lofqt"), "did you mean 'loftq'"),
    ):
        assert toolkit(*arguments) == 2
        assert said in capsys.readouterr().err
    assert toolkit("list", "initializers") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("zero", "loftq(iterations=5", "pissa(", "gptq("))


# what is refused


def test_what_an_initializer_cannot_do_is_refused_before_weights_are_read(checkpoints, monkeypatch, component):
    from toolkit.runs import models

    component(Shifted)
    source = str(checkpoints("llama", torch.bfloat16))
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    for plan, said in (
        (
            Plan.protecting(None, "nf4", initializer="loftq", rank=33),
            r"layer model\.layers\.0\.self_attn\.k_proj: .*33",
        ),
        (Plan(default=LayerPlan(quantizer="nf4", initializer="loftq")), r"default: .*loftq.*rank"),
        (Plan(default=LayerPlan(quantizer="nf4", initializer="lofqt")), r"default: .*did you mean.*loftq"),
        (Plan.protecting(None, "nf4", initializer="shifted"), r"layer model\S+: .*shifted.*toolkit calibrate PLAN"),
    ):
        with pytest.raises(InputError, match=said):
            build(source, plan)


def test_starts_of_another_model_or_plan_are_refused(tmp_path):
    plan = Plan.protecting(None, "nf4", initializer="loftq(iterations=2)", **S2)
    folder = written(tmp_path / "starts", plan, make())
    for other, said in (
        (Plan.protecting(None, "nf4", initializer="pissa", **S2), r"layer model\S+: .*initializer.*pissa"),
        (Plan.protecting(None, "nvfp4", initializer="loftq(iterations=2)", **S2), r"quantizer nf4.*quantizer nvfp4"),
        (Plan.protecting(None, "nf4", initializer="loftq(iterations=2)", **S2 | {"rank": 4}), "rank 8.*rank 4"),
        (Plan.protecting(None, "nf4", initializer="loftq(iterations=2)", **S566), r"scaling 2\.0.*scaling 5\.6"),
        (Plan.protecting(None, "nf4", **S2), "starts every layer plainly"),
    ):
        with pytest.raises(InputError, match=said):
            build(make(), other, start=folder)
    with pytest.raises(InputError, match="this model's weights are"):
        build(make(seed=1), plan, start=folder)
    some = plan.model_copy(update={"layers": {"model.layers.0.mlp.up_proj": LayerPlan(quantizer="nf4")}})
    with pytest.raises(InputError, match=r"holds a start of layer 'model\.layers\.0\.mlp\.up_proj'"):
        build(make(), some, start=folder)
    with pytest.raises(InputError, match=r"holds no start\.json"):
        build(make(), plan, start=tmp_path)
    name = next(name for name, each in StartFile.load(folder / starts.REPORT).layers.items() if each.base is not None)
    kept = starts.read(folder, name)
    codes = kept.base.tensors["codes"].clone()
    codes[0] ^= 1
    spoiled = dataclasses.replace(kept.base, tensors={**kept.base.tensors, "codes": codes})
    starts.write(folder, name, dataclasses.replace(kept, base=spoiled))
    with pytest.raises(InputError, match="is not the one that"):
        build(make(), plan, start=folder)
    file = folder / starts.LAYERS / f"{name}.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"quantizer":"nf4"', b'"quantizer":"nf5"'))
    with pytest.raises(InputError, match=rf"cannot read .*{name}\.safetensors.*'nf5'; did you mean 'nf4'"):
        starts.read(folder, name)
    (folder / starts.LAYERS / f"{name}.safetensors").unlink()
    with pytest.raises(InputError, match="holds no start of layer"):
        build(make(), plan, start=folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base": "none", "initializer": "gptq"}, "grid"),
        ({"base": "nf4", "initializer": "loftq"}, "fits an adapter, and the plan has none"),
        ({"base": "nvfp4", "initializer": "stored:nowhere"}, "no folder nowhere"),
    ],
)
def test_a_plan_that_cannot_start_is_refused_as_it_is_made(given, message):
    with pytest.raises(InputError, match=message):
        tk.Plan.protecting(None, **given)
