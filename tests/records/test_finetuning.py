"""Fine-tuning study files: read with their lines, small forms, data beside them, and what is refused."""

import pytest

from toolkit.errors import InputError
from toolkit.records.declared import kind_of
from toolkit.records.finetuning import FineTuning

TEXT = """\
kind: fine-tuning
name: trained
question: Is it better?
model: model
tasks:
  sums: {task: arithmetic, levers: {length: 64}}
  words: {task: copa, data: rows, train: rte, train_data: more}
arms:
  - name: qlora
  - name: top
    protect: {selector: top-error, budget: layers=0.2}
  - name: drawn
    protect: {selector: random-matched, like: top}
levers: {steps: 20, learning_rate: 0.001}
seeds: 3
analysis: {baseline: qlora}
small:
  seeds: 2
  tasks:
    sums: {task: arithmetic, data: rows}
"""


@pytest.fixture
def write(tmp_path):
    def to(text=TEXT, **replaced):
        for old, new in replaced.items():
            text = text.replace(old, new)
        (tmp_path / "study.yaml").write_text(text)
        return tmp_path

    return to


def changed(old, new):
    assert old in TEXT
    return TEXT.replace(old, new)


def test_a_study_reads_from_its_folder_and_knows_its_kind(write):
    folder = write()
    study = FineTuning.read(folder)
    assert study == FineTuning.read(folder / "study.yaml") and kind_of(folder) == "fine-tuning"
    assert [seeds.draw for seeds in study.runs_of_an_arm] == [0, 1, 2]
    assert study.levers_of("sums").length == 64 and study.levers_of("words").length == 600
    assert study.levers_of("sums", "top", rank=4).model_dump(include={"steps", "rank"}) == {"steps": 20, "rank": 4}


def test_the_small_form_replaces_fields(write):
    small = FineTuning.read(write(), small=True)
    assert small.form == "small" and small.small is None and small.seeds == 2 and list(small.tasks) == ["sums"]
    with pytest.raises(InputError, match=r"study.yaml \(small form\):\d+: seeds: 'two' is neither"):
        FineTuning.read(write(changed("  seeds: 2", "  seeds: two")))


def test_folders_are_looked_for_beside_the_study_first(write, tmp_path):
    folder = write()
    assert FineTuning.read(folder).model == "model"  # not there: a name of the Hub
    for name in ("model", "rows", "more"):
        (tmp_path / name).mkdir()
    study = FineTuning.read(folder)
    assert study.model == str(tmp_path / "model")
    assert study.tasks["words"].data == str(tmp_path / "rows")
    assert study.tasks["words"].train_data == str(tmp_path / "more")
    assert FineTuning.read(folder, small=True).tasks["sums"].data == str(tmp_path / "rows")


def test_published_studies_and_declarations_know_no_folders(write, tmp_path):
    before = FineTuning.read(write()).declaration
    for name in ("model", "rows", "more"):
        (tmp_path / name).mkdir()
    study = FineTuning.read(tmp_path)
    assert str(tmp_path) not in str(study.published.to_json())
    assert study.declaration == before
    assert FineTuning.read(write(changed("seeds: 3", "seeds: 4"))).declaration != before


def test_data_are_replaced_by_task(write):
    study = FineTuning.read(write()).with_data({"sums": "/a", "words:train": "/b"})
    assert (study.tasks["sums"].data, study.tasks["words"].data) == ("/a", "rows")
    assert study.tasks["words"].train_data == "/b"
    for given, message in [
        ({"sum": "/a"}, "task 'sum'; did you mean 'sums'"),
        ({"sums:train": "/a"}, "is trained on its own rows"),
        ({"words:test": "/a"}, "write words=PATH, or words:train=PATH"),
    ]:
        with pytest.raises(InputError, match=message):
            study.with_data(given)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: qlora", "name: qlora\n    levers: {steps: 30}", ".20 for the others, 30 here.*not declared"),
        ("name: qlora", "name: qlora\n    levers: {step: 30}", "levers names 'step'; did you mean 'steps'"),
        ("seeds: 3", "seeds: 3\nfactors: [rnk]", "factors names 'rnk', which is no lever; did you mean 'rank'"),
        ("levers: {length: 64}", "levers: {lenght: 64}", "task 'sums': levers names 'lenght'; did you mean 'length'"),
        ("levers: {length: 64}", "levers: {length: 0}", "task 'sums': lever length: .*greater than 1.*found 0"),
        ("like: top", "like: tpo", "arm 'drawn': protect.like names 'tpo'; did you mean 'top'"),
        ("like: top", "like: qlora", "arm 'drawn': protect.like names 'qlora', which protects no layers"),
        ("like: top", "like: drawn", "protect.like names 'drawn', which is matched to another arm"),
        ("like: top}", "like: top, draw: once, draws: 3}", "draw: once uses a single draw"),
        ("name: drawn", "name: top", "two arms are called 'top'"),
        ("baseline: qlora", "baseline: qlra", "analysis.baseline names 'qlra'; did you mean 'qlora'"),
        ("baseline: qlora", "baseline: qlora, margin: 0.1", "has no margin_reason"),
        ("seeds: 3", "seeds: 0", "seeds: 0; at least one run an arm"),
        ("seeds: 3", "seeds: []", "at least one run an arm"),
        ("seeds: 3", "seeds: [{adapter: 0, data: 0, draw: 0, repeat: 1}]", "has a repeat; `repeats` declares"),
        ("seeds: 3", "seeds: [{adapter: 0, data: 0, draw: 0}, {adapter: 0, data: 0, draw: 0}]", "stands twice"),
        ("seeds: 3", "seeds: 3\ntune: {values: [0.1, 0.1]}", "tune.values holds 0.1 twice"),
        ("seeds: 3", "seeds: 3\ntune: {values: [0.1, -1]}", "tune.values holds -1, which is no learning_rate"),
        ("seeds: 3", "seeds: 3\ntune: {lever: rnk, values: [1, 2]}", "tune.lever names 'rnk'; did you mean 'rank'"),
        ("seeds: 3", "seeds: 3\nrepeats: {arm: qlor}", "repeats.arm names 'qlor'; did you mean 'qlora'"),
        ("seeds: 3", "seeds: 3\ntiming: {duplicates: 1}", "study.yaml:16: timing.duplicates: .*equal to 2"),
        ("train: rte, ", "", "task 'words': train_data without train"),
        ("steps: 20", "stpes: 20", "study.yaml:14: unknown key 'levers.stpes'; did you mean 'steps'"),
    ],
)  # fmt: skip
def test_what_is_not_right_is_refused_with_its_name(write, old, new, message):
    with pytest.raises(InputError, match=message):
        FineTuning.read(write(changed(old, new)))


def test_every_study_has_an_a_a_arm_unless_it_says_that_it_has_none(write):
    given = FineTuning.read(write())
    assert "repeats" not in TEXT
    assert (given.repeats.arm, given.repeats.count) == ("qlora", 4)
    none = FineTuning.read(write(changed("seeds: 3", "seeds: 3\nrepeats: null")))
    assert none.repeats is None
    assert FineTuning.model_validate(none.to_json()) == none and FineTuning.model_validate(given.to_json()) == given
    one = FineTuning.read(write(changed("seeds: 3", "seeds: 3\nrepeats: {arm: top, count: 5}")))
    assert (one.repeats.arm, one.repeats.count) == ("top", 5)


def test_a_tuned_lever_is_no_arms_own(write):
    text = changed("name: qlora", "name: qlora\n    levers: {learning_rate: 0.1}")
    text = text.replace("seeds: 3", "seeds: 3\nfactors: [learning_rate]\ntune: {values: [0.1, 0.2]}", 1)
    with pytest.raises(InputError, match="arm 'qlora' sets 'learning_rate', which is tuned for every arm"):
        FineTuning.read(write(text))


def test_an_unknown_kind_names_its_line(write):
    with pytest.raises(InputError, match=r"study.yaml:1: kind: .*'fine-tunin'; did you mean 'fine-tuning'"):
        kind_of(write(changed("kind: fine-tuning", "kind: fine-tunin")))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: 3", "seeds: 10000000000000000000000000000000", "1e.31 runs an arm are asked for; at most 10,000"),
        ("seeds: 3", "seeds: [0, 1]", r":\d+: seeds: \[0, 1\] is neither a number of runs nor a list of sets"),
        ("seeds: 3", "seeds: yes", "True is neither a number of runs"),
        ("seeds: 3", "seeds: four", "'four' is neither a number of runs"),
        ("seeds: 3", "seeds: [{adapter: 4294967296, data: 0, draw: 0}]", "less than 4294967296"),
        (
            "seeds: 3",
            "seeds: 3\nrepeats: {arm: top, count: 1000000000}",
            "repeats.count: .*less than or equal to 10000",
        ),
        ("like: top}", "like: top, draws: 1000000000}", "draws: .*less than or equal to 10000"),
        ("{baseline: qlora}", "{baseline: qlora, pairs: [[top, top]]}", "compares 'top' with itself"),
    ],
)
def test_numbers_of_a_slipping_finger_are_refused_at_once_in_one_line(write, old, new, message):
    with pytest.raises(InputError, match=message) as caught:
        FineTuning.read(write(changed(old, new)))
    assert len(str(caught.value).splitlines()) == 1 or "4294967296" in new
    assert "study.yaml" in str(caught.value)
