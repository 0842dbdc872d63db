"""The runner of studies of starts: numbers against a second way of computing them, resuming, and refusals."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import toolkit as tk
from toolkit.errors import InputError
from toolkit.records.initialization import Initialization
from toolkit.records.rows import read
from toolkit.records.started import Started
from toolkit.runs.starting.single import initialize
from toolkit.weights.layers import layers_of


def run(folder, **options):
    return tk.run(folder, device="cpu", dtype="float32", progress=False, **options)


def reports(folder) -> dict[str, Started]:
    return {path.parent.name: Started.load(path) for path in sorted(folder.glob("*/report.json"))}


def loss_of(model, ids) -> float:
    """Mean over windows, straight from transformers."""
    with torch.no_grad():
        return float(torch.stack([model(input_ids=w[None], labels=w[None]).loss for w in ids]).mean())


def test_losses_and_residuals_are_those_of_a_model_with_the_started_weights(study):
    folder = study()
    found = reports(run(folder))
    assert set(found) == {"16-bit", "plain", "fitted.s0.5", "fitted.s4"}
    declared = Initialization.read(folder)
    tokenizer = AutoTokenizer.from_pretrained(declared.model)
    text = Path(declared.texts["letters"]).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:512]).view(8, 64)
    for name, initializer, s in (("plain", "zero", 0.5), ("fitted.s4", "loftq(iterations=2)", 4.0)):
        model = AutoModelForCausalLM.from_pretrained(declared.model, dtype=torch.float32).eval()
        stored = AutoModelForCausalLM.from_pretrained(declared.model, dtype="auto")
        exact = {layer.name: layer.weight() for layer in layers_of(stored)}
        assert set(found[name].layers) == set(exact)
        for layer in layers_of(model):
            start = initialize(
                exact[layer.name],
                initializer,
                "nf4",
                rank=4,
                alpha=4 * s,
                name=layer.name,
                dtype=torch.float32,
            )
            assert start.scaling == s
            merged = start.base.dequantize(torch.float32) + s * (start.B @ start.A)
            layer.weight().copy_(merged)
            w = exact[layer.name].double()
            residual = float((w - merged.double()).norm() / w.norm())
            assert found[name].layers[layer.name].residual == pytest.approx(residual, rel=1e-5)
            assert start.residual == pytest.approx(residual, rel=1e-4)
        assert found[name].scores["letters"]["none"].loss == pytest.approx(loss_of(model, ids), abs=2e-5)
    sixteen = AutoModelForCausalLM.from_pretrained(declared.model, dtype=torch.float32).eval()
    assert found["16-bit"].scores["letters"]["none"].loss == pytest.approx(loss_of(sixteen, ids), abs=2e-5)
    assert found["16-bit"].scores["letters"]["none"].kl == pytest.approx(0, abs=1e-6)
    assert found["16-bit"].plan is None and found["plain"].scaling is None and found["fitted.s4"].scaling == 4


def test_the_plain_arm_is_its_own_yardstick_and_a_fitted_one_is_below(study):
    found = reports(run(study()))
    for layer in found["plain"].layers.values():
        assert layer.residual == layer.zero > 0 and layer.residuals == [pytest.approx(layer.zero, rel=1e-6)]
    halves, fours = found["fitted.s0.5"].layers, found["fitted.s4"].layers
    for name, layer in fours.items():
        assert layer.zero == found["plain"].layers[name].zero
        assert layer.residual < layer.zero
        assert layer.residual == pytest.approx(halves[name].residual, rel=1e-4)  # the same at every s
        assert layer.residuals[layer.kept] == pytest.approx(layer.residual, rel=1e-4)


def test_rows_add_up_to_the_scores(study):
    folder = run(study())
    for name, report in reports(folder).items():
        columns = read(folder / name / report.rows.file, report.rows, name)
        assert columns["activations"] == ["none"] and columns["text"] == ["letters"]
        score = report.scores["letters"]["none"]
        assert math.fsum(columns["nll"][0]) / score.tokens == pytest.approx(score.loss, abs=1e-9)
        assert len(columns["nll"][0]) == 8 and score.tokens == 8 * 63


def test_an_interrupted_study_goes_on_and_what_is_there_is_not_measured_again(study, monkeypatch):
    from toolkit.runs.initialization.bench import Bench

    whole = {name: r.model_dump(exclude={"provenance", "seconds"}) for name, r in reports(run(study())).items()}
    folder, measure, calls = study(), Bench.measure, []

    def stopped(self, what, rounded):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(what)
        return measure(self, what, rounded)

    monkeypatch.setattr(Bench, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(folder)
    assert set(reports(folder / "results")) == {"16-bit", "plain"}
    monkeypatch.setattr(
        Bench, "measure", lambda self, what, rounded: calls.append(what) or measure(self, what, rounded)
    )
    found = reports(run(folder))
    assert calls == ["plain", "fitted.s0.5", "fitted.s4"]

    def timeless(data):
        for layer in data["layers"].values():
            layer.pop("seconds")
        return data

    again = {name: r.model_dump(exclude={"provenance", "seconds"}) for name, r in found.items()}
    assert {n: timeless(d) for n, d in again.items()} == {n: timeless(d) for n, d in whole.items()}
    run(folder)
    assert len(calls) == 3


def test_inputs_are_rounded_where_it_is_asked_for(study):
    """One matrix of a model whose inputs are rounded by hand."""
    folder = study(activations=["none", "mxfp4"], arms=[{"name": "plain"}])
    found = reports(run(folder))
    declared = Initialization.read(folder)
    model = AutoModelForCausalLM.from_pretrained(declared.model, dtype=torch.float32).eval()
    quantizer = tk.quantizer("mxfp4")
    for layer in layers_of(model):
        layer.module.register_forward_pre_hook(lambda _, args: (quantizer.each_row(args[0]),))
    tokenizer = AutoTokenizer.from_pretrained(declared.model)
    text = Path(declared.texts["letters"]).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:512]).view(8, 64)
    scores = found["16-bit"].scores["letters"]
    assert scores["mxfp4"].loss == pytest.approx(loss_of(model, ids), abs=2e-5)
    assert scores["mxfp4"].kl > 0 == scores["none"].kl
    assert found["plain"].scores["letters"]["mxfp4"].kl > found["plain"].scores["letters"]["none"].kl > 0


def test_output_errors_are_those_of_the_layers_outputs(study, other_text):
    """√(Σ‖(W − Ŵ)x‖²/Σ‖Wx‖²) over the calibration tokens, the inputs collected by hand."""
    folder = study(calibration={"text": str(other_text), "windows": 5, "window": 32}, scalings=[2.0])
    found = reports(run(folder))
    assert found["plain"].calibration.tokens == 160 and found["fitted"].scaling == 2 and found["plain"].scaling is None
    declared = Initialization.read(folder)
    model = AutoModelForCausalLM.from_pretrained(declared.model, dtype=torch.float32).eval()
    inputs = {}
    for layer in layers_of(model):
        layer.module.register_forward_pre_hook(
            lambda _, args, name=layer.name: inputs.setdefault(name, []).append(args[0].flatten(0, 1).double())
        )
    tokenizer = AutoTokenizer.from_pretrained(declared.model)
    text = other_text.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:160]).view(5, 32)
    with torch.no_grad():
        model(input_ids=ids)
    for layer in layers_of(model):
        w = layer.weight().double()
        x = torch.cat(inputs[layer.name])
        packed = tk.quantizer("nf4").quantize(layer.weight().to(torch.bfloat16))
        error = w - packed.dequantize(torch.float32).double()
        expected = float((x @ error.mT).norm() / (x @ w.mT).norm())
        assert found["plain"].layers[layer.name].output == pytest.approx(expected, rel=1e-4)
        assert found["fitted"].layers[layer.name].output_zero == pytest.approx(expected, rel=1e-4)


def test_protected_layers_are_untouched(study):
    folder = study(
        arms=[
            {"name": "plain"},
            {"name": "some", "protect": {"selector": "top-error", "budget": "layers=0.3"}},
        ],
        scalings=[1.0],
    )
    found = reports(run(folder))
    protected = set(found["some"].plan.layers)
    assert protected and all(found["some"].layers[n].residual == 0 for n in protected)
    assert all(layer.residual > 0 for n, layer in found["some"].layers.items() if n not in protected)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "mixtral"])
def test_other_families(family, study):
    found = reports(run(study(family, scalings=[2.0])))
    assert found["plain"].scores["letters"]["none"].kl > 0
    assert all(layer.residual < layer.zero for layer in found["fitted"].layers.values())


def test_a_lock_made_before_the_runs_stands_in_every_report(study):
    folder = study()
    path = tk.lock(folder)
    found = reports(run(folder))
    from toolkit.records.lock import Lock

    assert {r.lock for r in found.values()} == {Lock.load(path).hash}
    assert set(Lock.load(path).texts) == {"letters"}
    with pytest.raises(InputError, match="locks something else"):
        data = (folder / "study.yaml").read_text().replace("rank: 4", "rank: 5")
        (folder / "study.yaml").write_text(data)
        tk.lock(folder)


def test_results_of_other_settings_are_not_mixed(study):
    folder = study()
    run(folder)
    data = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(data.replace("tokens: 512", "tokens: 256"))
    with pytest.raises(InputError, match=r"texts\.letters\.tokens was 512 and is now 256"):
        run(folder)
    (folder / "study.yaml").write_text(data.replace("loftq(iterations=2)", "loftq(iterations=3)"))
    with pytest.raises(InputError, match="another plan"):
        run(folder)
    (folder / "study.yaml").write_text(data.replace("resamples: 400", "resamples: 401"))
    with pytest.raises(InputError, match="declared with analysis"):
        run(folder)


def test_what_cannot_be_run_is_refused_before_anything_is_loaded(study, text_file, other_text, tmp_path):
    with pytest.raises(InputError, match="rank of 1 to 32"):
        run(study(rank=33))
    with pytest.raises(InputError, match=r"scaler fixed.* gives 1 where s = 0\.5"):
        run(study(scaler="fixed"))
    with pytest.raises(InputError, match="did you mean 'loftq'"):
        run(study(arms=[{"name": "plain", "initializer": "loftqq"}]))
    with pytest.raises(InputError, match="which text 'letters' is evaluated on"):
        run(study(calibration={"text": str(text_file)}))
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text_file.read_bytes())
    with pytest.raises(InputError, match="is text 'letters'"):
        run(study(calibration={"text": str(copy)}))
    with pytest.raises(InputError, match="a text is given for 'latters'; did you mean 'letters'"):
        run(study(), texts={"latters": str(other_text)})
    with pytest.raises(InputError, match="has no calibration"):
        run(study(), calibration=str(other_text))
    with pytest.raises(InputError, match="not for a study of kind 'initialization'"):
        run(study(), workers=2)
    short = tmp_path / "short.txt"
    short.write_text("ab")
    with pytest.raises(InputError, match="less than one window"):
        run(study(calibration={"text": str(short)}))


def test_a_reports_layers_stand_one_a_line(study):
    folder = run(study())
    lines = (folder / "plain" / "report.json").read_text(encoding="utf-8").splitlines()
    assert sum('"residual":' in line for line in lines) == len(json.loads("\n".join(lines))["layers"])


def test_every_batch_and_layer_is_a_step_of_the_progress_where_stderr_is_no_terminal(
    study, other_text, monkeypatch, capsys
):
    """Of what it does, how far it is, and how long it takes: also while the 16-bit model's inputs are gathered."""
    from toolkit.runs import progress

    monkeypatch.setattr(progress, "EVERY", 0.0)
    arms = [{"name": "plain", "base": "nvfp4"}, {"name": "compensated", "base": "nvfp4", "initializer": "gptq"}]
    folder = study(
        arms=arms,
        scalings=[2.0],
        activations=["none", "nvfp4"],
        calibration={"text": str(other_text), "windows": 8, "window": 64},
    )
    tk.run(folder, device="cpu", dtype="float32")
    lines = capsys.readouterr().err.splitlines()
    told = [re.fullmatch(r"(.*): (\d+) of (\d+)(?:, .*)?", line) for line in lines]
    steps = [(m[1], int(m[2]), int(m[3])) for m in told if m and not m[1].startswith("not as asked")]
    total = steps[-1][2]
    assert {each[2] for each in steps} == {total} and steps[-1][1] == total
    assert [each[1] for each in steps] == sorted(each[1] for each in steps)
    doing = [each[0] for each in steps]
    layers = len(reports(folder / "results")["plain"].layers)
    scored = 3  # batches of 3 of 8 windows
    assert doing.count("moments of the 16-bit model's inputs on the calibration text") == 1 + 3
    assert doing.count("scoring the 16-bit model") == 1 + scored
    assert doing.count("scoring compensated, inputs nvfp4") == 1 + scored
    assert sum(each.startswith("calibrating ") for each in doing) == layers
    assert total == 3 + 2 * scored + 2 * (layers + 2 * scored) + layers
    assert all(re.search(r" left$|, in ", line) for line in lines if re.search(r": [1-9]\d* of \d+", line))
