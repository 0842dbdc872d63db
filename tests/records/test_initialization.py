"""The study of starts as a file: what it declares, and what it refuses."""

from __future__ import annotations

import pytest

from toolkit.errors import InputError
from toolkit.records.declared import kind_of
from toolkit.records.initialization import Initialization
from toolkit.records.started import LayerOutcome

STUDY = """\
kind: initialization
name: starts
question: Does a fitted start lose less?
texts: {letters: letters.txt, hub: wikitext2}
calibration: {text: other.txt, windows: 4}
scalings: [1, 4]
activations: [none, mxfp4]
arms:
  - name: plain
  - name: fitted
    initializer: loftq
  - name: more
    initializer: loftq(iterations=9)
    protect: {selector: top-error, budget: layers=0.1}
analysis:
  baseline: plain
  pairs: [[more, fitted], [fitted, plain]]
small:
  scalings: [1]
  calibration: null
"""


@pytest.fixture
def write(tmp_path):
    def to(text: str = STUDY):
        (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
        return tmp_path

    return to


def changed(old: str, new: str) -> str:
    assert old in STUDY
    return STUDY.replace(old, new)


def test_it_is_read_with_its_defaults_and_known_by_its_kind(write):
    study = Initialization.read(write())
    assert kind_of(write()) == "initialization"
    assert (study.rank, study.scaler, study.window, study.analysis.correction) == (8, "lora", 512, "bonferroni")
    assert study.arm("plain").initializer == "zero" and study.arm("plain").base == "nf4"
    assert study == Initialization.model_validate(study.to_json())


def test_every_arm_is_compared_with_the_baseline_and_a_declared_pair_once(write):
    study = Initialization.read(write())
    assert study.pairs == [("fitted", "plain"), ("more", "plain"), ("more", "fitted")]
    assert study.family_size == 3 * 2 * 2 * 2  # pairs, scalings, texts, roundings
    assert Initialization.read(write(), small=True).family_size == 3 * 1 * 2 * 2


def test_the_small_form_takes_calibration_out(write):
    small = Initialization.read(write(), small=True)
    assert small.calibration is None and small.form == "small" and small.scalings == [1.0]


def test_texts_beside_the_study_are_found_and_their_folders_are_not_declared(write):
    folder = write()
    bare = Initialization.read(folder)
    for name in ("letters.txt", "other.txt"):
        (folder / name).write_text("abc", encoding="utf-8")
    study = Initialization.read(folder)
    assert study.texts == {"letters": str(folder / "letters.txt"), "hub": "wikitext2"}
    assert study.calibration.text == str(folder / "other.txt")
    assert study.published.texts["letters"] == "letters.txt" and study.published.calibration.text == "other.txt"
    assert study.declaration == bare.declaration
    assert study.declaration != Initialization.read(write(changed("windows: 4", "windows: 5"))).declaration


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("baseline: plain", "baseline: plan", "analysis.baseline names 'plan'; did you mean 'plain'"),
        ("[more, fitted]", "[more, fited]", "analysis.pairs names 'fited'; did you mean"),
        ("[more, fitted]", "[more, more]", "compares 'more' with itself"),
        ("scalings: [1, 4]", "scalings: [1, 1]", "1.0 stands twice"),
        ("scalings: [1, 4]", "scalings: [0]", "a factor above 0"),
        ("scalings: [1, 4]", "scalings: []", "scalings"),
        ("scalings: [1, 4]", "scalings: [.inf]", "scalings"),
        ("name: more", "name: fitted", "arms: 'fitted' stands twice"),
        ("text: other.txt", "text: letters.txt", "which text 'letters' is evaluated on"),
        ("{letters: letters.txt, hub", "{calibration: letters.txt, hub", "is the name of the text that is calibrated"),
        (
            "initializer: loftq\n",
            "initialiser: loftq\n",
            "unknown key 'arms.1.initialiser'; did you mean 'initializer'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(write, old, new, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        Initialization.read(write(changed(old, new)))


def test_a_rank_of_0_is_refused(write):
    with pytest.raises(InputError, match="rank"):
        Initialization.read(write(STUDY + "rank: 0\n"))


def test_a_window_longer_than_the_tokens_is_refused(write):
    with pytest.raises(InputError, match="less than one window"):
        Initialization.read(write(STUDY + "tokens: 100\nwindow: 128\n"))


def test_a_layers_outcome_holds_finite_numbers_only():
    with pytest.raises(ValueError):
        LayerOutcome(role="q_proj", parameters=1, zero=float("nan"), residual=0.1)
