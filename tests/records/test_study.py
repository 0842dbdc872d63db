"""Study files: read with their lines, small forms, and what is refused."""

from pathlib import Path

import pytest
import yaml

from toolkit.errors import InputError
from toolkit.records.declared import study_file
from toolkit.records.study import Study, slug

TEXT = """\
name: ranking
question: Is it better?
budgets:
  - layers=0.05
  - parameters: 0.1
arms:
  - selector: top
  - selector: bottom(quantizer=nf4)
    name: bottom
  - {selector: bottom, name: bottom-at-top, total_of: top}
controls:
  - {selector: matched, draws: 499}
  - selector: counted
    draws: 9
    like: [top]
analysis:
  control: matched
  level: 0.01
small:
  budgets: layers=0.1
  controls: [{selector: matched, draws: 10}]
"""


@pytest.fixture
def write(tmp_path):
    def to(text):
        (tmp_path / "study.yaml").write_text(text)
        return tmp_path

    return to


def test_a_study_reads_from_its_folder_or_file(write):
    folder = write(TEXT)
    study = Study.read(folder)
    assert study == Study.read(folder / "study.yaml") == Study.read(str(folder))
    assert [str(b) for b in study.budgets] == ["layers=0.05", "parameters=0.1"]
    assert [a.label for a in study.arms] == ["top", "bottom", "bottom-at-top"]
    assert study.likes(study.controls[0]) == ["top", "bottom", "bottom-at-top"]
    assert study.likes(study.controls[1]) == ["top"] and study.arm("bottom").selector == "bottom(quantizer=nf4)"
    assert study.controls[0].draws == 499 and study.form == "full"


def test_the_small_form_replaces_fields(write):
    study = Study.read(write(TEXT), small=True)
    assert study.form == "small" and study.small is None
    assert [str(b) for b in study.budgets] == ["layers=0.1"] and len(study.controls) == 1
    assert study.controls[0].draws == 10
    with pytest.raises(InputError, match="has no `small` form"):
        Study.read(write(TEXT.partition("small:")[0]), small=True)


def test_changes_replace_fields_and_are_checked(write):
    folder = write(TEXT)
    assert Study.read(folder, tokens=512, budgets=["layers=0.5"]).tokens == 512
    assert Study.read(folder, small=True, window=64).window == 64
    with pytest.raises(InputError, match="unknown key 'windo'"):
        Study.read(folder, windo=64)
    with pytest.raises(InputError, match="tokens=256 is less than one window of 512"):  # before any lock is made
        Study.read(folder, tokens=256, window=512)


def test_a_study_is_the_same_after_a_round_trip(write, tmp_path):
    study = Study.read(write(TEXT))
    assert Study.load(study.save(tmp_path / "study.json")) == study
    assert Study.read(write(yaml.safe_dump(study.to_json()))) == study


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("small:", "headroom: sweep\nsmall:", r"headroom: a mapping is asked for, with keys of fit, .*'sweep'"),
        ("question:", "questoin:", r"study\.yaml:2: unknown key 'questoin'; did you mean 'question'"),
        ("    draws: 9", "    draw: 9", r"study\.yaml:14: unknown key 'controls\.1\.draw'; did you mean 'draws'"),
        ("  level: 0.01", "  levle: 0.01", r"study\.yaml:18: unknown key 'analysis\.levle'; did you mean 'level'"),
        ("draws: 9", "draws: many", r"study\.yaml:14: controls\.1\.draws: .*integer.*\(found 'many'\)"),
        ("draws: 9", "draws: 0", r"study\.yaml:14: .*greater than 0 \(found 0\)"),
        ("level: 0.01", "level: 1.5", r"study\.yaml:18: .*less than 1"),
        ("level: 0.01", "side: both", r"study\.yaml:18: analysis\.side: .*'less' or 'greater' \(found 'both'\)"),
        ("level: 0.01", "outcome: accuracy", "analysis.outcome names 'accuracy'; allowed: kl, loss"),
        ("layers=0.05", "layers=5", r"study\.yaml:4: budgets\.0: budget layers=5 is outside \(0, 1\]"),
        ("layers=0.05", "layer=0.05", r"study\.yaml:4: unknown key 'budgets\.0\.layer'; did you mean 'layers'"),
        ("layers=0.05", "0.05", r"study\.yaml:4: budgets\.0: a budget is written layers=0\.2"),
        ("name: bottom\n", "name: bot tom\n", r"study\.yaml:9: arms\.1\.name: .*pattern"),
        ("name: ranking", "name: ../out", r"study\.yaml:1: name: .*pattern"),
        ("name: bottom\n", "name: top\n", "two arms are called 'top'"),
        ("selector: counted", "selector: matched", "two controls are called 'matched'"),
        ("total_of: top", "total_of: tip", "total_of names 'tip'; did you mean 'top'"),
        ("total_of: top", "total_of: bottom-at-top", "total_of names 'bottom-at-top', which takes its total from"),
        ("like: [top]", "like: [tap]", "like names 'tap'; did you mean 'top'"),
        ("control: matched", "control: matchd", "analysis.control names 'matchd'; did you mean 'matched'"),
        ("  level: 0.01", "  exclusions: [{text: python-topics, reason: none}]", "leave no claim to test"),
        (
            "  budgets: layers=0.1",
            "  budget: layers=0.1",
            r"small form\):20: unknown key 'budget'; did you mean 'budgets'",
        ),
        ("draws: 10", "draws: ten", r"small form\):21: controls\.0\.draws"),
        (
            "    like: [top]",
            "    like: []",
            "control 'counted': like is empty: leave it out for every arm, or name top",
        ),
        ("    like: [top]", "    like: [top, top]", "control 'counted': like names 'top' twice"),
        ("  level: 0.01", "  arms: []", "analysis.arms is empty"),
        ("  level: 0.01", "  arms: [top, top]", "analysis.arms names 'top' twice"),
        ("  level: 0.01", "headroom: {arms: []}", "headroom.arms is empty"),
        ("  level: 0.01", "  margin: 0.1\n  margin_reason: ' '", "margin 0.1 has no margin_reason"),
        ("  - parameters: 0.1", "  - layers=0.050", "budgets names 'layers=0.05' twice"),
        ("draws: 499", "draws: 1000000000000", "control 'matched': 1000000000000 draws; at most 1,000,000 are made"),
        ("name: ranking", "name: ranking\nname: other", r"study\.yaml:2: key 'name' stands twice"),
    ],
)
def test_what_is_wrong_is_named_with_line_and_what_is_allowed(write, old, new, message):
    assert TEXT.count(old) == 1
    with pytest.raises(InputError, match=message):
        Study.read(write(TEXT.replace(old, new)))


@pytest.mark.parametrize("lost", ["question", "budgets", "arms", "controls", "analysis"])
def test_missing_keys(write, lost):
    data = yaml.safe_load(TEXT.partition("small:")[0])
    del data[lost]
    with pytest.raises(InputError, match=f"{lost}: Field required"):
        Study.read(write(yaml.safe_dump(data)))
    data[lost] = [] if lost in ("budgets", "arms", "controls") else None
    with pytest.raises(InputError, match=lost):
        Study.read(write(yaml.safe_dump(data)))


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("# only a comment\n", "NoneType"), ("- a\n", "list")])
def test_files_that_hold_no_study(write, text, message):
    with pytest.raises(InputError, match=message):
        Study.read(write(text))


def test_a_study_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "ranking-control").mkdir()
    (tmp_path / "ranking-control" / "study.yaml").write_text(TEXT)
    with pytest.raises(InputError, match=r"did you mean '.*ranking-control'"):
        study_file(tmp_path / "ranking-contrl")
    with pytest.raises(InputError, match=r"there are '.*ranking-control'"):
        study_file(tmp_path / "something-else")
    (tmp_path / "here" / "studies").mkdir(parents=True)
    (tmp_path / "ranking-control").rename(tmp_path / "here" / "studies" / "ranking-control")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="did you mean 'studies/ranking-control'"):
        study_file("ranking-control")  # named without the folder that it lies in
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty/study\.yaml does not exist"):
        study_file(tmp_path / "empty")
    with pytest.raises(InputError, match=r"no folder in .*empty holds a study\.yaml"):
        study_file(tmp_path / "empty" / "gone")


def test_what_lies_beside_a_study_is_found_from_any_folder(write, tmp_path, monkeypatch):
    home = write(
        TEXT + "  texts: {b: b.txt}\nmodel: models/mine\n"
        "texts: {a: a.txt, c: gone.txt, topics: python-topics, all: ~/x.txt}\n"
    )
    (home / "models" / "mine").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "python-topics"):
        (home / name).touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    study = Study.read(Path("..") / "study.yaml")
    assert study.model == "../models/mine"
    assert study.texts == {"a": "../a.txt", "c": "gone.txt", "topics": "python-topics", "all": "~/x.txt"}
    assert Study.read("..", small=True).texts == {"b": "../b.txt"}
    assert Study.read("..", model="models/mine").model == "models/mine"  # what a caller says is the caller's
    monkeypatch.chdir(home)
    assert Study.read("study.yaml").model == "models/mine"
    (home / "demo").mkdir()
    assert Study.read(write(TEXT)).model == "demo"


def test_labels_are_fit_for_folders():
    assert slug("random-matched(within=0.01,roles=true)") == "random-matched-within-0.01-roles-true"
    assert slug("layers=0.05") == "layers-0.05"
