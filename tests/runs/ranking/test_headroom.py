"""Sweeps and reference selections: effects against built models, the best set against all sets, and interruption."""

from __future__ import annotations

import functools
import gzip
import itertools
import json

import numpy as np
import pytest
import torch

import toolkit as tk
from toolkit.errors import InputError
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.report import Report, Text, unmask
from toolkit.records.selection import Selection
from toolkit.records.study import split
from toolkit.runs.ranking import runner
from toolkit.runs.ranking.headroom import fitting_losses
from toolkit.selection.effects import ridge

run = functools.partial(runner.run, dtype="float32", device="cpu", progress=False)

STUDY = {
    "name": "room",
    "question": "How much better than chance can a selection be?",
    "tokens": 224,
    "window": 32,  # 7 windows: 4 fit, 3 score
    "batch": 4,
    "budgets": ["layers=0.2", "parameters=0.4"],
    "arms": [{"selector": "top-error"}, {"selector": "bottom-error"}],
    "controls": [{"selector": "random-matched(within=0.02)", "name": "matched", "draws": 12}],
    "seed": 1,
    "analysis": {"control": "matched", "level": 0.2},
    "headroom": {"fit": "sweep", "arms": ["top-error"], "within": 0.02},
    "repeat": False,
}
LAYERS = 21
BEFORE = 1 + 2 * LAYERS + 4  # base, sweeps, arms: what is measured before the first reference selection
MEASURED = BEFORE + 2 * 2 + 2 * 2 * 12


@pytest.fixture(scope="module")
def texts(text_file, other_text):
    return {"letters": str(text_file), "other": str(other_text)}


@pytest.fixture
def study(tmp_path, checkpoints, texts, put):
    return lambda **changes: put(tmp_path / "study", STUDY | {"model": str(checkpoints()), "texts": texts} | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, checkpoints, texts, put):
    """The results of an uninterrupted run."""
    return run(put(tmp_path_factory.mktemp("whole"), STUDY | {"model": str(checkpoints()), "texts": texts}))


@pytest.fixture(scope="module")
def built(whole, checkpoints, texts):
    """Protected layers → text → loss of each window (nats a token), of the model that `tk.build` gives."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoints())
    profile = Profile.load(whole / "profile.json")
    ids = {}
    for name, path in texts.items():
        with open(path, encoding="utf-8") as file:
            found = tokenizer(file.read(), return_tensors="pt")["input_ids"]
        ids[name] = found[0, :224].view(7, 32)

    def losses(names):
        plan = Plan.protecting(_selection(profile, names), "nf4")
        model = tk.build(checkpoints(), plan, device="cpu", dtype="float32")
        found = {}
        with torch.inference_mode():
            for name, windows in ids.items():
                logits = model(input_ids=windows).logits[:, :-1].double()
                each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none")
                found[name] = each.mean(1).numpy()
        return found

    return functools.cache(losses)


def _selection(profile, names):
    rows = [row for row in profile.layers if row.name in set(names)]
    return Selection(
        selector="by-hand",
        model=profile.model,
        fingerprint=profile.fingerprint,
        layers=[row.name for row in rows],
        parameters=sum(r.parameters for r in rows),
        bytes=sum(r.bytes for r in rows),
        of={"layers": len(profile), "parameters": profile.parameters, "bytes": profile.bytes},
    )


def load(folder, name):
    return Report.load(folder / name / "report.json")


def totals(sizes):
    """Σ over each of the 2^n sets, set number m holding item i where its bit i is 1."""
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums, sums + size])
    return sums


def best_of_all(gains, sizes, like, within=0.02):
    """The largest sum of gains within the tolerance, by looking at every set."""
    fits = np.abs(totals(sizes) - like) <= within * like
    return totals(gains)[fits].max()


def test_a_sweep_is_each_layer_alone(whole, built):
    profile = Profile.load(whole / "profile.json")
    for arm, at in itertools.product(("restore", "quantize"), (0, 3, 8, 20)):
        report = load(whole, f"sweep--{arm}")
        assert (report.role, report.arm, report.budget, report.control) == ("sweep", arm, None, None)
        assert report.layers == profile.names and [d.index for d in report.draws] == list(range(LAYERS))
        alone = [profile.names[at]]
        held = alone if arm == "restore" else [n for n in profile.names if n not in alone]
        assert unmask(report.draws[at].mask, profile.names) == held
        expected = built(tuple(held))
        for text in ("letters", "other"):
            assert report.draws[at].scores[text].loss == pytest.approx(expected[text].mean(), rel=1e-5)


@pytest.mark.parametrize("budget", ["layers-0.2", "parameters-0.4"])
def test_reference_selections_are_the_best_and_the_worst_of_all_sets(whole, built, budget):
    """Effects from built models on the first 4 of 7 windows; every one of the 2²¹ sets is looked at."""
    profile = Profile.load(whole / "profile.json")
    base = built(())
    gains = np.array(
        [np.mean([(base[t] - built((name,))[t])[:4].mean() for t in ("letters", "other")]) for name in profile.names]
    )
    sizes = [row.parameters for row in profile.layers]
    like = load(whole, f"{budget}--top-error").selection
    for control, sign in (("oracle-additive", 1), ("anti-oracle", -1)):
        report = load(whole, f"{budget}--top-error--{control}")
        assert (report.role, report.arm, report.control) == ("oracle", "top-error", control)
        chosen = report.selection
        assert abs(chosen.parameters - like.parameters) <= 0.02 * like.parameters
        assert chosen.mismatch == (chosen.parameters - like.parameters) / like.parameters
        assert chosen.matched_to.hash == like.layers_hash
        held = sum(sign * gain for name, gain in zip(profile.names, gains, strict=True) if name in chosen.layers)
        assert held == pytest.approx(best_of_all(sign * gains, sizes, like.parameters), abs=1e-5)
        expected = built(tuple(chosen.layers))
        assert report.scores["other"].loss == pytest.approx(expected["other"].mean(), rel=1e-5)
        assert {name: layer.quantizer for name, layer in report.plan.layers.items()} == dict.fromkeys(
            chosen.layers, "none"
        )
    best, worst = (
        load(whole, f"{budget}--top-error--{c}").scores["letters"] for c in ("oracle-additive", "anti-oracle")
    )
    assert best.loss < worst.loss


def test_only_the_arms_that_are_named_get_reference_selections(whole):
    found = {p.parent.name for p in whole.glob("*oracle*/report.json")}
    assert found == {
        f"{budget}--top-error--{control}"
        for budget in ("layers-0.2", "parameters-0.4")
        for control in ("oracle-additive", "anti-oracle")
    }


@pytest.mark.parametrize("stop", [9, 1 + LAYERS, BEFORE, BEFORE + 1, BEFORE + 4])
def test_an_interruption_leaves_the_same_selections(whole, study, measurements, facts, stop):
    """In a sweep, between a sweep and the selections fitted on it, and between those."""
    measurements.stop = stop
    with pytest.raises(KeyboardInterrupt):
        run(study())
    measurements.stop = None
    folder = run(study())
    assert measurements.count == MEASURED  # nothing was measured twice
    assert facts(folder) == facts(whole)
    run(study())
    assert measurements.count == MEASURED


def test_a_lost_sweep_is_measured_again_and_gives_the_same_selections(whole, study, measurements, facts):
    import shutil

    folder = study() / "results"
    shutil.copytree(whole, folder)
    (folder / "sweep--restore" / "report.json").write_text("{]")
    run(study())
    assert measurements.count == LAYERS
    assert facts(folder) == facts(whole)


def test_a_reference_selection_that_is_not_the_fitted_one_is_refused(whole, study):
    import shutil

    folder = study() / "results"
    shutil.copytree(whole, folder)
    arm = load(folder, "layers-0.2--bottom-error")
    path = folder / "layers-0.2--top-error--anti-oracle" / "report.json"
    Report.load(path).model_copy(update={"selection": arm.selection}).save(path)
    with pytest.raises(InputError, match="anti-oracle protects other layers than the study now asks for"):
        run(study())


def test_a_ridge_regression_is_fitted_on_each_arms_own_draws(study, checkpoints):
    """From the files alone, written out once more: masks and the first 4 of 7 windows."""
    control = STUDY["controls"][0] | {"draws": 40}
    changes = {"controls": [control], "headroom": {"fit": "ridge", "within": 0.02}, "budgets": ["layers=0.2"]}
    folder = run(study(**changes))
    profile = Profile.load(folder / "profile.json")
    assert not list(folder.glob("sweep*"))
    for arm in ("top-error", "bottom-error"):
        like = load(folder, f"layers-0.2--{arm}").selection.parameters
        report = load(folder, f"layers-0.2--{arm}--matched")
        with gzip.open(folder / report.run / "rows.jsonl.gz", "rt") as lines:
            sums = [json.loads(line) for line in lines]
        losses = np.zeros(len(report.draws))
        for draw, _, nll in sums:
            losses[draw] += sum(nll[:4]) / (4 * 31) / 2
        held = [unmask(draw.mask, profile.names) for draw in report.draws]
        indicators = np.array([[name in names for name in profile.names] for names in held], dtype=float)
        gains = ridge(indicators, losses)
        sizes = [row.parameters for row in profile.layers]
        for name, sign in (("oracle-additive", 1), ("anti-oracle", -1)):
            chosen = load(folder, f"layers-0.2--{arm}--{name}").selection.layers
            reached = sum(sign * g for layer, g in zip(profile.names, gains, strict=True) if layer in chosen)
            assert reached == pytest.approx(best_of_all(sign * gains, sizes, like), abs=1e-9)


def test_a_ridge_interrupted_between_draws_and_selections(study, measurements, facts, tmp_path):
    changes = {"headroom": {"fit": "ridge", "within": 0.02}, "budgets": ["layers=0.2"]}
    expected = facts(run(study(**changes), out=tmp_path / "whole"))
    for stop in (1 + 2 + 24, 1 + 2 + 24 + 2):
        measurements.count, measurements.stop = 0, stop
        with pytest.raises(KeyboardInterrupt):
            run(study(**changes), out=tmp_path / str(stop))
        measurements.stop = None
        assert facts(run(study(**changes), out=tmp_path / str(stop))) == expected


def test_losses_on_the_fitting_windows_are_means_over_texts():
    made = {"source": "x", "sha256": "0", "characters": 1, "tokens": 1, "stride": 5, "bos": False}
    texts = {"a": Text(windows=3, window=5, **made), "b": Text(windows=4, window=9, **made)}
    sums = {"a": [[4.0, 8.0, 999.0], [0.0, 0.0, 5.0]], "b": [[8.0, 16.0, 1.0, 1.0], [0.0, 8.0, 7.0, 7.0]]}
    assert fitting_losses(sums, texts).tolist() == [1.5, 0.25]  # ((12/8) + (24/16))/2, (0/8 + 8/16)/2


@pytest.mark.parametrize(("windows", "fitting"), [(4, 2), (5, 3), (7, 4), (32, 16), (1, 1)])
def test_the_first_half_fits(windows, fitting):
    assert split(windows) == fitting


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 127}, "'letters' has 3 windows of 32 tokens.*at least 4 are needed"),
        ({"tokens": None, "window": 640}, "'letters' has 3 windows of 640 tokens"),
        ({"headroom": {"within": 0.02, "arms": ["top-eror"]}}, "headroom.arms names 'top-eror'; did you mean"),
        (
            {
                "headroom": {"fit": "ridge"},
                "controls": [STUDY["controls"][0] | {"like": ["top-error"]}],
                "analysis": {"control": "matched", "arms": ["top-error"]},
            },
            "'matched' has no draws for arm 'bottom-error'",
        ),
        ({"headroom": {"fit": "sweep", "within": 0}, "budgets": ["layers=0.2"]}, None),
        (
            {
                "headroom": {"fit": "ridge", "within": 0.02},
                "controls": [STUDY["controls"][0] | {"draws": 2}],
                "budgets": ["layers=0.2"],
            },
            r"layers-0.2--top-error--matched: a ridge regression of 2 draws.*\(headroom.fit: ridge\)",
        ),
    ],
)
def test_headroom_that_cannot_be_had_is_refused(study, changes, message):
    if message is None:  # the arm itself is a set of that memory, so that there always is one
        run(study(**changes))
        return
    with pytest.raises(InputError, match=message):
        run(study(**changes))


def test_the_analysis_reads_what_the_runner_wrote(whole, tmp_path):
    """Sweeps, reference selections and rows: the table, and a certificate that verifies."""
    from toolkit.analysis.certificates.certifying import certify
    from toolkit.analysis.certificates.verification import verify
    from toolkit.analysis.printing.table import table

    text = table(whole, paired=True)
    assert "oracle" in text
    certify(whole, tmp_path / "control.json")
    verify(tmp_path / "control.json")
