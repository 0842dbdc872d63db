"""Rows: where they are read from, which are taken, and what is refused."""

import gzip
import json

import pytest

from toolkit.errors import InputError
from toolkit.interfaces import Hub
from toolkit.registry import registry
from toolkit.runs.tasks import read
from toolkit.runs.tasks.sources import from_hub

ROWS = [{"sentence": f"film number {n}", "label": n % 2} for n in range(40)]


@pytest.fixture
def task():
    return registry.make("task", "sst2")


def prompts(split):
    return [example.prompt for example in split.examples]


@pytest.fixture
def folder(tmp_path, made):
    made.lines(tmp_path / "train.jsonl", ROWS)
    made.lines(tmp_path / "validation.jsonl", ROWS[:10])
    return tmp_path


def test_rows_are_shuffled_once_and_for_all(task, folder):
    whole = read(task, "train", source=str(folder))
    assert whole.found == 40 and whole.unusable == 0 and whole.source == "train.jsonl"
    assert sorted(whole.numbers) == list(range(40)) != whole.numbers
    assert prompts(whole) == [f"film number {n} It was" for n in whole.numbers]
    again = read(task, "train", source=str(folder), limit=7)
    assert again.numbers == whole.numbers[:7]
    assert again.sha256 == whole.part(0, 7).sha256 != whole.sha256
    assert read(task, "train", source=str(folder), seed=1).numbers != whole.numbers


def test_the_order_is_pinned(task, folder):
    """Another order would make another study of the same file."""
    assert read(task, "train", source=str(folder), limit=6).numbers == [6, 17, 11, 37, 38, 16]


def test_the_hash_is_of_what_the_model_meets(task, folder, made):
    before = read(task, "test", source=str(folder)).sha256
    made.lines(folder / "validation.jsonl", [*ROWS[:9], {"sentence": "film number 9", "label": 0}])
    assert read(task, "test", source=str(folder)).sha256 != before


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["test.jsonl", "validation.jsonl"], "test.jsonl"),
        (["validation.jsonl", "dev.jsonl"], "validation.jsonl"),
        (["dev.jsonl.gz"], "dev.jsonl.gz"),
        (["test.json"], "test.json"),
        (["val.json.gz"], "val.json.gz"),
    ],
)
def test_which_file_is_scored(task, tmp_path, names, taken):
    for name in names:
        text = json.dumps(ROWS) if ".json." in name + "." else "\n".join(map(json.dumps, ROWS))
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    split = read(task, "test", source=str(tmp_path))
    assert split.source == taken and split.found == 40


def test_one_file_is_the_split(task, folder):
    assert read(task, "test", source=str(folder / "train.jsonl")).found == 40


def test_a_byte_order_mark_and_windows_line_ends_are_read(task, tmp_path):
    (tmp_path / "test.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in ROWS))
    assert read(task, "test", source=str(tmp_path)).found == 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"sentence": "a", "label": 1}\n{"sentence": \n', r"train.jsonl:2 is not JSON"),
        ("[1, 2]\n", r"train.jsonl:1: a row is an object, found list"),
        ('{"sentence": "a", "labels": 1}\n', r"train.jsonl, row 0: .* a column 'label'; did you mean 'labels'\?"),
        ('{"text": "a"}\n', r"asked for: sentence, label; there are: text"),
        ('{"sentence": "a", "label": -1}\n', r"row 0: column 'label': found label -1; allowed: 0, 1; −1 marks a row"),
        ('{"sentence": "a", "label": "1"}\n', r"found label '1'; allowed: 0, 1"),
        ('{"sentence": "a", "label": true}\n', r"found label True; allowed: 0, 1"),
        ('{"sentence": "a", "label": 1}\n{"sentence": "  ", "label": 1}\n', r"row 1: column 'sentence': found '  '"),
        ('{"sentence": "a\\ud800", "label": 1}\n', "row 0 holds half of a surrogate pair"),
        ('{"sentence": null, "label": 1}\n', r"column 'sentence': found None; a text is asked for"),
        ('{"sentence": "' + "[" * 10 + '", "label": [[]]}\n', r"found label \[\[\]\]"),
    ],
)
def test_bad_rows(task, tmp_path, content, message):
    (tmp_path / "train.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read(task, "train", source=str(tmp_path))


def test_bad_files(task, tmp_path):
    with pytest.raises(InputError, match=r"no data at .*nowhere: a folder with a file train"):
        read(task, "train", source=str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"holds no train rows: .* it holds nothing"):
        read(task, "train", source=str(tmp_path))
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(InputError, match=r"it holds rows.csv"):
        read(task, "train", source=str(tmp_path))
    with pytest.raises(InputError, match=r"rows.csv: a data file ends in one of .jsonl"):
        read(task, "train", source=str(tmp_path / "rows.csv"))
    (tmp_path / "train.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match="no readable gzip"):
        read(task, "train", source=str(tmp_path))
    (tmp_path / "train.jsonl").write_bytes(b'{"sentence": "\xff"}')
    with pytest.raises(InputError, match=r"train.jsonl and train.jsonl.gz: which rows are meant"):
        read(task, "train", source=str(tmp_path))
    (tmp_path / "train.jsonl.gz").unlink()
    with pytest.raises(InputError, match="not UTF-8"):
        read(task, "train", source=str(tmp_path))
    (tmp_path / "test.json").write_text('{"sentence": "a"}')
    with pytest.raises(InputError, match="an array of rows is asked for, found dict"):
        read(task, "test", source=str(tmp_path))
    (tmp_path / "test.json").write_text('{"sentence": "a"}\n{"sentence": "b"}')
    with pytest.raises(InputError, match=r"one row a line is a \.jsonl file"):
        read(task, "test", source=str(tmp_path))
    (tmp_path / "test.json").write_text("[]")
    with pytest.raises(InputError, match="holds no rows"):
        read(task, "test", source=str(tmp_path))
    with pytest.raises(InputError, match="at least one is needed"):
        read(task, "test", source=str(tmp_path), limit=0)


def test_no_row_that_can_be_used(tmp_path, made):
    rows = [{"context": "a", "question": "b", "answers": {"text": []}}]
    made.lines(tmp_path / "test.jsonl", rows)
    with pytest.raises(InputError, match=r"none of the 1 rows of test\.jsonl can be used"):
        read(registry.make("task", "squad"), "test", source=str(tmp_path))


def test_rows_made_by_code():
    task = registry.make("task", "arithmetic")
    split = read(task, "test", limit=5)
    assert split.source == "code" and split.found == 1000 and len(split.examples) == 5


def test_a_task_without_data_says_so(made):
    with pytest.raises(InputError, match=r"names no data set on the Hub: give a folder"):
        read(made.Toy(), "test")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub as a folder: `datasets` itself reads its parquet files; only the place differs."""
    import datasets

    load = datasets.load_dataset
    asked = []

    def local(path, name=None, *, split, revision=None):
        asked.append((path, name, split, revision))
        return load("parquet", data_files={split: str(tmp_path / f"{split}.parquet")}, split=split)

    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "train.parquet"))
    datasets.Dataset.from_list(ROWS[:12]).to_parquet(str(tmp_path / "validation.parquet"))
    monkeypatch.setattr(datasets, "load_dataset", local)
    return asked


def test_rows_from_the_hub(task, hub):
    split = read(task, "test")
    assert split.source == "hub:nyu-mll/glue/sst2" and split.found == 12
    assert prompts(split) == [f"film number {n} It was" for n in split.numbers]
    assert hub == [("nyu-mll/glue", "sst2", "validation", None)]


def test_the_hub_and_a_file_give_the_same_rows(task, hub, tmp_path, made):
    made.lines(tmp_path / "test.jsonl", ROWS[:12])
    assert read(task, "test").sha256 == read(task, "test", source=str(tmp_path)).sha256


def test_pictures_are_not_decoded(tmp_path, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list(
        [{"question": "q", "image": {"bytes": b"no picture", "path": None}}, {"question": "r", "image": None}],
        features=datasets.Features({"question": datasets.Value("string"), "image": datasets.Image()}),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    _, found = from_hub(Hub("a/b"), "train")
    assert found[0]["image"]["bytes"] == b"no picture" and found[1]["image"] is None


def test_the_hub_cannot_be_reached(task, monkeypatch):
    import datasets

    def fails(*_, **__):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(InputError, match=r"nyu-mll/glue \(sst2\) .*\(no network at all\); .* `data: FOLDER`"):
        read(task, "train")


def test_a_split_that_the_hub_does_not_have():
    with pytest.raises(InputError, match="meta-math/MetaMathQA has no test rows"):
        read(registry.make("task", "metamathqa"), "test")


def test_sets_lie_in_subfolders(tmp_path, made):
    names = ["boolq", "piqa", "social_i_qa", "hellaswag", "winogrande", "ARC-Easy", "ARC-Challenge", "openbookqa"]
    words = {"boolq": "true", "piqa": "solution2", "hellaswag": "ending1", "winogrande": "option1"}
    for count, name in enumerate(names, 1):
        answer = words.get(name, "answer3")
        row = {
            "instruction": f"{name}? Answer format: {answer}/{answer[:-1]}9",
            "input": "",
            "output": f"the correct answer is {answer}",
            "answer": answer,
        }
        (tmp_path / name).mkdir()
        made.lines(tmp_path / name / "test.jsonl", [row] * count)
    split = read(registry.make("task", "commonsense"), "test", source=str(tmp_path))
    assert split.found == 36 and split.source == "test.jsonl of 8 sets"
    assert {name: sum(e.group == name for e in split.examples) for name in names} == {
        name: count for count, name in enumerate(names, 1)
    }
    (tmp_path / "piqa" / "test.jsonl").rename(tmp_path / "piqa" / "dev.jsonl")
    assert read(registry.make("task", "commonsense"), "test", source=str(tmp_path)).source == ", ".join(
        f"{name}/{'dev' if name == 'piqa' else 'test'}.jsonl" for name in names
    )
    one = read(registry.make("task", "commonsense(set=piqa)"), "test", source=str(tmp_path))
    assert one.found == 2 and {e.group for e in one.examples} == {""}
    made.lines(tmp_path / "all.jsonl", [json.loads((tmp_path / "piqa/dev.jsonl").read_text().split("\n")[0])] * 3)
    union = read(registry.make("task", "commonsense"), "train", source=str(tmp_path / "all.jsonl"))
    assert union.found == 3 and {e.group for e in union.examples} == {""}


def test_running_text_keeps_its_order(tmp_path, made):
    for name in ("train", "test"):
        made.lines(tmp_path / f"{name}.jsonl", [{"text": f"line {n}\n"} for n in range(30)])
    task = registry.make("task", "wikitext2")
    scored = read(task, "test", source=str(tmp_path), limit=4)  # four windows, of all lines
    assert scored.numbers == list(range(30)) and scored.limit == 4
    assert read(task, "train", source=str(tmp_path), limit=4).numbers == [0, 1, 2, 3]
