"""Studies end to end on a very small model: reports, resuming, what ends one run, and what is refused."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
import yaml

from toolkit.analysis.printing.table import table
from toolkit.errors import InputError
from toolkit.records import rows as rows_file
from toolkit.records.finetuning import FineTuning
from toolkit.records.lock import Lock
from toolkit.records.trained import Trained
from toolkit.runs import finetuning, studies
from toolkit.runs.finetuning.bench import Bench
from toolkit.runs.training import Pacing
from toolkit.runs.training.fair_trainer import FairTrainer

run = functools.partial(finetuning.run, device="cpu", dtype="float32", progress=False)

NAMES = {
    "sums--qlora--untrained",
    *(f"sums--{arm}--seed{seed}" for arm in ("qlora", "top", "drawn") for seed in (0, 1)),
    "sums--qlora--seed0-r1",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    """The results of an uninterrupted run, with an A/A run and adapters kept."""
    from .conftest import STUDY

    folder = tmp_path_factory.mktemp("whole")
    text = yaml.safe_dump(STUDY | {"model": str(model), "repeats": {"arm": "qlora", "count": 2}, "keep_adapters": True})
    (folder / "study.yaml").write_text(text, encoding="utf-8")
    return run(folder)


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the study and its results that a test may change."""
    shutil.copytree(whole.parent, tmp_path / "copy")
    return tmp_path / "copy"


def reports(folder):
    return {path.parent.name: Trained.load(path) for path in sorted((folder / "runs").glob("*/report.json"))}


def change(folder, **changes):
    data = yaml.safe_load((folder / "study.yaml").read_text()) | changes
    (folder / "study.yaml").write_text(yaml.safe_dump(data))
    return folder


def test_every_run_of_the_design_leaves_a_report(whole):
    found = reports(whole)
    assert set(found) == NAMES and all(report.finished for report in found.values())
    assert len({report.settings for report in found.values()}) == 1
    assert len({(report.train.sha256, report.test.sha256) for report in found.values()}) == 1
    trained = found["sums--top--seed1"]
    assert (trained.course.steps, trained.course.planned, trained.course.examples) == (3, 3, 12)
    assert trained.seeds.adapter == trained.seeds.data == trained.seeds.draw == 1
    assert trained.train.rows == 24 and trained.test.rows == 16 and trained.train.source == "code"
    assert len(trained.protect.layers) == 5 and trained.adapt is None
    assert {"base_resident", "peak_resident"} <= set(trained.provenance.peak_memory)
    memory = trained.provenance.peak_memory
    assert memory["peak_resident"] >= memory["base_resident"] > 0
    assert not list(whole.glob("runs/*/checkpoint*"))
    assert FineTuning.load(whole / "study.json").name == "tiny"


def test_scores_are_the_rows(whole):
    for name, report in reports(whole).items():
        columns = rows_file.read(whole / "runs" / name / report.rows.file, report.rows, name)
        scores = report.scores[""]
        assert scores.rows == len(columns["nll"]) == 16
        assert scores.loss == pytest.approx(sum(columns["nll"]) / sum(columns["tokens"]), abs=1e-6)
        assert scores.score == pytest.approx(sum(columns["score"]) / 16)
        for nll, options, gold, prediction, score in zip(
            columns["nll"], columns["options"], columns["gold"], columns["prediction"], columns["score"], strict=True
        ):
            assert nll == options[gold]
            assert prediction == min(range(4), key=options.__getitem__) and score == (prediction == gold)


def test_training_moves_the_loss_and_the_untrained_run_is_the_quantized_base(whole, model, declared, profile):
    from toolkit.records.plan import Plan
    from toolkit.runs.building import build
    from toolkit.runs.finetuning.data import read_rows
    from toolkit.runs.models import load_tokenizer
    from toolkit.runs.tasks import evaluate

    found = reports(whole)
    untrained = found["sums--qlora--untrained"]
    base = build(str(model), Plan.protecting(None, "nf4"), device="cpu", dtype="float32")
    rows = read_rows(declared(), "sums")
    oracle = evaluate(base, load_tokenizer(str(model)), rows.task, rows.test, length=64, batch=5)
    assert untrained.scores[""].loss == pytest.approx(oracle.scores[""].loss, rel=1e-5)
    assert untrained.role == "untrained" and untrained.course.steps == untrained.course.planned == 0
    assert untrained.course.trainable > 0 and untrained.adapter is None
    for name, report in found.items():
        if report.role != "untrained":
            assert report.scores[""].loss < untrained.scores[""].loss - 0.1, name


def test_the_a_a_run_is_the_same_bits_on_a_cpu(whole, told):
    first, again = (told(whole)[name] for name in ("sums--qlora--seed0", "sums--qlora--seed0-r1"))
    assert again["role"] == "repeat" and first["scores"] == again["scores"] and first["course"] == again["course"]
    assert first["rows"]["sha256"] == again["rows"]["sha256"]
    assert told(whole)["sums--qlora--seed1"]["rows"]["sha256"] != first["rows"]["sha256"]


def test_draws_differ_between_seeds(whole):
    found = reports(whole)
    drawn = [found[f"sums--drawn--seed{seed}"].protect for seed in (0, 1)]
    assert drawn[0].layers != drawn[1].layers
    assert [selection.seed for selection in drawn] == [0, 1]
    assert all(selection.matched_to.hash == found["sums--top--seed0"].protect.layers_hash for selection in drawn)


def test_kept_adapters_load_in_stock_peft(whole, model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = whole / "runs" / "sums--top--seed0"
    assert reports(whole)["sums--top--seed0"].adapter == "adapter"
    dense = AutoModelForCausalLM.from_pretrained(model)
    loaded = PeftModel.from_pretrained(dense, folder / "adapter")
    assert any(p.abs().sum() > 0 for n, p in loaded.named_parameters() if "lora_B" in n)


def test_what_is_there_is_not_done_again(copy, told, monkeypatch, capsys):
    before = told(copy / "results")
    monkeypatch.setattr(Bench, "do", lambda *a, **k: pytest.fail("a finished run was done again"))
    run(copy)
    assert "8 of 8 runs are on disk already" in capsys.readouterr().err
    assert told(copy / "results") == before


def test_an_interrupted_study_goes_on(study, whole, told, monkeypatch):
    folder, done = study(repeats={"arm": "qlora", "count": 2}, keep_adapters=True), Bench.do
    step = FairTrainer.training_step
    count = 0

    def stopped(self, *arguments, **named):
        nonlocal count
        count += 1
        if count == 8:  # in the third run's second step
            raise KeyboardInterrupt
        return step(self, *arguments, **named)

    monkeypatch.setattr(FairTrainer, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(folder)
    monkeypatch.undo()
    left = []
    monkeypatch.setattr(Bench, "do", lambda self, one, **k: (left.append(one.run.name), done(self, one, **k))[1])
    run(folder)
    assert len(left) == 5
    assert told(folder / "results") == told(whole)


def test_a_damaged_report_is_set_aside_and_made_again(copy, told, whole, capsys):
    path = copy / "results" / "runs" / "sums--top--seed0" / "report.json"
    path.write_text(path.read_text()[:100])
    run(copy)
    assert "set aside as report.json.damaged" in capsys.readouterr().err
    assert (path.parent / "report.json.damaged").exists()
    assert told(copy / "results") == told(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"levers": {"steps": 4, "batch": 4}},
            r"results of other settings.*tasks\.sums\.levers\.steps was 3 and is now 4",
        ),
        ({"tasks": {"sums": {"task": "arithmetic(largest=10)", "train_rows": 20, "rows": 16}}}, r"tasks\.sums\.train"),
        ({"batch": 7}, "batch was 32 and is now 7"),
        ({"analysis": {"baseline": "top"}}, "declared with analysis"),
        ({"repeats": {"arm": "top", "count": 2}}, "declared with repeats"),
        ({"seeds": 1}, "holds runs that the study does not have"),
        (
            {
                "arms": [
                    {"name": "qlora", "scaler": "rslora"},
                    {"name": "top", "base": "none"},
                    {"name": "drawn", "dora": True},
                ]
            },
            "made with another plan than the study now gives: the arm was changed",
        ),
    ],
)
def test_results_of_two_studies_are_never_mixed(copy, changes, message, told):
    before = told(copy / "results")
    with pytest.raises(InputError, match=message):
        run(change(copy, **changes))
    assert told(copy / "results") == before


@pytest.mark.parametrize("key", ["run", "arm", "seeds"])
def test_a_report_of_another_run_is_not_taken_for_this_ones(copy, key):
    path = copy / "results" / "runs" / "sums--top--seed0" / "report.json"
    data = json.loads(path.read_text())
    data[key] = {"run": "another", "arm": "drawn", "seeds": data["seeds"] | {"draw": 7}}[key]
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="sums--top--seed0 holds the report of another run"):
        run(copy)
    assert json.loads(path.read_text()) == data


def test_another_dtype_is_another_setting(copy):
    with pytest.raises(InputError, match="compute_dtype was float32 and is now bfloat16"):
        run(copy, dtype="bfloat16")


def test_seeds_and_arms_can_be_added(copy, told, whole):
    arms = yaml.safe_load((copy / "study.yaml").read_text())["arms"]
    run(change(copy, seeds=3, arms=[*arms, {"name": "lora", "base": "none"}]))
    found = told(copy / "results")
    assert set(found) - NAMES == {"sums--lora--seed0", "sums--lora--seed1"} | {
        f"sums--{arm}--seed2" for arm in ("qlora", "top", "drawn", "lora")
    }
    assert {name: found[name] for name in NAMES} == told(whole)


def test_out_of_memory_marks_the_run_and_the_study_goes_on(study, told, monkeypatch, capsys):
    """The allocator's own error, raised from a step: a CPU has no such limit."""
    folder, step, taken = study(seeds=1), FairTrainer.training_step, []

    def full(self, *arguments, **named):
        taken.append(1)
        if len(taken) == 5:  # the second run's second step
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return step(self, *arguments, **named)

    monkeypatch.setattr(FairTrainer, "training_step", full)
    results = run(folder)
    found = reports(results)
    assert [name for name, report in found.items() if not report.finished] == ["sums--top--seed0"]
    ended = found["sums--top--seed0"]
    (flag,) = [flag for flag in ended.flags if flag.severity == "fatal"]
    assert (flag.check, flag.step) == ("out-of-memory", 2) and "step 2" in flag.reason
    assert ended.scores == {} and ended.rows is None and ended.course.steps == 1
    monkeypatch.undo()
    capsys.readouterr()
    run(folder)  # the moment's fault: tried again
    assert "tried again" in capsys.readouterr().err
    assert all(report.finished for report in reports(results).values())


def _named(what):
    return getattr(what, "planned", what).run.name == "sums--top--seed0"


@pytest.mark.parametrize("where", ["_built", "_scored"])
def test_out_of_memory_before_and_after_the_training(study, monkeypatch, where):
    folder, do = study(seeds=1), getattr(Bench, where)

    def full(self, what, *more):
        if any(getattr(getattr(x, "planned", x), "run", None) is not None and _named(x) for x in (what, *more)):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return do(self, what, *more)

    monkeypatch.setattr(Bench, where, full)
    report = reports(run(folder))["sums--top--seed0"]
    assert not report.finished and report.flags[-1].check == "out-of-memory"
    phase = {"_built": "building the model", "_scored": "scoring"}[where]
    assert report.flags[-1].reason.startswith(phase) and report.flags[-1].step == (None if where == "_built" else 3)
    assert report.course.steps == (0 if where == "_built" else 3)


def test_a_loss_that_is_not_finite_ends_its_run_alone(study, capsys):
    wild = {"name": "wild", "levers": {"learning_rate": 1e30}}
    folder = study(seeds=1, factors=["learning_rate"], arms=[{"name": "qlora"}, wild])
    results = run(folder)
    found = reports(results)
    assert found["sums--qlora--seed0"].finished and not found["sums--wild--seed0"].finished
    fatal = next(flag for flag in found["sums--wild--seed0"].flags if flag.severity == "fatal")
    assert fatal.step is not None and fatal.check != "out-of-memory"
    assert "sums--wild--seed0 ended early" in capsys.readouterr().err
    before = (results / "runs" / "sums--wild--seed0" / "report.json").read_bytes()
    run(folder)  # it would end the same way
    assert (results / "runs" / "sums--wild--seed0" / "report.json").read_bytes() == before


def test_prompts_that_lost_their_beginning_are_counted_in_training_too(study):
    levers = {"rank": 4, "steps": 1, "batch": 2, "accumulation": 1, "length": 12}
    results = run(study(seeds=1, arms=[{"name": "qlora"}], levers=levers))
    found = reports(results)
    trained, untrained = found["sums--qlora--seed0"], found["sums--qlora--untrained"]
    assert trained.train.shortened == trained.train.rows == 24 and trained.test.shortened == trained.test.rows
    reasons = [flag.reason for flag in trained.flags if flag.check == "shortened"]
    assert any("24 training rows" in reason for reason in reasons) and len(reasons) == 2
    assert [flag.check for flag in untrained.flags].count("shortened") == 1  # nothing was trained there
    assert "24 train rows are there with prompts that lost their beginning" in table(results)


def test_a_stopped_study_goes_on(study, whole, told, tmp_path, capsys):
    folder, stop = study(repeats={"arm": "qlora", "count": 2}, keep_adapters=True), tmp_path / "stop"
    stop.write_text("stop")
    results = run(folder, pacing=Pacing(stop_file=stop, poll=0.01))
    assert "the same command goes on" in capsys.readouterr().err
    assert set(reports(results)) == {"sums--qlora--untrained"}
    stop.unlink()
    run(folder, pacing=Pacing(stop_file=stop, poll=0.01))
    assert told(results) == told(whole)


def test_reports_carry_the_lock(study, capsys):
    folder = study(seeds=1)
    sealed = Lock.load(studies.lock(folder))
    assert set(sealed.texts) == {"sums train", "sums test"} and "peft" in sealed.code
    results = run(folder)
    assert {report.lock for report in reports(results).values()} == {sealed.hash}
    assert "exploratory" not in capsys.readouterr().err
    assert studies.lock(folder) == results / "lock.json"
    with pytest.raises(InputError, match=r"a lock made after results|locks something else"):
        studies.lock(study(seeds=1, analysis={"baseline": "top"}))


def test_without_a_lock_results_are_exploratory(whole):
    assert {report.lock for report in reports(whole).values()} == {None}


@pytest.mark.parametrize("workers", [0, -1, True, 1.5])
def test_workers_are_counted(study, workers):
    with pytest.raises(InputError, match=r"workers: .* at least one"):
        run(study(), workers=workers)


def test_options_of_the_other_kind_are_refused(study):
    with pytest.raises(InputError, match=r"texts \(--text\) is not for a study of kind 'fine-tuning'"):
        studies.run(study(), texts=["a.txt"])
    with pytest.raises(InputError, match="kind: no kind of study is called 'fine-tunin'; did you mean 'fine-tuning'"):
        studies.run(study(kind="fine-tunin"))


def test_study_objects_need_a_folder(declared, tmp_path):
    with pytest.raises(InputError, match="needs `out`"):
        run(declared())
    results = run(declared(seeds=1, arms=[{"name": "qlora"}]), out=tmp_path / "there")
    assert set(reports(results)) == {"sums--qlora--untrained", "sums--qlora--seed0"}


def test_folders_are_not_published(study, tmp_path):
    rows = [{"left": n, "operator": "+", "right": 2, "options": [n + 2, n + 3], "gold": 0} for n in range(20)]
    data = tmp_path / "secret" / "rows"
    data.mkdir(parents=True)
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    use = {"task": "arithmetic", "data": "nowhere"}
    results = run(study(seeds=1, arms=[{"name": "qlora"}], tasks={"sums": use}), data=[f"sums={data}"])
    assert json.loads((results / "study.json").read_text())["tasks"]["sums"]["data"] == "rows"
    assert "secret" not in "".join(
        p.read_text() for p in [*results.glob("*.json"), *results.glob("runs/*/report.json")]
    )
    assert any("20 of 20 scored rows" in label for label in reports(results)["sums--qlora--seed0"].labels)
