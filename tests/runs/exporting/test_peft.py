"""The PEFT export: stock PEFT loads it with the logits of the run, and no loader gets s or the base wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import toolkit as tk
from tests.runs.exporting.conftest import begin, logits, plan_of, stock
from toolkit.errors import InputError
from toolkit.records.io import read_json
from toolkit.records.plan import Plan
from toolkit.runs import adapters


@pytest.mark.parametrize("scaler", ["lora", "rslora", "fixed(value=3.0)"])
@pytest.mark.parametrize("quantizer", ["nf4", "none"])
def test_stock_peft_has_the_logits_of_the_run(tmp_path, source, adapted, scaler, quantizer):
    adapter, ours = adapted("llama", quantizer, scaler=scaler)
    report = tk.export(adapter, "peft", tmp_path / "out", model=source("llama"))
    if quantizer == "nf4":
        tk.export(adapter, "bnb", tmp_path / "base", model=source("llama"))
        base = stock(tmp_path / "base", torch.bfloat16)
    else:
        base = AutoModelForCausalLM.from_pretrained(source("llama"), dtype=torch.bfloat16)
    theirs = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert torch.equal(logits(theirs), logits(ours))
    config = read_json(tmp_path / "out" / adapters.CONFIG)
    assert config["use_rslora"] is (scaler == "rslora") and config["r"] == 4
    assert config["lora_alpha"] == {"lora": 16, "rslora": 16}.get(scaler, 12)
    assert report.notes == [] and len(report.adapter) == 64
    held = load_file(tmp_path / "out" / adapters.WEIGHTS)
    assert {t.dtype for t in held.values()} == {torch.float32} and len(held) == 28


def test_the_pages_code_loads_what_was_exported(tmp_path, source, adapted, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "exports.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    adapter, ours = adapted("llama", "nf4")
    tk.export(adapter, "bnb", tmp_path / "base", model=source("llama"))
    (tmp_path / "adapter").rename(tmp_path / "own")
    tk.export(tmp_path / "own", "peft", tmp_path / "adapter", model=source("llama"), base=tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(block, names)
    assert torch.equal(logits(names["model"]), logits(ours))


def test_ranks_that_differ_are_told_of_and_read_rightly(tmp_path, source):
    plan = plan_of("none")
    wide = plan.default.adapter.model_copy(update={"rank": 16, "scaling": 4.0})
    own = plan.default.model_copy(update={"adapter": wide})
    plan = plan.model_copy(update={"layers": {"model.layers.1.mlp.up_proj": own}})
    ours = tk.build(source("llama"), plan, device="cpu", dtype="bfloat16")
    with torch.no_grad():
        for p in adapters.trainable(ours).values():
            p.add_(0.01)
    adapters.save(ours, tmp_path / "adapter")
    report = tk.export(tmp_path / "adapter", "peft", tmp_path / "out", model=source("llama"))
    assert len(report.notes) == 1 and "rank_pattern" in report.notes[0]
    base = AutoModelForCausalLM.from_pretrained(source("llama"), dtype=torch.bfloat16)
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "out").eval()), logits(ours))


def test_starts_are_an_adapter_of_their_own_base(tmp_path, source):
    """LoftQ's A and B over its base in stock libraries: the model that training begins with."""
    plan = plan_of("nf4", initializer="loftq")
    folder = begin(tmp_path / "starts", source("llama"), plan)
    ours = tk.build(source("llama"), plan, device="cpu", dtype="bfloat16", start=folder)
    report = tk.export(folder, "peft", tmp_path / "alone", model=source("llama"))
    assert any("export that base too" in note for note in report.notes)
    named = read_json(tmp_path / "alone" / adapters.CONFIG)["base_model_name_or_path"]
    assert str(source("llama")) not in named and report.start[:12] in named  # not the plain model
    with pytest.raises((OSError, ValueError)):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "alone")
    tk.export(folder, "bnb", tmp_path / "base", model=source("llama"))
    tk.export(folder, "peft", tmp_path / "out", model=source("llama"), base=tmp_path / "base")
    theirs = PeftModel.from_pretrained(stock(tmp_path / "base", torch.bfloat16), tmp_path / "out").eval()
    assert torch.equal(logits(theirs), logits(ours))
    assert (logits(ours) - logits(stock(tmp_path / "base", torch.bfloat16))).abs().max() > 0.01  # A and B do something
    assert Plan.load(tmp_path / "out" / adapters.PLAN).start == report.start


def test_the_exported_adapter_loads_on_its_own_base_alone(tmp_path, source, adapted):
    folder = begin(tmp_path / "starts", source("llama"), plan_of("nf4", initializer="loftq"))
    adapter, ours = adapted("llama", "nf4", initializer="loftq", start=folder)
    tk.export(adapter, "peft", tmp_path / "out", model=source("llama"), start=folder)
    plain = tk.build(source("llama"), plan_of("nf4"), device="cpu", dtype="bfloat16")
    with pytest.raises(InputError, match="another base"):
        adapters.load(plain, tmp_path / "out")
    again = tk.build(source("llama"), plan_of("nf4", initializer="loftq"), device="cpu", dtype="bfloat16", start=folder)
    adapters.load(again, tmp_path / "out")
    assert torch.equal(logits(again), logits(ours))


def test_the_base_that_is_named_must_be_the_adapters(tmp_path, source, adapted):
    adapter, _ = adapted("llama", "nf4")
    give = {"model": source("llama")}
    plan_of("nf4", ("model.layers.0.mlp.up_proj",)).save(tmp_path / "other.json")
    tk.export(tmp_path / "other.json", "bnb", tmp_path / "other", **give)
    tk.export(adapter, "bnb", tmp_path / "merged", merge=True, least=0, **give)
    tk.export(adapter, "bnb", tmp_path / "right", **give)
    with pytest.raises(InputError, match="another base than the adapter's"):
        tk.export(adapter, "peft", tmp_path / "out", base=tmp_path / "other", **give)
    with pytest.raises(InputError, match="has an adapter merged in"):
        tk.export(adapter, "peft", tmp_path / "out", base=tmp_path / "merged", **give)
    with pytest.raises(InputError, match=r"holds no export.json"):
        tk.export(adapter, "peft", tmp_path / "out", base=source("llama"), **give)
    tk.export(adapter, "peft", tmp_path / "out", base=tmp_path / "right", **give)
    assert read_json(tmp_path / "out" / adapters.CONFIG)["base_model_name_or_path"] == str(tmp_path / "right")


def test_a_plan_without_adapters_has_none_to_export(tmp_path, source):
    plan_of("nf4", rank=None).save(tmp_path / "plan.json")
    with pytest.raises(InputError, match="gives no layer an adapter"):
        tk.export(tmp_path / "plan.json", "peft", tmp_path / "out", model=source("llama"))
    plan_of("nf4").save(tmp_path / "plan.json")
    with pytest.raises(InputError, match="has no adapter: name the folder"):
        tk.export(tmp_path / "plan.json", "peft", tmp_path / "out", model=source("llama"))
    assert not (tmp_path / "out").exists()
