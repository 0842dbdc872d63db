"""Arms whose layers start elsewhere: made once a plan, the same in every run of it, told of in reports, resumed."""

from __future__ import annotations

import functools
import shutil

import pytest

import toolkit as tk
from toolkit.analysis.printing.table import table
from toolkit.errors import InputError
from toolkit.records.lock import Lock
from toolkit.records.start import StartFile
from toolkit.records.trained import Trained
from toolkit.runs import adapters, finetuning, starts, studies
from toolkit.runs.building import build

from .conftest import STUDY

run = functools.partial(finetuning.run, device="cpu", dtype="float32", progress=False)

ARMS = [
    {"name": "qlora"},
    {"name": "loftq", "initializer": "loftq(iterations=2)", "scaler": "rslora"},
    {"name": "pissa", "initializer": "pissa", "protect": {"selector": "top-error", "budget": "layers=0.2"}},
]


def reports(folder):
    return {path.parent.name: Trained.load(path) for path in sorted((folder / "runs").glob("*/report.json"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    import yaml

    folder = tmp_path_factory.mktemp("starts")
    text = yaml.safe_dump(STUDY | {"model": str(model), "arms": ARMS, "keep_adapters": True})
    (folder / "study.yaml").write_text(text, encoding="utf-8")
    return run(folder)


def test_starts_are_made_once_a_plan_and_told_of(whole):
    found = reports(whole)
    assert len(found) == 7 and all(report.finished for report in found.values())
    assert len(list((whole / "starts").iterdir())) == 2  # two plans, whatever their seeds
    for name, report in found.items():
        if report.arm == "qlora":
            assert report.start is None
            continue
        begun = report.start
        file = StartFile.load(whole / "starts" / begun.folder / starts.REPORT)
        assert begun.base == file.base and begun.layers == len(file.layers) == {"loftq": 21, "pissa": 16}[report.arm]
        assert begun.zero == pytest.approx(sum(x.residuals[0] for x in file.layers.values()) / begun.layers, abs=1e-7)
        kept = sum(x.residuals[x.kept] for x in file.layers.values()) / begun.layers
        assert begun.residual == pytest.approx(kept, abs=1e-7), name
        assert begun.fallbacks == {} and begun.calibration is None
    loftq = found["sums--loftq--seed0"].start
    assert loftq.residual < 0.99 * loftq.zero and loftq.changed == 21
    assert found["sums--loftq--seed0"].start == found["sums--loftq--seed1"].start


def test_a_saved_adapter_belongs_to_its_start(whole, model):
    """Built on the folder, it loads; over the plain base it is refused."""
    where = whole / "runs" / "sums--loftq--seed1"
    report = Trained.load(where / "report.json")
    saved = tk.Plan.load(where / report.adapter / adapters.PLAN)
    assert saved.start == report.start.base
    again = build(str(model), saved, dtype="float32", device="cpu", start=whole / "starts" / report.start.folder)
    adapters.load(again, where / report.adapter)
    plain = saved.model_copy(
        update={"start": None, "default": saved.default.model_copy(update={"initializer": "zero"})}
    )
    with pytest.raises(InputError, match="another base"):
        adapters.load(build(str(model), plain, dtype="float32", device="cpu"), where / report.adapter)


def test_resumed_is_the_same(whole, told, tmp_path):
    """A start's folder that a kill left half made, and runs that are missing: the same numbers."""
    shutil.copytree(whole.parent, tmp_path / "copy")
    results = tmp_path / "copy" / whole.name
    begun = Trained.load(results / "runs" / "sums--loftq--seed0" / "report.json").start
    shutil.rmtree(results / "runs" / "sums--loftq--seed0")
    half = results / "starts" / begun.folder
    (half / starts.REPORT).unlink()
    next(iter(sorted((half / starts.LAYERS).iterdir()))).unlink()
    run(tmp_path / "copy")
    assert told(results) == told(whole)


@pytest.mark.slow
def test_workers_read_what_the_first_process_made(whole, told, tmp_path):
    (tmp_path / "copy").mkdir()
    shutil.copy(whole.parent / "study.yaml", tmp_path / "copy")
    assert told(run(tmp_path / "copy", workers=2)).keys() == told(whole).keys()
    one, other = reports(whole), reports(tmp_path / "copy" / "results")
    assert {n: r.start for n, r in one.items()} == {n: r.start for n, r in other.items()}


def test_the_table_is_made_of_it(whole):
    assert "loftq" in table(whole)


# one run


def test_one_run_makes_its_start_or_reads_it(model, tmp_path):
    plan = tk.Plan.protecting(None, "nvfp4", rank=2, scaler="rslora", initializer="loftq(iterations=2)")
    levers = tk.Levers(steps=3, batch=4, accumulation=1, length=64)
    train = functools.partial(
        tk.train, str(model), plan, tk.Use(task="arithmetic(largest=10)", train_rows=24, rows=16), levers=levers,
        device="cpu", dtype="float32", progress=False,
    )  # fmt: skip
    first = train(out=tmp_path / "one")
    assert first.finished and first.start.changed == 21
    folder = tmp_path / "one" / "starts" / first.start.folder
    other = train(out=tmp_path / "two", start=folder)
    assert other.scores == first.scores and other.start == first.start
    assert train(out=tmp_path / "two", start=folder) == other
    shutil.copytree(tmp_path / "one" / "starts", tmp_path / "three" / "starts")
    shutil.rmtree(tmp_path / "three" / "starts" / folder.name / starts.LAYERS)
    assert train(out=tmp_path / "three").scores == first.scores
    with pytest.raises(InputError, match="starts every layer plainly"):
        tk.train(str(model), tk.Plan.protecting(None, "nf4", rank=2), "arithmetic", out=tmp_path / "x", start=folder)


# what is refused, and what is locked


def test_a_calibrated_initializer_needs_a_text(study, tmp_path):
    arms = [{"name": "qlora"}, {"name": "gptq", "initializer": "gptq"}]
    folder = study(arms=arms, analysis={"baseline": "qlora"})
    with pytest.raises(InputError, match=r"arm 'gptq': initializer gptq\S* is calibrated.*calibration:"):
        run(folder)
    plan = tk.Plan.protecting(None, "nf4", rank=2, initializer="gptq")
    with pytest.raises(InputError, match=r"calibrated.*toolkit calibrate PLAN"):
        tk.train("demo", plan, "arithmetic", out=tmp_path / "x")


def test_an_unknown_initializer_and_a_rank_that_cannot_be(study, model):
    with pytest.raises(InputError, match=r"arm 'one': .*did you mean.*loftq"):
        run(study(arms=[{"name": "one", "initializer": "lofqt"}], analysis={"baseline": "one"}))
    levers = STUDY["levers"] | {"rank": 33}
    arms = [{"name": "one", "initializer": "loftq"}]
    with pytest.raises(InputError, match=r"arm 'one': layer model\.layers\.0\.self_attn\.k_proj: .*33"):
        run(study(arms=arms, analysis={"baseline": "one"}, levers=levers))


TEXT = "A text that nothing is scored on. " * 40


def test_the_calibration_text_is_locked(study, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    use = {"text": str(tmp_path / "text.txt"), "windows": 4, "window": 64}
    arms = [{"name": "qlora"}, {"name": "gptq", "initializer": "gptq(block=32)", "base": "nvfp4"}]
    folder = study(arms=arms, analysis={"baseline": "qlora"}, calibration=use, seeds=1)
    lock = Lock.load(studies.lock(folder))
    import hashlib

    assert lock.texts["calibration"] == hashlib.sha256(TEXT.encode()).hexdigest()
    results = run(folder)
    report = reports(results)["sums--gptq--seed0"]
    assert report.lock == lock.hash and report.start.calibration == lock.texts["calibration"]
    assert report.start.changed > 15 and report.plan.start is None
