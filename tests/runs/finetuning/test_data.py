"""Rows of tasks: what is held out, what is shared, what is cut."""

import json

import pytest

from toolkit.errors import InputError
from toolkit.records.trained import Data
from toolkit.runs.finetuning.data import doubts, encoded, hashes, read_rows, record
from toolkit.runs.models import load_tokenizer

TUNE = {"values": [0.001, 0.1], "rows": 8}


def rows_of(split):
    return {(example.prompt, example.target) for example in split.examples}


def test_tuning_rows_are_neither_trained_on_nor_scored(declared):
    rows = read_rows(declared(tune=TUNE), "sums")
    assert [len(rows.splits[name].examples) for name in ("train", "test", "tune")] == [24, 16, 8]
    train, test, tune = rows_of(rows.train), rows_of(rows.test), rows_of(rows.tune)
    assert not tune & train and not tune & test and not train & test
    assert rows.train.sha256 != rows.tune.sha256
    assert rows_of(read_rows(declared(), "sums").train) == train  # the same rows as without a tune block


def test_a_tune_block_leaves_rows_to_train_on(declared):
    use = {"task": "arithmetic(largest=10)"}
    count = len(read_rows(declared(tasks={"sums": use}), "sums").train.examples)
    with pytest.raises(InputError, match=rf"task 'sums': tune.rows holds out {count} of {count} training rows"):
        read_rows(declared(tasks={"sums": use}, tune=TUNE | {"rows": count}), "sums")


def test_scored_rows_among_the_training_rows_are_counted(declared, tmp_path):
    row = {"left": 1, "operator": "+", "right": 2, "options": [3, 4], "gold": 0}
    others = [row | {"left": left, "options": [left + 2, left + 3]} for left in range(5, 9)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, [row, *others[:3]])))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, [row, others[3]])))
    rows = read_rows(declared(tasks={"sums": {"task": "arithmetic", "data": str(tmp_path)}}), "sums")
    assert rows.shared == 1
    assert record(rows.test).source == "test.jsonl"  # its folder is the machine's matter
    assert set(hashes({"sums": rows})) == {"sums train", "sums test"}


def test_missing_data_name_the_task(declared, tmp_path):
    with pytest.raises(InputError, match=r"task 'sums': .*nowhere"):
        read_rows(declared(tasks={"sums": {"task": "arithmetic", "data": str(tmp_path / "nowhere")}}), "sums")


def test_what_is_doubtful_of_the_training_rows_is_flagged():
    data = Data(source="x", sha256="0" * 64, found=9, rows=7, cut=2, shortened=3)
    assert [(f.check, f.severity) for f in doubts(data)] == [("dropped", "flag"), ("shortened", "flag")]
    assert doubts(data)[0].reason.startswith("2 training rows") and "of 3 training rows" in doubts(data)[1].reason
    assert doubts(data.model_copy(update={"cut": 0, "shortened": 0})) == []


def test_rows_whose_target_does_not_fit_are_counted(declared, model):
    tokenizer = load_tokenizer(str(model))
    train = read_rows(declared(), "sums").train
    kept, cut = encoded(tokenizer, train, 64)
    assert (len(kept), cut) == (24, 0)
    with pytest.raises(InputError, match="none of 24 training rows has a target that fits into a length of 2 tokens"):
        encoded(tokenizer, train, 2)
