"""Starts of whole plans from the weights: one by one what `tk.initialize` gives, resumed, and from the shell."""

from __future__ import annotations

import json

import pytest
import torch

import toolkit as tk
from tests.runs.starting.conftest import make
from toolkit.cli import main
from toolkit.errors import InputError, RunError
from toolkit.records.plan import LayerPlan, Plan
from toolkit.records.start import StartFile
from toolkit.runs import starts
from toolkit.runs.starting.computing import initialize
from toolkit.weights.layers import layers_of
from toolkit.weights.profiling import fingerprint_of

ADAPTER = {"rank": 3, "alpha": 16.0, "scaler": "rslora"}


def planned() -> Plan:
    """LoftQ, but for one layer of PiSSA, a plain one, and one without an adapter."""
    plan = Plan.protecting(None, "nvfp4", initializer="loftq(iterations=2)", **ADAPTER)
    adapter = plan.default.adapter
    return plan.model_copy(
        update={
            "layers": {
                "model.layers.0.mlp.up_proj": LayerPlan(quantizer="nf4", adapter=adapter, initializer="pissa"),
                "model.layers.1.mlp.up_proj": LayerPlan(quantizer="nf4", adapter=adapter),
                "model.layers.2.mlp.up_proj": LayerPlan(quantizer="none", compute_dtype="float32"),
            }
        }
    )


@pytest.mark.parametrize("form", ["object", "path"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_is_what_one_weight_gives(form, dtype, tmp_path, checkpoints):
    plan, model = planned(), make()
    if form == "path":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoints(), dtype="auto")
    given = checkpoints() if form == "path" else model
    file = initialize(plan, given, tmp_path, seed=3, dtype=dtype, progress=False)
    names = [layer.name for layer in layers_of(model)]
    plain = ["model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"]
    assert list(file.layers) == [name for name in names if name not in plain]
    for layer in layers_of(model):
        if layer.name in plain:
            continue
        decided = plan.of(layer.name)
        alone = tk.initialize(
            layer.weight(),
            decided.initializer,
            decided.quantizer,
            seed=3,
            name=layer.name,
            dtype=getattr(torch, dtype),
            **ADAPTER,
        )
        found, record = starts.read(tmp_path, layer.name), file.layers[layer.name]
        assert torch.equal(found.A, alone.A) and torch.equal(found.B, alone.B) and found.scaling == alone.scaling
        assert found.base.quantizer.key == decided.quantizer
        assert all(torch.equal(t, alone.base.tensors[key]) for key, t in found.base.tensors.items())
        assert tuple(record.residuals) == alone.residuals and record.kept == alone.kept
        assert record.base == starts.changed(alone, layer.weight())
    assert file.fingerprint == fingerprint_of(model) and file.plan == plan.hash
    bases = {name: r.base for name, r in file.layers.items() if r.base}
    assert bases and file.base == starts.digest_over(bases)
    assert Plan.load(tmp_path / starts.PLAN).fingerprint == file.fingerprint
    assert file.seconds > 0 and file.peak_bytes >= 0 and file.provenance.compute_dtype == dtype


def test_resumed_equals_uninterrupted(tmp_path):
    def stop(done, total, name):
        assert total == 19
        if done == 7:
            raise KeyboardInterrupt

    whole = initialize(planned(), make(), tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        initialize(planned(), make(), tmp_path / "cut", progress=stop)
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "cut" / "layers").iterdir()}
    assert len(done) == 7 and not (tmp_path / "cut" / starts.REPORT).exists()
    damaged = sorted(done)[0]
    damaged.write_bytes(damaged.read_bytes()[:100])  # as a full disk may leave it: made anew
    resumed = initialize(planned(), make(), tmp_path / "cut", progress=False)
    assert all(p.stat().st_mtime_ns == then for p, then in done.items() if p != damaged)
    assert resumed.base == whole.base and list(resumed.layers) == list(whole.layers)
    for name in whole.layers:
        one, other = starts.read(tmp_path / "cut", name), starts.read(tmp_path / "whole", name)
        assert torch.equal(one.A, other.A) and torch.equal(one.B, other.B)
        assert starts.digest_of(one.base) == starts.digest_of(other.base)
    assert initialize(planned(), make(), tmp_path / "cut", progress=False) == resumed


def test_tensors_that_were_kept_apart_are_made_again_and_are_the_reports(tmp_path):
    """As in a repository, which has the report alone."""
    whole = initialize(planned(), make(), tmp_path, progress=False)
    files = sorted((tmp_path / starts.LAYERS).iterdir())
    for gone in (files[:1], files):
        for path in gone:
            path.unlink()
        assert not starts.whole(tmp_path)
        again = initialize(planned(), make(), tmp_path, progress=False)
        assert starts.whole(tmp_path) and again.base == whole.base
        assert sorted((tmp_path / starts.LAYERS).iterdir()) == files
    told = whole.model_copy(update={"base": "0" * 64})
    told.save(tmp_path / starts.REPORT)
    files[0].unlink()
    with pytest.raises(RunError, match="tells of the base 000000000000, and its layers, made again"):
        initialize(planned(), make(), tmp_path, progress=False)


def test_a_head_that_is_planned_starts_too(tmp_path, checkpoints):
    """Tied to the embedding in the checkpoint; read from there."""
    plan = planned()
    head = LayerPlan(quantizer="nf4", adapter=plan.default.adapter, initializer="loftq(iterations=1)")
    plan = plan.model_copy(update={"layers": {"lm_head": head}})
    file = initialize(plan, checkpoints(), tmp_path / "path", dtype="float32", progress=False)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints(), dtype="auto")
    weight = model.get_output_embeddings().weight
    alone = tk.initialize(weight, "loftq(iterations=1)", "nf4", name="lm_head", dtype=torch.float32, **ADAPTER)
    assert tuple(file.layers["lm_head"].residuals) == alone.residuals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": Plan.protecting(None, "nf4", rank=4)}, "starts every layer plainly"),
        ({"plan": Plan.protecting(None, "nf4", initializer="gptq")}, r"layer model\S+: .*toolkit calibrate PLAN"),
        ({"plan": planned().model_copy(update={"fingerprint": "ab" * 32})}, "a plan for another model"),
        (
            {"plan": planned().model_copy(update={"layers": {"model.layers.0.mlp.upproj": planned().default}})},
            "no layer",
        ),
        ({"plan": Plan.protecting(None, "nf4", rank=65, initializer="loftq")}, r"layer model\.layers\.0\S+: .*65"),
        ({"plan": {}}, "a Plan is asked for"),
        ({"model": None}, "names no model"),
        ({"dtype": "float8"}, "no compute dtype"),
        ({"device": "gpu"}, "no device"),
    ],
)
def test_bad_input(change, message, tmp_path):
    given = {"plan": planned(), "model": make(), "progress": False} | change
    with pytest.raises(InputError, match=message):
        initialize(given.pop("plan"), given.pop("model"), tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_settings_is_refused(tmp_path):
    initialize(planned(), make(), tmp_path / "s", progress=False)
    for change, message in (({"seed": 1}, "seed is 0 there and 1 here"), ({"dtype": "float32"}, "dtype is bfloat16")):
        with pytest.raises(InputError, match=message):
            initialize(planned(), make(), tmp_path / "s", progress=False, **change)
    with pytest.raises(InputError, match="plan is"):
        initialize(Plan.protecting(None, "nf4", initializer="loftq", **ADAPTER), make(), tmp_path / "s")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        initialize(planned(), make(), tmp_path / "file")


# from the shell


def test_the_verbs(tmp_path, checkpoints, letters, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned().save("plan.json")
    assert main(["initialize", "plan.json", "--model", str(checkpoints()), "-o", "starts", "--dtype", "float32"]) == 0
    said = capsys.readouterr().err
    file = StartFile.load("starts/start.json")
    before = sum(r.residuals[0] for r in file.layers.values()) / 19
    after = sum(r.residuals[r.kept] for r in file.layers.values()) / 19
    assert f"19 layers in {file.seconds:.1f} s" in said and f"{before:.5f} at iterate 0, {after:.5f} as" in said
    Plan.protecting(None, "nvfp4", initializer="gptq(activations=nvfp4)").save("gptq.json")
    command = ["calibrate", "gptq.json", "--model", str(checkpoints()), "--text", letters, "--dtype", "float32"]
    assert main([*command, "--windows", "400", "--window", "16", "--batch", "50", "-o", "calibrated"]) == 0
    said = capsys.readouterr().err
    assert "only 125 windows were found of the 400 asked for" in said
    assert "125 windows of 16 tokens of letters.txt, inputs rounded by nvfp4" in said and "mean output error" in said
    assert json.loads((tmp_path / "calibrated/start.json").read_text())["calibration"]["tokens"] == 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.json", "--model", "demo"], "--text is needed"),
        (["plan.json", "--model", "demo", "--text", "python-topics"], "-o is needed"),
        (["plan.json", "other.json", "--text", "python-topics"], "one plan at a time"),
        (["plan.json", "--task", "arithmetic"], "--task plays no part where a plan is calibrated"),
        (["no.json", "--text", "python-topics"], "there is no plan no.json"),
        (["gradient-sensitivity", "--text", "python-topics"], "--text plays no part where selectors are calibrated"),
        (["gradient-sensitivity", "--model", "demo"], "--profile is needed"),
        (["gradient-sensitivity"], "--model is needed"),
    ],
)
def test_the_verbs_errors(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned().save("plan.json")
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_layers_that_another_plan_starts_alike_are_taken_from_its_folder(tmp_path, monkeypatch):
    """As draws of a random selection: the same bits as made anew, and only what the draw changes is computed."""
    from toolkit.runs import started

    def drawn(protected: str, rank: int = 3) -> Plan:
        plan = Plan.protecting(None, "nf4", initializer="loftq(iterations=1)", **ADAPTER | {"rank": rank})
        return plan.model_copy(update={"layers": {protected: LayerPlan(quantizer="none")}})

    model, made, compute = make(), [], started.computed
    monkeypatch.setattr(started, "computed", lambda name, *a, **k: made.append(name) or compute(name, *a, **k))
    first, second = (f"model.layers.{at}.mlp.up_proj" for at in (0, 1))
    together, about = tmp_path / "starts", {"dtype": "float32", "progress": False}
    initialize(drawn(first), model, together / "a", beside=together, **about)
    assert len(made) == 20
    made.clear()
    file = initialize(drawn(second), model, together / "b", beside=together, **about)
    assert made == [first]
    alone = initialize(drawn(second), model, tmp_path / "alone", **about)
    assert file.base == alone.base and list(file.layers) == list(alone.layers) and file.plan == alone.plan
    for name in file.layers:
        one, other = (starts.read(where, name) for where in (together / "b", tmp_path / "alone"))
        assert torch.equal(one.A, other.A) and torch.equal(one.B, other.B) and one.residuals == other.residuals
        assert starts.digest_of(one.base) == starts.digest_of(other.base)
    for change in (about | {"dtype": "bfloat16"}, about | {"seed": 1}):
        made.clear()
        initialize(drawn(second), model, together / str(len(list(together.iterdir()))), beside=together, **change)
        assert len(made) == 20
    made.clear()
    initialize(drawn(second, rank=2), model, together / "rank", beside=together, **about)
    assert len(made) == 20
    (together / "c").mkdir()
    damaged = next((together / "a" / starts.LAYERS).glob("*q_proj*"))
    damaged.unlink()
    damaged.write_bytes(b"torn")
    made.clear()
    initialize(drawn("model.layers.2.mlp.up_proj"), model, tmp_path / "c", beside=together, **about)
    assert made == []  # what one folder lost, another holds
