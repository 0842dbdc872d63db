"""The table and figure of a study of starts: its numbers by hand, in every format; what is damaged is refused."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import toolkit as tk
from toolkit.analysis.printing.starts.summary import summary
from toolkit.errors import InputError
from toolkit.records.lock import Lock

_spec = importlib.util.spec_from_file_location("started_builders", Path(__file__).parent.parent / "started_builders.py")
built = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(built)

SIXTEEN = [30.0, 31.0, 29.0, 32.0, 30.5, 30.0, 28.0, 33.0]
PLAIN = [33.0, 34.5, 31.0, 35.0, 33.0, 33.5, 30.0, 36.0]
BETTER = [32.0, 33.0, 30.5, 34.0, 31.5, 32.0, 29.5, 34.5]
WORSE = [40.0, 39.0, 33.0, 44.0, 41.0, 38.5, 33.0, 47.0]


def small(zero, residuals, role="q_proj", **more):
    return built.layer(zero, residuals[-1], role=role, residuals=residuals, kept=len(residuals) - 1, **more)


def results(folder, *, fours=True, study=None):
    study = study or built.make_study()
    folder.mkdir(exist_ok=True)
    built.write(folder, study, "16-bit", "16-bit", {"none": SIXTEEN})
    plain = {"a": built.layer(0.1, 0.1, 300), "b": built.layer(0.2, 0.2, 100, "v_proj")}
    built.write(folder, study, "plain", "plain", {"none": PLAIN}, plain)
    ones = {"a": small(0.1, [0.1, 0.09, 0.08], parameters=300), "b": small(0.2, [0.2, 0.1], "v_proj")}
    notes = {"rounding: not positive definite": 1}
    built.write(folder, study, "fitted.s1", "fitted", {"none": BETTER}, ones, scaling=1.0, fallbacks=notes, seconds=2.5)
    if fours:
        fours = {"a": small(0.1, [0.1, 0.15], parameters=300), "b": small(0.2, [0.2, 0.6], "v_proj")}
        built.write(folder, study, "fitted.s4", "fitted", {"none": WORSE}, fours, scaling=4.0)
    return folder


def entry(data, arm, s):
    return next(e for e in data["entries"] if (e["arm"], e["scaling"]) == (arm, s))


def test_residuals_are_weighted_means_over_layers(tmp_path):
    data = summary(results(tmp_path / "r"))
    one, four, plain = entry(data, "fitted", 1.0), entry(data, "fitted", 4.0), entry(data, "plain", 4.0)
    assert one["relative"] == pytest.approx((300 * 0.8 + 100 * 0.5) / 400)
    assert one["residual"] == pytest.approx((300 * 0.08 + 100 * 0.1) / 400)
    assert four["relative"] == pytest.approx((300 * 1.5 + 100 * 3.0) / 400)
    assert (one["worse"], four["worse"], plain["worse"]) == (0, 2, 0)
    assert one["roles"]["v_proj"]["relative"] == pytest.approx(0.5)
    # layer b ended after its first iteration: it counts with that
    assert one["iterates"] == pytest.approx([1.0, (300 * 0.9 + 100 * 0.5) / 400, (300 * 0.8 + 100 * 0.5) / 400])
    assert plain["any_scaling"] and entry(data, "plain", 1.0)["run"] == "plain" and not four["any_scaling"]
    assert one["relative_output"] is None and one["peak_bytes"] == 2


def test_comparisons_are_paired_by_window_and_corrected_for_their_number(tmp_path):
    data = summary(results(tmp_path / "r"))
    one, four = data["contrasts"]
    assert (one["first"], one["second"], one["scaling"], four["scaling"]) == ("fitted", "plain", 1.0, 4.0)
    assert one["difference"] == pytest.approx(float(np.mean(np.subtract(BETTER, PLAIN))) / 10)
    assert one["coverage"] == four["coverage"] == pytest.approx(1 - 0.05 / 2)
    assert one["verdict"] == "lower" and four["verdict"] == "higher"
    assert one["low"] < one["difference"] < one["high"] < 0
    # beside Student's interval of the same coverage; with eight windows the bootstrap's is the wider one
    gap = np.subtract(BETTER, PLAIN) / 10
    low, high = stats.t.interval(0.975, 7, gap.mean(), gap.std(ddof=1) / np.sqrt(8))
    assert 1 < (one["high"] - one["low"]) / (high - low) < 2.5
    wide = summary(
        results(
            tmp_path / "w", study=built.make_study(analysis={"baseline": "plain", "block": 1, "correction": "none"})
        )
    )
    assert wide["contrasts"][0]["coverage"] == pytest.approx(0.95)
    assert wide["contrasts"][0]["high"] < one["high"]


def test_the_declared_outcome_is_what_is_compared(tmp_path):
    kl = summary(
        results(tmp_path / "r", study=built.make_study(analysis={"baseline": "plain", "block": 1, "outcome": "kl"}))
    )
    assert kl["contrasts"][0]["difference"] == pytest.approx(float(np.mean(np.subtract(BETTER, PLAIN))) / 1000)


def test_the_table_in_every_format(tmp_path):
    folder = results(tmp_path / "r")
    text = tk.table(folder)
    lines = text.splitlines()
    assert lines[0].startswith("- Exploratory: there is no lock.json")
    row = next(line for line in lines if line.startswith("| fitted") and "loftq" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["fitted", "1", "loftq", "0.08500", "0.7250", "0 of 2"]
    assert cells[6] == f"{sum(BETTER) / 80:.4f}" and cells[-2:] == ["1", "2.5"] and cells[-3] == "lower"
    assert "- fitted against plain: loss lower at s = 1 (−0.1125); higher at s = 4 (+0.6188)." in lines
    assert any("Fall-backs of fitted.s1 (layers): rounding: not positive definite: 1" in line for line in lines)
    data = json.loads(tk.table(folder, "json"))
    assert data["kind"] == "started-table" and len(data["entries"]) == 4
    found = list(csv.DictReader(io.StringIO(tk.table(folder, "csv"))))
    scores = [line for line in found if line["part"] == "score"]
    assert len(scores) == 5 and float(scores[-1]["loss"]) == pytest.approx(sum(WORSE) / 80, abs=1e-12)
    assert [line["verdict"] for line in found if line["part"] == "contrast"] == ["lower", "higher"]
    assert tk.table(folder, "latex").count(r"\begin{tabular}") == 3
    with pytest.raises(InputError, match="always paired by window"):
        tk.table(folder, paired=True)


def test_missing_runs_are_named_and_the_rest_is_printed(tmp_path):
    data = summary(results(tmp_path / "r", fours=False))
    assert data["missing"] == ["arm fitted at s = 4"] and len(data["contrasts"]) == 1
    assert "arm fitted at s = 4" in tk.table(tmp_path / "r")


def test_results_under_a_lock_are_confirmatory_until_something_changes(tmp_path):
    study, folder = built.make_study(), tmp_path / "r"
    folder.mkdir()
    lock = Lock(
        study=study.name,
        form=study.form,
        analysis=study.analysis,
        declaration=study.declaration,
        code={"toolkit": "0.1.0"},
        model="small",
        fingerprint="f0" * 32,
        texts={"letters": "ab" * 32},
        created="2025-12-31T00:00:00+00:00",
    )
    lock.save(folder / "lock.json")
    assert type(Lock.load(folder / "lock.json").analysis) is type(study.analysis)
    results(folder)
    assert "carry no lock" in tk.table(folder).splitlines()[0]
    for path in folder.glob("*/report.json"):
        data = json.loads(path.read_text())
        path.write_text(json.dumps(data | {"lock": lock.hash}))
    assert summary(folder)["status"]["confirmatory"]
    built.make_study(question="Another question?").save(folder / "study.json")
    assert "changed after it was locked" in tk.table(folder).splitlines()[0]


def test_what_is_damaged_or_foreign_is_refused(tmp_path):
    folder = results(tmp_path / "r")
    path = folder / "fitted.s1" / "report.json"
    whole = path.read_text()

    def changed(**changes):
        path.write_text(json.dumps(json.loads(whole) | changes))

    changed(settings="00" * 32)
    with pytest.raises(InputError, match="differ in settings"):
        summary(folder)
    changed(arm="fittet")
    with pytest.raises(InputError, match="did you mean 'fitted'"):
        summary(folder)
    changed(scaling=4.0)
    with pytest.raises(InputError, match=r"both tell of fitted at s = 4\.0"):
        summary(folder)
    scores = json.loads(whole)["scores"]
    scores["letters"]["none"]["loss"] += 0.01
    changed(scores=scores)
    with pytest.raises(InputError, match="were changed"):
        summary(folder)
    path.write_text(whole)
    (folder / "fitted.s1" / "rows.jsonl.gz").write_bytes(b"x")
    with pytest.raises(InputError, match="is not the file that"):
        summary(folder)


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_the_figure(tmp_path, ending):
    folder = results(tmp_path / "r")
    path = tk.figure(folder, tmp_path / f"figure.{ending}")
    first = path.read_bytes()
    assert len(first) > 1000
    if ending != "svg":  # whose ids are random
        assert tk.figure(folder, path).read_bytes() == first
    with pytest.raises(InputError, match="no figure 'effects'"):
        tk.figure(folder, path, kind="effects")


def test_the_figures_panels_show_the_entries_numbers(tmp_path, monkeypatch):
    from toolkit.analysis.printing import drawing

    pictures = []
    monkeypatch.setattr(drawing, "save", lambda picture, out: pictures.append(picture) or out)
    tk.figure(results(tmp_path / "r"), tmp_path / "figure.png")
    residual, loss = pictures[0].axes
    lines = {line.get_label(): line for line in residual.lines}
    assert lines["fitted"].get_ydata() == pytest.approx([0.725, 1.875]) and list(lines["fitted"].get_xdata()) == [1, 4]
    fitted = next(line for line in loss.lines if line.get_label() == "fitted")
    assert fitted.get_ydata() == pytest.approx([(sum(v) - sum(SIXTEEN)) / 80 for v in (BETTER, WORSE)])


def test_several_roundings_of_inputs_are_tables_of_their_own(tmp_path):
    study = built.make_study(activations=["none", "mxfp4"], scalings=[2.0])
    folder = tmp_path / "r"
    folder.mkdir()
    built.write(folder, study, "16-bit", "16-bit", {"none": SIXTEEN, "mxfp4": PLAIN})
    layers = {"a": built.layer(0.1, 0.1, output_zero=0.2, output=0.2)}
    built.write(folder, study, "plain", "plain", {"none": PLAIN, "mxfp4": WORSE}, layers)
    layers = {"a": built.layer(0.1, 0.12, output_zero=0.2, output=0.15)}
    built.write(folder, study, "fitted", "fitted", {"none": PLAIN, "mxfp4": BETTER}, layers, scaling=2.0)
    data = summary(folder)
    assert [(c["activations"], c["verdict"]) for c in data["contrasts"]] == [
        ("none", "not separated"),
        ("mxfp4", "lower"),
    ]
    assert entry(data, "fitted", 2.0)["relative_output"] == pytest.approx(0.75)
    text = tk.table(folder)
    assert "letters, inputs as they are:" in text and "letters, inputs rounded by mxfp4:" in text
    assert "fitted against plain with inputs rounded by mxfp4: loss lower" in text
    tk.figure(folder, tmp_path / "figure.svg")
