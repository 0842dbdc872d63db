"""What can be exported, how it is found, and the folder that appears whole or not at all."""

from __future__ import annotations

import json
import math

import pytest
import torch
from peft import PeftModel

import toolkit as tk
from tests.runs.exporting.conftest import begin, logits, plan_of, stock
from toolkit.cli import main
from toolkit.errors import InputError, RunError
from toolkit.records.exported import Exported
from toolkit.records.plan import Plan
from toolkit.runs import adapters, starts
from toolkit.runs.exporting import folder as folders
from toolkit.runs.exporting.origin import read

LEVERS = tk.Levers(steps=2, batch=2, accumulation=1, length=64, learning_rate=0.02)
USE = tk.Use(task="arithmetic(largest=10)", train_rows=16, rows=4)


def test_a_trained_run_is_exported_from_its_folder(tmp_path, source):
    """Trained for two steps, then its base and its adapter in stock libraries."""
    plan = plan_of("nf4", ("model.layers.0.mlp.up_proj",))
    run = tmp_path / "run"
    tk.train(source("llama"), plan, USE, out=run, levers=LEVERS, device="cpu", dtype="bfloat16", progress=False)
    origin = read(run, model=source("llama"))
    assert origin.adapter == run / "adapter" and origin.dtype == "bfloat16" and origin.plan.fingerprint
    tk.export(run, "bnb", tmp_path / "base", model=source("llama"))
    tk.export(run, "peft", tmp_path / "adapter", model=source("llama"), base=tmp_path / "base")
    theirs = PeftModel.from_pretrained(stock(tmp_path / "base", torch.bfloat16), tmp_path / "adapter").eval()
    ours = tk.build(source("llama"), plan, device="cpu", dtype="bfloat16")
    adapters.load(ours, run / "adapter")
    assert torch.equal(logits(theirs), logits(ours))
    assert (logits(ours) - logits(stock(tmp_path / "base", torch.bfloat16))).abs().max() > 1e-3


def test_a_run_that_started_elsewhere_finds_its_starts(tmp_path, source):
    plan = plan_of("nf4", initializer="loftq")
    run = tmp_path / "run"
    tk.train(source("llama"), plan, USE, out=run, levers=LEVERS, device="cpu", dtype="bfloat16", progress=False)
    origin = read(run, model=source("llama"))
    assert origin.start is not None and origin.start.parent == run / "starts" and origin.plan.start
    report = tk.export(run, "bnb", tmp_path / "base", model=source("llama"))
    assert {layer.base for layer in report.layers.values()} == {"start"}
    tk.export(run, "peft", tmp_path / "adapter", model=source("llama"), base=tmp_path / "base")
    theirs = PeftModel.from_pretrained(stock(tmp_path / "base", torch.bfloat16), tmp_path / "adapter").eval()
    ours = tk.build(source("llama"), plan, device="cpu", dtype="bfloat16", start=origin.start)
    adapters.load(ours, run / "adapter")
    assert torch.equal(logits(theirs), logits(ours))


def test_a_run_that_did_not_finish_or_kept_nothing_is_refused(tmp_path, source):
    run = tmp_path / "run"
    plan = plan_of("nf4")
    give = {"levers": LEVERS, "device": "cpu", "dtype": "float32", "progress": False, "keep_adapter": False}
    tk.train(source("llama"), plan, USE, out=run, **give)
    with pytest.raises(InputError, match="has no adapter"):
        tk.export(run, "peft", tmp_path / "out", model=source("llama"))
    report = json.loads((run / "report.json").read_text())
    report["finished"] = False
    report["flags"] = [{"check": "loss", "severity": "fatal", "reason": "loss is NaN"}]
    (run / "report.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match=r"did not finish \(loss is NaN\)"):
        tk.export(run, "bnb", tmp_path / "out", model=source("llama"))
    (run / "report.json").write_text(json.dumps(report | {"kind": "report"}))
    with pytest.raises(InputError, match="kind 'report'"):
        tk.export(run, "bnb", tmp_path / "out", model=source("llama"))


def test_what_is_no_run_is_named(tmp_path, source):
    (tmp_path / "adapter").mkdir()
    with pytest.raises(InputError, match=r"there is no .*adaptr to export; did you mean 'adapter'"):
        read(tmp_path / "adaptr")
    with pytest.raises(InputError, match=r"is no run \(report.json\), .*; found nothing"):
        read(tmp_path / "adapter")
    (tmp_path / "adapter" / adapters.CONFIG).write_text("{}")
    with pytest.raises(InputError, match=r"holds no plan.json"):
        read(tmp_path / "adapter")
    plan_of("nf4").save(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"does not say which model it is of: name it \(--model\)"):
        read(tmp_path / "plan.json")


def test_starts_of_another_plan_or_model_are_refused(tmp_path, source, adapted):
    folder = begin(tmp_path / "starts", source("llama"), plan_of("nf4", initializer="loftq"))
    other = begin(tmp_path / "other", source("untied"), plan_of("nf4", initializer="loftq"))
    adapter, _ = adapted("llama", "nf4", initializer="loftq", start=folder)
    with pytest.raises(InputError, match="another model"):
        read(adapter, model=source("llama"), start=other)
    with pytest.raises(InputError, match=r"holds no start.json"):
        read(adapter, model=source("llama"), start=tmp_path)
    with pytest.raises(InputError, match="a folder of starts itself"):
        read(folder, model=source("llama"), start=other)
    pissa = begin(tmp_path / "pissa", source("llama"), plan_of("nf4", initializer="pissa"), "pissa")
    with pytest.raises(InputError, match="another base"):
        read(adapter, model=source("llama"), start=pissa)
    name = "model.layers.0.mlp.up_proj"
    start = starts.read(folder, name)
    start.base.tensors["codes"][5] ^= 3
    starts.write(folder, name, start)
    with pytest.raises(InputError, match="the folder was changed"):
        tk.export(adapter, "bnb", tmp_path / "out", model=source("llama"), start=folder)


def test_other_weights_are_refused(tmp_path, source, adapted):
    adapter, _ = adapted("untied", "nf4")
    with pytest.raises(InputError, match="another model, or changed weights"):
        tk.export(adapter, "bnb", tmp_path / "out", model=source("llama"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "more", "message"),
    [
        ("compresed-tensors", {}, "did you mean 'compressed-tensors'"),
        ("merged", {"merge": True}, "merged merges anyway"),
        ("peft", {"merge": True}, "peft keeps the adapter apart"),
        ("bnb", {"onto": "dense"}, "nothing is merged"),
        ("merged", {"onto": "bases"}, "did you mean 'base'"),
        ("bnb", {"fused": "separate"}, "bnb has none"),
        ("compressed-tensors", {"fused": "together"}, "allowed: requantize, separate, shared"),
        ("bnb", {"merge": True, "least": 2.0}, "at most 1"),
        ("bnb", {"merge": True, "least": math.nan}, "at most 1"),
        ("bnb", {"base": "x"}, "for the format peft alone"),
        ("bnb", {"dtype": "int8"}, "no compute dtype is called 'int8'"),
        ("bnb", {"shard": "many"}, "shards of 'many'"),
        ("bnb", {"merge": True}, "plan.json holds no adapter to merge"),
    ],
)
def test_options_that_are_none_are_refused(tmp_path, source, form, more, message):
    plan_of("nf4").save(tmp_path / "plan.json")
    with pytest.raises(InputError, match=message):
        tk.export(tmp_path / "plan.json", form, tmp_path / "out", model=source("llama"), **more)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_layers_that_are_started_for_an_export_alone_are_said(tmp_path, source):
    plan = plan_of("nf4", ("model.layers.0.self_attn.v_proj",), initializer="loftq")
    plan = plan.model_copy(
        update={"layers": {n: p.model_copy(update={"adapter": None}) for n, p in plan.layers.items()}}
    )
    plan.save(tmp_path / "plan.json")
    made = tk.export(tmp_path / "plan.json", "bnb", tmp_path / "anew", model=source("llama"), verify=False)
    (note,) = [note for note in made.notes if "started anew" in note]
    assert note.startswith(f"{len(made.layers) - 1} layers, such as ")
    folder = begin(tmp_path / "starts", source("llama"), plan)
    kept = tk.export(folder, "bnb", tmp_path / "kept", model=source("llama"), verify=False)
    assert kept.layers and not any("started anew" in note for note in kept.notes)


def test_a_plan_has_no_adapter_to_merge(tmp_path, source):
    plan_of("nf4").save(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"plan.json holds no adapter to merge, and 14 layers, such as .* starts$"):
        tk.export(tmp_path / "plan.json", "merged", tmp_path / "out", model=source("llama"))


# the folder


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(ZeroDivisionError), folders.whole(out) as place:
        (place / "half").write_text("x")
        assert not out.exists()
        1 / 0  # noqa: B018
    assert not out.exists() and list((tmp_path / "deep").iterdir()) == []
    with folders.whole(out) as place:
        (place / folders.REPORT).write_text("first")
    with pytest.raises(InputError, match="--force replaces it"), folders.whole(out):
        pass
    with pytest.raises(RunError, match="unchanged"), folders.whole(out, force=True) as place:
        (place / folders.REPORT).write_text("second")
        raise OSError(28, "No space left on device")
    assert (out / folders.REPORT).read_text() == "first"
    with folders.whole(out, force=True) as place:
        (place / folders.REPORT).write_text("second")
    assert (out / folders.REPORT).read_text() == "second" and [p.name for p in out.parent.iterdir()] == ["out"]


def test_what_is_no_export_is_never_replaced(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="no export, and is not replaced"):
        folders.check(tmp_path / "work", force=True)
    with pytest.raises(InputError, match="is a file, and an export is a folder"):
        folders.check(tmp_path / "file")
    with pytest.raises(InputError, match="is a file, not a folder"):
        folders.check(tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    with folders.whole(tmp_path / "empty") as place:
        (place / "x").write_text("")
    assert (tmp_path / "empty" / "x").exists()


# the shell


def test_the_verb_writes_what_the_function_writes(tmp_path, source, adapted, capsys):
    adapter, _ = adapted("llama", "nf4")
    model = ["--model", str(source("llama"))]
    assert main(["export", str(adapter), "--format", "bnb", *model, "-o", str(tmp_path / "base")]) == 0
    assert "loaded by transformers: storage of 14 layers" in capsys.readouterr().err
    ask = ["export", str(adapter), "--format", "peft", *model, "--base", str(tmp_path / "base")]
    assert main([*ask, "-o", str(tmp_path / "peft")]) == 0
    assert main([*ask, "-o", str(tmp_path / "peft")]) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert main([*ask, "-o", str(tmp_path / "peft"), "--force"]) == 0
    report = Exported.load(tmp_path / "base" / "export.json")
    assert report.plan_base == Exported.load(tmp_path / "peft" / "export.json").plan_base
    assert report.fingerprint == Plan.load(tmp_path / "base" / "plan.json").fingerprint == report.fingerprint
    merge = ["export", str(adapter), "--format", "merged", *model, "-o", str(tmp_path / "m")]
    assert main(merge) == 0
    assert "of the adapter's change, 1.0000 arrived" in capsys.readouterr().err
    assert main(["export", str(adapter), "--format", "pfet", *model, "-o", str(tmp_path / "x")]) == 2
    assert "did you mean 'peft'" in capsys.readouterr().err
