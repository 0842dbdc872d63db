"""`compare`: from a selector to a certificate that verifies, on a small model, with what stands in between checked."""

import pytest

import toolkit as tk
from toolkit.comparison import standard_laws
from toolkit.errors import InputError
from toolkit.interfaces import RankingSelector
from toolkit.records.report import Report
from toolkit.records.study import Study
from toolkit.registry import registry

SMALL = {"budgets": ["layers=0.3", "layers=0.6"], "draws": 4, "tokens": 512, "window": 64, "batch": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoints, text_file):
    folder = tmp_path_factory.mktemp("compare")
    return tk.compare(
        "weight-norm",
        checkpoints("llama"),
        texts={"letters": str(text_file)},
        out=folder / "results",
        certificate=folder / "control.json",
        dtype="float32",
        progress=False,
        **SMALL,
    )


def test_one_sentence_a_text_with_effect_and_p(made):
    (sentence,) = made.sentences
    assert sentence.startswith("weight-norm is ") and "letters" in sentence
    assert "nats a token" in sentence and "p = " in sentence and "smallest that 4 draws give is .200" in sentence


def test_every_standard_law_gives_a_verdict(made):
    (laws,) = made.certificate.verdicts["laws"]
    assert {t["law"] for t in laws["tests"]} == {law.key for law in standard_laws()}
    assert {law.name for law in standard_laws()} == {"random-matched", "random-permuted", "random-shuffle-matched"}
    assert len(standard_laws()) == 4


def test_the_claim_is_the_plain_law_as_families_over_budgets(made):
    study = Study.load(made.folder / "study.json")
    declared = next(c for c in study.controls if c.label == study.analysis.control)
    assert (declared.selector, declared.chain, study.analysis.test) == ("random-matched", True, "joint")


def test_it_is_confirmatory_and_verifies(made):
    assert made.certificate.exploratory == []
    found = tk.verify(made.path)
    assert found.draws == 2 * 4 * 4


def test_the_losses_are_those_of_a_built_model(made, checkpoints):
    """The arm's loss at the larger budget, against `toolkit.build` and transformers' own loss."""
    import torch
    from transformers import AutoTokenizer

    report = Report.load(made.folder / "layers-0.6--weight-norm" / "report.json")
    model = tk.build(checkpoints("llama"), report.plan, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints("llama"))
    text = "".join(chr(97 + (i * i + 3 * i) % 26) for i in range(2000))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:512]).view(-1, 64)
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in ids]
    assert report.scores["letters"].loss == pytest.approx(sum(losses) / len(losses), abs=2e-5)


def test_the_same_call_goes_on_from_what_is_there(made, checkpoints, text_file, monkeypatch):
    from toolkit.runs.texts.evaluation import Evaluation

    monkeypatch.setattr(Evaluation, "measure", lambda *a, **k: pytest.fail("measured again"))
    again = tk.compare(
        "weight-norm",
        checkpoints("llama"),
        texts={"letters": str(text_file)},
        out=made.folder,
        certificate=made.path,
        dtype="float32",
        progress=False,
        **SMALL,
    )
    assert again.certificate.seal == made.certificate.seal


def test_anyones_selector(tmp_path, checkpoints, text_file, capsys):
    @tk.register
    class Widest(RankingSelector):
        name = "widest-of-a-test"

        def score(self, profile):
            return profile["out_features"]

    found = tk.compare(
        "widest-of-a-test",
        checkpoints("llama"),
        texts={"letters": str(text_file)},
        budgets=["layers=0.3"],
        draws=2,
        tokens=128,
        window=64,
        headroom=False,
        out=tmp_path / "results",
        dtype="float32",
        progress=False,
    )
    assert found.sentences[0].startswith("widest-of-a-test ")
    assert tk.verify(found.path).draws == 3 * 2  # it takes all of one role, and roles are no control then
    assert "roles=true) is left out: " in capsys.readouterr().err
    registry.manager.unregister(name=f"{Widest.__module__}.{Widest.__qualname__}:inline")
    registry._found.clear()


@pytest.mark.parametrize(
    ("selector", "more", "words"),
    [
        ("random-matched", {}, "is chance itself"),
        ("top-eror", {}, "did you mean 'top-error'"),
        ("top-error", {"control": "random-count"}, "no standard law"),
        ("top-error", {"budgets": ["layers=2"]}, r"outside \(0, 1\]"),
        ("top-error", {"draws": 0}, "draws"),
        ("top-error", {"tokens": 32, "window": 64}, "tokens=32 is less than one window of 64"),
    ],
)
def test_what_cannot_be_compared_is_named(tmp_path, checkpoints, selector, more, words):
    with pytest.raises((InputError, ValueError), match=words):
        tk.compare(selector, checkpoints("llama"), out=tmp_path / "results", **(SMALL | more))
    assert not list((tmp_path / "results").glob("*/*"))
    assert not (tmp_path / "results" / "lock.json").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 1}, "weight-norm: window: Input should be greater than 1"),
        ({"batch": 0}, "batch: Input"),
        ({"tokens": -5}, "tokens: Input"),
        ({"level": 2}, r"analysis\.level: Input should be less than 1"),
        ({"draws": 2.5}, r"draws: Input should be a valid integer"),
        ({"draws": 10**9}, "at most 1,000,000 are made"),
        ({"budgets": []}, "budgets: List should have at least 1 item"),
        ({"budgets": [0.3]}, "budget 0.3 is no text"),
        ({"budgets": ["layers=0.3", "layers=0.30"]}, "budgets names 'layers=0.3' twice"),
        ({"budgets": "layers"}, "cannot read budget 'layers'"),
        ({"seed": "x"}, "seed: Input"),
    ],
)
def test_what_no_study_has_is_refused_before_any_work(checkpoints, tmp_path, given, message):
    with pytest.raises(InputError, match=message):
        tk.compare("weight-norm", checkpoints("llama"), out=tmp_path / "out", **(SMALL | given))
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_folder_should_be_is_refused(checkpoints, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(InputError, match="out is a file, not a folder"):
        tk.compare("weight-norm", checkpoints("llama"), out=tmp_path / "out", **SMALL)
    assert (tmp_path / "out").read_text() == "mine"
