"""The study runner: right numbers, interruption anywhere, damage, full disks, and results that do not fit."""

from __future__ import annotations

import errno
import functools
import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

import toolkit as tk
from toolkit.errors import InputError, RunError
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.report import Report, unmask
from toolkit.runs import results
from toolkit.runs.ranking import runner
from toolkit.runs.texts.evaluation import Evaluation

run = functools.partial(runner.run, dtype="float32")
"""The same numbers on every CPU: the default dtype depends on its instructions."""

STUDY = {
    "name": "tiny",
    "question": "Does it run?",
    "model": "set by the test",
    "texts": {"letters": "set by the test"},
    "tokens": 256,
    "window": 64,
    "batch": 3,
    "budgets": ["layers=0.2", "parameters=0.3"],
    "arms": [
        {"selector": "top-error"},
        {"selector": "bottom-error", "name": "bottom"},
        {"selector": "bottom-error", "name": "bottom-like-top", "total_of": "top-error"},
    ],
    "controls": [
        {"selector": "random-matched(within=0.2)", "name": "matched", "draws": 4},
        {"selector": "random-count", "draws": 3, "like": ["top-error"]},
    ],
    "seed": 1,
    "analysis": {"control": "matched", "level": 0.2},
    "small": {"budgets": ["layers=0.2"], "controls": [{"selector": "random-count", "draws": 2, "name": "matched"}]},
}
MEASURED = 2 + 2 * 3 + 2 * 3 * 4 + 2 * 3  # base and base again, arms, matched draws, count-matched draws


@pytest.fixture
def study(tmp_path, checkpoints, text_file):
    """Write a study; changes to it are given as keywords."""

    def write(**changes):
        data = STUDY | {"model": str(checkpoints()), "texts": {"letters": str(text_file)}} | changes
        folder = tmp_path / "study"
        folder.mkdir(exist_ok=True)
        (folder / "study.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="module")
def whole(tmp_path_factory, checkpoints, text_file):
    """The results of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    data = STUDY | {"model": str(checkpoints()), "texts": {"letters": str(text_file)}}
    (folder / "study.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    return run(folder, device="cpu", progress=False)


def test_every_run_of_the_design_leaves_a_report(whole, facts):
    names = {p.parent.name for p in whole.glob("*/report.json")}
    expected = {"reference--16-bit", "reference--base", "repeat--base"}
    for budget in ("layers-0.2", "parameters-0.3"):
        for arm in ("top-error", "bottom", "bottom-like-top"):
            expected |= {f"{budget}--{arm}", f"{budget}--{arm}--matched"}
        expected.add(f"{budget}--top-error--random-count")
    assert names == expected
    assert not list(whole.glob("*/*.partial*")) and not list(whole.glob("**/.*.tmp"))
    assert {"study.json", "settings.json", "profile.json"} <= {p.name for p in whole.iterdir()}
    assert len({r["settings"] for r in facts(whole).values()}) == 1


def test_losses_are_those_of_built_models(whole, checkpoints, text_file):
    """The oracle: `tk.build` of the report's own plan, and the loss that transformers computes."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(checkpoints())(text_file.read_text(), return_tensors="pt")["input_ids"]
    ids = ids[0, :256].view(4, 64)
    profile = Profile.load(whole / "profile.json")
    checked = 0
    for path in whole.glob("*/report.json"):
        report = Report.load(path)
        plans = [(report.plan, report.scores)]
        if report.role == "control":
            held = [unmask(draw.mask, profile.names) for draw in report.draws]
            protected = [tk.Selection(**_selection(profile, names)) for names in held]
            plans = [(Plan.protecting(s, "nf4"), d.scores) for s, d in zip(protected, report.draws, strict=True)][:1]
        for plan, scores in plans:
            model = tk.build(checkpoints(), plan, device="cpu", dtype="float32")
            with torch.inference_mode():
                expected = model(input_ids=ids, labels=ids).loss.item()
            assert scores["letters"].loss == pytest.approx(expected, rel=1e-5)
            checked += 1
    assert checked == 3 + 6 + 8


def _selection(profile, names):
    rows = [row for row in profile.layers if row.name in set(names)]
    return {
        "selector": "by-hand",
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "layers": names,
        "parameters": sum(r.parameters for r in rows),
        "bytes": sum(r.bytes for r in rows),
        "of": {"layers": len(profile), "parameters": profile.parameters, "bytes": profile.bytes},
    }


def test_the_study_is_repeatable(whole, study, text_file, facts):
    again = run(study(), device="cpu", progress=False)
    assert facts(again) == facts(whole)


def test_totals_and_masks(whole, facts):
    found = facts(whole)
    profile = Profile.load(whole / "profile.json")
    sizes = {row.name: row.parameters for row in profile.layers}
    for name, report in found.items():
        if report["role"] != "control":
            continue
        target = found[f"{name.rpartition('--')[0]}"]["selection"]["parameters"]
        assert report["layers"] == profile.names
        assert len({d["mask"] for d in report["draws"]}) == len(report["draws"])
        for draw in report["draws"]:
            held = unmask(draw["mask"], profile.names)
            assert (draw["layers"], draw["parameters"]) == (len(held), sum(sizes[n] for n in held))
            assert draw["mismatch"] == pytest.approx((draw["parameters"] - target) / target)
    like = found["layers-0.2--bottom-like-top"]["selection"]
    assert like["parameters"] <= found["layers-0.2--top-error"]["selection"]["parameters"]


def test_rows_add_up_to_the_scores(whole, facts):
    for name, report in facts(whole).items():
        with gzip.open(whole / name / "rows.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [dict(zip(report["rows"]["columns"], json.loads(line), strict=True)) for line in lines]
        assert len(rows) == report["rows"]["count"]
        scores = {d["index"]: d["scores"] for d in report.get("draws", [])} or {0: report["scores"]}
        assert [r["draw"] for r in rows] == sorted(scores)
        for row in rows:
            score, tokens = scores[row["draw"]]["letters"], 4 * 63
            assert (row["text"], len(row["nll"]), score["tokens"]) == ("letters", 4, tokens)
            assert score["loss"] == pytest.approx(sum(row["nll"]) / tokens, rel=1e-12)
            assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
            assert row.keys() == ({"draw", "text", "nll"} | ({"kl", "top"} if report["role"] != "control" else set()))
            if report["role"] != "control":
                assert score["kl"] == pytest.approx(sum(row["kl"]) / tokens, rel=1e-12)
                assert score["agreement"] == sum(row["top"]) / tokens
    base, full = (facts(whole)[f"reference--{n}"]["scores"]["letters"] for n in ("base", "16-bit"))
    assert full["kl"] == 0 and full["agreement"] == 1
    assert base["kl"] > 0.001 and base["loss"] != full["loss"]


def test_the_base_is_measured_again_otherwise(whole):
    """Another batch size and thread count move the loss by rounding alone."""
    first, again = (Report.load(whole / name / "report.json") for name in ("reference--base", "repeat--base"))
    assert (again.role, again.selection.layers, again.plan) == ("repeat", [], first.plan)
    (said,) = again.labels
    assert said.startswith("measured with batch 1 in place of 3, and ")
    assert again.provenance.threads != first.provenance.threads == torch.get_num_threads()
    a, b = first.scores["letters"], again.scores["letters"]
    assert b.loss == pytest.approx(a.loss, abs=1e-4) and b.kl == pytest.approx(a.kl, abs=1e-4)
    assert (a.tokens, a.agreement) == (b.tokens, pytest.approx(b.agreement, abs=0.01))


@pytest.mark.parametrize("stop", [0, 1, 2, 7, 8, 9, 13, 21, MEASURED - 1])
def test_an_interrupted_study_goes_on_where_it_stopped(whole, study, measurements, stop, facts):
    measurements.stop = stop
    with pytest.raises(KeyboardInterrupt):
        run(study(), device="cpu", progress=False)
    measurements.stop = None
    folder = run(study(), device="cpu", progress=False)
    assert measurements.count == MEASURED  # nothing was measured twice
    assert facts(folder) == facts(whole)
    run(study(), device="cpu", progress=False)
    assert measurements.count == MEASURED


def test_a_torn_line_is_dropped_and_the_draw_repeated(whole, study, measurements, facts):
    measurements.stop = 2 + 6 + 3
    with pytest.raises(KeyboardInterrupt):
        run(study(), device="cpu", progress=False)
    (partial,) = (study() / "results").glob("*/draws.partial.jsonl")
    content = partial.read_bytes()
    assert content.count(b"\n") == 4  # a header and three draws
    partial.write_bytes(content[:-9])
    measurements.stop = None
    folder = run(study(), device="cpu", progress=False)
    assert measurements.count == MEASURED + 1
    assert facts(folder) == facts(whole)


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_was_finished(whole, study, tmp_path, facts):
    folder = study()
    code = f"from toolkit.runs.ranking import run; run({str(folder)!r}, device='cpu', dtype='float32', progress=False)"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)  # the repeat names its threads
    while process.poll() is None and len(list(folder.glob("results/*/rows.jsonl.gz"))) < 9:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not list(folder.glob("results/*/*.damaged*"))
    assert facts(run(folder, device="cpu", progress=False)) == facts(whole)


@pytest.mark.parametrize("what", ["truncated", "empty", "no json", "rows changed", "rows missing"])
def test_a_damaged_report_is_set_aside_and_its_run_repeated(whole, study, measurements, capsys, what, facts):
    folder = study() / "results"
    shutil.copytree(whole, folder)
    path = folder / "layers-0.2--top-error--matched" / "report.json"
    if what.startswith("rows"):
        rows = path.with_name("rows.jsonl.gz")
        rows.unlink() if what == "rows missing" else rows.write_bytes(rows.read_bytes()[:-1] + b"?")
    else:
        content = path.read_bytes()
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "no json": b"{]"}[what])
    run(study(), device="cpu", progress=False)
    assert "set aside as report.json.damaged; the run is repeated" in capsys.readouterr().err
    assert path.with_name("report.json.damaged").exists()
    assert measurements.count == 4
    assert facts(folder) == facts(whole)


@pytest.mark.parametrize("at", [3, 11, 17, 30])
def test_a_full_disk_is_an_error_and_loses_nothing(whole, study, monkeypatch, at, facts):
    """The at-th time that bytes are to reach the disk, it is full."""
    fsync, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*No space left on device"):
        run(study(), device="cpu", progress=False)
    before = facts(study() / "results")
    assert all(before[name] == report for name, report in facts(whole).items() if name in before)
    assert facts(run(study(), device="cpu", progress=False)) == facts(whole)


@pytest.mark.slow
def test_a_file_size_limit_of_the_system_is_an_error(study):
    """A real write that the system refuses, in a process of its own."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from toolkit.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))\n"
        f"sys.exit(main(['run', {str(study())!r}, '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "error: cannot write" in done.stderr and "Traceback" not in done.stderr


def test_other_texts_or_windows_are_refused_by_name(whole, study, tmp_path, facts):
    shutil.copytree(whole, study() / "results")
    other = tmp_path / "letters.txt"
    other.write_text("zyx" * 700, encoding="utf-8")
    with pytest.raises(InputError, match=r"texts.letters.sha256 was [0-9a-f]{12} and is now [0-9a-f]{12}"):
        run(study(), texts=[str(other)], device="cpu", progress=False)
    with pytest.raises(InputError, match=r"batch was 3 and is now 2"):
        run(study(batch=2), device="cpu", progress=False)
    with pytest.raises(InputError, match=r"base was nf4 and is now mxfp4"):
        run(study(base="mxfp4"), device="cpu", progress=False)
    with pytest.raises(InputError, match=r"compute_dtype was float32 and is now bfloat16"):
        run(study(), device="cpu", dtype="bfloat16", progress=False)
    with pytest.raises(InputError, match="declared with analysis"):
        run(study(analysis={"control": "matched", "level": 0.3}), device="cpu", progress=False)
    assert facts(study() / "results") == facts(whole)


def test_the_same_text_under_another_path_fits(whole, study, text_file, tmp_path, measurements):
    shutil.copytree(whole, study() / "results")
    copy = tmp_path / "copy.txt"
    shutil.copy(text_file, copy)
    run(study(), texts={"letters": str(copy)}, device="cpu", progress=False)
    assert measurements.count == 0


def test_changed_weights_are_refused(whole, study, checkpoints, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(whole, study() / "results")
    model = tmp_path / "model"
    shutil.copytree(checkpoints(), model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="another model, or changed weights"):
        run(study(), model=model, device="cpu", progress=False)


def test_runs_and_draws_that_the_study_does_not_have_are_refused(whole, study):
    shutil.copytree(whole, study() / "results")
    with pytest.raises(InputError, match=r"runs that the study does not have \(parameters-0.3--"):
        run(study(budgets=["layers=0.2"]), device="cpu", progress=False)
    controls = [STUDY["controls"][0] | {"draws": 5}, STUDY["controls"][1]]
    with pytest.raises(InputError, match="holds 4 draws, and the study asks for 5"):
        run(study(controls=controls), device="cpu", progress=False)


def test_a_report_of_a_newer_version_is_not_set_aside(whole, study):
    folder = study() / "results"
    shutil.copytree(whole, folder)
    path = folder / "reference--base" / "report.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 9', 1))
    with pytest.raises(InputError, match="newer version"):
        run(study(), device="cpu", progress=False)
    assert path.exists()


def test_more_budgets_may_follow(whole, study, measurements, facts):
    folder = study() / "results"
    shutil.copytree(whole, folder)
    run(study(budgets=["layers=0.2", "parameters=0.3", "layers=0.4"]), device="cpu", progress=False)
    assert measurements.count == 3 + 3 * 4 + 3
    assert {k: v for k, v in facts(folder).items() if not k.startswith("layers-0.4")} == facts(whole)


def test_what_cannot_be_shown_is_said_before_it_starts(study, capsys, measurements):
    measurements.stop = 0
    controls = [
        {"selector": "random-matched(within=0)", "name": "matched", "draws": 10**6},
        {"selector": "random-count", "draws": 4},
    ]
    analysis = {"control": "random-count", "level": 0.05}
    declared = study(
        controls=controls, analysis=analysis, budgets=["bytes=40KiB"], arms=[{"selector": "top-error"}], small=None
    )
    with pytest.raises(KeyboardInterrupt):
        run(declared, device="cpu", progress=False)
    said = capsys.readouterr().err
    assert "bytes-40960--top-error--random-count: descriptive: 4 draws give no p below 0.2" in said
    assert "subsets exist of the 1000000 draws asked for; all are used" in said
    assert (
        "note: 1 claim (1 arm, 1 text, 1 budget), test each, correction holm: 4 draws reach p = 0.2, and the "
        "declared level is 0.05"
    ) in said


def test_the_small_form_says_so_everywhere(study, capsys, facts):
    folder = run(study(), small=True, device="cpu", progress=False)
    assert folder == study() / "results-small"
    assert "small form" in capsys.readouterr().err
    reports = facts(folder)
    assert len(reports) == 3 + 3 + 3
    assert all(r["form"] == "small" and "small form" in r["labels"] for r in reports.values())
    control = reports["layers-0.2--top-error--matched"]
    assert any(
        label.startswith("descriptive: 2 draws give no p below 0.333 (1 after correction for 3 claims)")
        for label in control["labels"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"controls": [{"selector": "top-error", "name": "matched", "draws": 2}]},
            "'matched': top-error is not random",
        ),
        ({"arms": [{"selector": "top-eror", "name": "top-error"}]}, "did you mean 'top-error'"),
        ({"base": "nf5"}, "did you mean 'nf4'"),
        ({"arms": [{"selector": "random-matched", "name": "top-error"}]}, "can only be a control"),
        ({"tokens": 63}, "less than one window"),
        ({"window": 128, "tokens": None, "texts": {"a": "nowhere.txt"}}, "no file nowhere.txt"),
        ({"budgets": ["layers=0.2", "layers=0.20"]}, "budgets names 'layers=0.2' twice"),
    ],
)
def test_studies_that_cannot_run_are_refused(study, change, message):
    with pytest.raises(InputError, match=message):
        run(study(**change), device="cpu", progress=False)


def test_one_process_a_folder(study):
    folder = study() / "results"
    with results.locked(folder), pytest.raises(RunError, match="another process is writing results"):
        run(study(), device="cpu", progress=False)


def test_a_folder_that_cannot_be_made(study):
    with pytest.raises(RunError, match="cannot make the results folder"):
        run(study(), out=study() / "study.yaml" / "x", device="cpu", progress=False)


def test_a_loss_that_is_not_finite_names_run_and_draw(study, monkeypatch):
    measure = Evaluation.measure
    monkeypatch.setattr(Evaluation, "measure", lambda self, *a: {k: v * math.nan for k, v in measure(self, *a).items()})
    with pytest.raises(RunError, match=r"reference--base, draw 0: the loss on text 'letters', window 0, is not finite"):
        run(study(), device="cpu", progress=False)


def test_provenance_tells_device_versions_and_memory(whole):
    provenance = Report.load(whole / "reference--base" / "report.json").provenance
    assert provenance.packages["torch"] == torch.__version__
    assert provenance.compute_dtype == "float32" and provenance.threads == torch.get_num_threads()
    assert provenance.peak_memory["peak_resident"] >= provenance.peak_memory["base_resident"] > 10**8
    assert provenance.seconds > 0 and provenance.fallbacks.keys().isdisjoint({"reference logits recomputed (batches)"})


def test_the_table_reads_what_the_runner_wrote(whole):
    table = pytest.importorskip("toolkit.analysis.printing.table")
    assert "top-error" in table.table(whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_nearly_the_same_losses(whole, study, facts):
    folder = run(study(), device="cuda", dtype="float32", progress=False)
    for name, report in facts(folder).items():
        if report["role"] == "arm":
            expected = facts(whole)[name]["scores"]["letters"]["loss"]
            assert report["scores"]["letters"]["loss"] == pytest.approx(expected, abs=2e-3)


def test_a_profile_with_a_row_taken_out_is_refused(whole, study, tmp_path):
    data = json.loads((whole / "profile.json").read_text())
    del data["layers"][3]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"profile\.json lists 20 layers, and the model has 21"):
        run(study(), out=tmp_path / "out", device="cpu", progress=False)
