"""The bitsandbytes export: stock transformers loads the plan's base, layer by layer and logit by logit."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

import toolkit as tk
from tests.runs.exporting.conftest import begin, config_of, logits, plan_of, stock
from toolkit.errors import InputError, RunError
from toolkit.records.io import read_json
from toolkit.runs.exporting import bnb
from toolkit.runs.exporting.exporting import open_model
from toolkit.runs.exporting.origin import read
from toolkit.runs.exporting.packing import layouts, pack
from toolkit.weights.layers import layers_of

bitsandbytes = pytest.importorskip("bitsandbytes")


def exported(tmp_path, source, plan, family="llama", dtype=torch.bfloat16, **more):
    plan.save(tmp_path / "plan.json")
    folder = tmp_path / "base"
    return folder, tk.export(tmp_path / "plan.json", "bnb", folder, model=source(family, dtype), **more)


def quantized(model):
    return {n for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}


@pytest.mark.parametrize("family", ["llama", "untied", "phi3", "gpt2"])
@pytest.mark.parametrize("quantizer", ["nf4", "nf4(block=32,double=false)", "fp4-bnb"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_stock_transformers_has_the_logits_of_the_built_model(tmp_path, source, family, quantizer, dtype):
    plan = plan_of(quantizer, rank=None)
    folder, report = exported(tmp_path, source, plan, family, dtype)
    ours = tk.build(source(family, dtype), plan, device="cpu", dtype=dtype)
    theirs = stock(folder, dtype)
    assert quantized(theirs) == {layer.name for layer in layers_of(ours)}
    assert torch.equal(logits(theirs), logits(ours))
    assert report.checked and report.notes == []
    assert all(layer.differing == 0 for layer in report.layers.values() if layer.quantizer)


def test_a_dense_model_with_the_same_settings_quantizes_to_the_same(tmp_path, source):
    """Not our own code: bitsandbytes quantizes the checkpoint with the exported config."""
    folder, _ = exported(tmp_path, source, plan_of(rank=None), dtype=torch.bfloat16)
    settings = read_json(folder / "config.json")["quantization_config"]
    config = BitsAndBytesConfig.from_dict(settings)
    fresh = AutoModelForCausalLM.from_pretrained(
        source("llama"), quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    theirs = stock(folder, torch.bfloat16)
    assert quantized(fresh) == quantized(theirs)
    for name in quantized(fresh):
        one, other = fresh.get_submodule(name).weight, theirs.get_submodule(name).weight
        assert torch.equal(one.data, other.data), name
        assert torch.equal(one.quant_state.absmax, other.quant_state.absmax), name


def test_blocks_one_and_ten_are_kept_apart(tmp_path, source):
    """`layers.1` is the beginning of `layers.10` and `layers.11`."""
    keep = tuple(f"model.layers.1.{part}" for part in ("self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"))
    folder, _ = exported(tmp_path, source, plan_of("nf4", keep, rank=None), "deep")
    theirs = stock(folder, torch.bfloat16)
    every = {layer.name for layer in layers_of(theirs)}
    assert quantized(theirs) == every - set(keep)
    assert type(theirs.get_submodule("lm_head")) is nn.Linear
    assert read_json(folder / "config.json")["quantization_config"]["llm_int8_skip_modules"] == [*keep, "lm_head"]


class Wrapped(nn.Module):
    """Paths of which one ends as another reads."""

    _keep_in_fp32_modules: list[str] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.gate = nn.Linear(64, 64)
        self.gate_up = nn.Linear(64, 64)
        self.tower = nn.ModuleDict({"up": nn.Linear(64, 64), "gate_up": nn.Linear(64, 64)})


@pytest.mark.parametrize("kept", [{"up"}, {"gate"}, {"gate_up"}, {"tower.up", "gate"}, {"tower.gate_up"}])
def test_an_entry_never_reaches_further(kept):
    model = Wrapped()
    every = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    entries = bnb.skip_list(model, every - kept)
    config = BitsAndBytesConfig(load_in_4bit=True)
    replaced = replace_with_bnb_linear(copy.deepcopy(model), entries, config, pre_quantized=True)
    assert quantized(replaced) == every - kept


def test_what_the_model_keeps_in_float32_is_refused_by_name():
    model = Wrapped()
    model._keep_in_fp32_modules = ["gate"]
    with pytest.raises(InputError, match=r"no skip list .*: gate would stay in 16 bit"):
        bnb.skip_list(model, {"gate", "up"})
    assert set(bnb.skip_list(model, {"up"}))  # not wanted: nothing to refuse


def test_a_module_that_is_no_plain_linear_is_refused():
    with pytest.raises(InputError, match="in the place of tower"):
        bnb.skip_list(Wrapped(), {"tower"})


def test_a_base_that_an_initializer_changed_has_equal_logits_with_its_adapter(tmp_path, source, adapted):
    plan = plan_of("nf4", ("model.layers.0.mlp.up_proj",), initializer="loftq")
    folder = begin(tmp_path / "starts", source("llama"), plan)
    adapter, ours = adapted(keep=("model.layers.0.mlp.up_proj",), initializer="loftq", start=folder)
    with pytest.raises(InputError, match="--start"):  # LoftQ of another seed or dtype makes another base
        tk.export(adapter, "bnb", tmp_path / "none", model=source("llama"), dtype="float32")
    report = tk.export(adapter, "bnb", tmp_path / "base", model=source("llama"), start=folder)
    assert report.start == ours.plan.start is not None
    assert {layer.base for layer in report.layers.values() if layer.quantizer} == {"start"}
    tk.export(adapter, "peft", tmp_path / "peft", model=source("llama"), start=folder, base=tmp_path / "base")
    theirs = PeftModel.from_pretrained(stock(tmp_path / "base", torch.bfloat16), tmp_path / "peft").eval()
    assert torch.equal(logits(theirs), logits(ours))
    config = read_json(tmp_path / "peft" / "adapter_config.json")
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    # rounding the dense weights instead is another model
    plain, _ = exported(tmp_path / "plain", source, plan_of("nf4", ("model.layers.0.mlp.up_proj",), rank=None))
    other = PeftModel.from_pretrained(stock(plain, torch.bfloat16), tmp_path / "peft").eval()
    assert (logits(other) - logits(ours)).abs().max() > 0.1


def test_the_start_is_made_again_where_no_folder_is_named(tmp_path, source, adapted):
    """What an initializer without data makes is a function of the weights, and the digest tells that it is the same."""
    adapter, ours = adapted(initializer="loftq")
    report = tk.export(adapter, "bnb", tmp_path / "base", model=source("llama"))
    assert report.start == ours.plan.start is not None
    theirs = PeftModel.from_pretrained(stock(tmp_path / "base", torch.bfloat16), adapter).eval()
    assert torch.equal(logits(theirs), logits(ours))


def test_a_file_that_is_not_read_as_written_is_no_export(tmp_path, source):
    plan_of(rank=None).save(tmp_path / "plan.json")
    folder = tmp_path / "base"
    tk.export(tmp_path / "plan.json", "bnb", folder, model=source("llama"))
    opened = open_model(read(tmp_path / "plan.json", model=source("llama")))
    held, _ = pack(opened, layouts(opened, "bnb"), {}, onto="base")
    bnb.check(folder, held, opened.plans, torch.bfloat16)
    held["model.layers.1.mlp.up_proj"].packed.tensors["codes"][7] ^= 1
    with pytest.raises(RunError, match=r"layer model.layers.1.mlp.up_proj: weight is not loaded"):
        bnb.check(folder, held, opened.plans, torch.bfloat16)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["llm_int8_skip_modules"].append("o_proj")
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises((RunError, ValueError, RuntimeError)):
        bnb.check(folder, held, opened.plans, torch.bfloat16)


def test_shards_tokenizer_and_generation_config(tmp_path, source):
    folder, _ = exported(tmp_path, source, plan_of(rank=None), shard="40KB")
    names = {p.name for p in folder.iterdir()}
    assert {"model.safetensors.index.json", "tokenizer.json", "generation_config.json", "export.json"} <= names
    assert sum(n.endswith(".safetensors") for n in names) > 2 and not any(n.endswith(".bin") for n in names)
    whole, _ = exported(tmp_path / "one", source, plan_of(rank=None))
    assert torch.equal(logits(stock(folder, torch.bfloat16)), logits(stock(whole, torch.bfloat16)))


@pytest.mark.parametrize(
    ("family", "plan", "message"),
    [
        ("llama", plan_of("nvfp4", rank=None), r"layer model.layers.0.self_attn.q_proj is quantized by nvfp4, which "
         r"bnb cannot hold; it holds fp4-bnb, nf4, and 16 bit"),
        ("llama", plan_of("residual", rank=None), r"quantized by residual, which bnb cannot hold"),
        ("llama", plan_of("none", rank=None), r"the plan quantizes no layer"),
        ("mixtral", plan_of("nf4", rank=None), r"is one expert of a stacked parameter"),
    ],
)  # fmt: skip
def test_what_the_format_cannot_hold_is_named(tmp_path, source, family, plan, message):
    with pytest.raises(InputError, match=message):
        exported(tmp_path, source, plan, family)
    assert not (tmp_path / "base").exists()


def test_two_quantizers_have_no_one_setting(tmp_path, source):
    plan = plan_of("nf4", rank=None)
    other = plan.default.model_copy(update={"quantizer": "fp4-bnb"})
    plan = plan.model_copy(update={"layers": {"model.layers.1.mlp.up_proj": other}})
    with pytest.raises(InputError, match=r"q_proj is quantized by nf4 and layer model.layers.1.mlp.up_proj by fp4-bnb"):
        exported(tmp_path, source, plan)


def test_blocks_of_two_sizes_lie_side_by_side(tmp_path, source):
    """Each weight carries its own block size; the setting that holds for all does not name one."""
    plan = plan_of("nf4", rank=None)
    other = plan.default.model_copy(update={"quantizer": "nf4(block=32)"})
    plan = plan.model_copy(update={"layers": {"model.layers.1.mlp.up_proj": other}})
    folder, _ = exported(tmp_path, source, plan)
    ours = tk.build(source("llama"), plan, device="cpu", dtype="bfloat16")
    assert torch.equal(logits(stock(folder, torch.bfloat16)), logits(ours))


def test_a_tied_head_that_is_planned_quantized_is_refused_and_an_untied_one_is_written(tmp_path, source):
    plan = plan_of("nf4", rank=None)
    plan = plan.model_copy(update={"layers": {"lm_head": plan.default}})
    with pytest.raises(InputError, match=r"lm_head shares its weight with model.embed_tokens.weight"):
        exported(tmp_path, source, plan)
    folder, _ = exported(tmp_path / "untied", source, plan, "untied")
    theirs = stock(folder, torch.bfloat16)
    assert "lm_head" in quantized(theirs)
    assert torch.equal(logits(theirs), logits(tk.build(source("untied"), plan, device="cpu", dtype="bfloat16")))


def test_widths_that_bitsandbytes_reads_wrongly_on_a_cpu_are_told_of(tmp_path, source):
    _, report = exported(tmp_path, source, plan_of(rank=None), "narrow")
    assert len(report.notes) == 1 and "2 layers, such as model.layers.0.mlp.down_proj: rows of 96" in report.notes[0]


def test_a_compute_dtype_of_one_layer_is_told_of(tmp_path, source):
    name = "model.layers.0.mlp.up_proj"
    plan = plan_of("nf4", (name,), rank=None)
    own = plan.layers[name].model_copy(update={"compute_dtype": "float32"})
    _, report = exported(tmp_path, source, plan.model_copy(update={"layers": {name: own}}))
    assert any("1 layers, such as " + name in note for note in report.notes)


def test_the_families_are_what_they_are_called():
    assert config_of("llama").tie_word_embeddings and not config_of("untied").tie_word_embeddings
