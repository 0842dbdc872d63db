"""Every real row of every set becomes an example whose gold target is among its options."""

import pytest

from toolkit.runs.tasks import read

SETS = ["boolq", "piqa", "social_i_qa", "hellaswag", "winogrande", "ARC-Easy", "ARC-Challenge", "openbookqa"]
FOLDERS = {
    "sst2": "sst2",
    "rte": "rte",
    "boolq": "boolq_passage",
    "wsc": "wsc",
    "wic": "wic",
    "copa": "copa",
    "winogrande": "winogrande_raw",
    "arc-easy": "arc_easy_raw",
    "arc-challenge": "arc_challenge_raw",
    "squad": "squad",
    "scienceqa": "scienceqa_text",
    "gsm8k": "gsm8k",
    **{f"commonsense(set={name})": name for name in SETS},
}
UNUSABLE = {("scienceqa", "train"): 521, ("scienceqa", "test"): 167, ("scienceqa", "validation"): 191}
"""Rows that need an image."""


@pytest.mark.parametrize("key", FOLDERS)
def test_every_row_is_an_example(key, task, data):
    folder = data / FOLDERS[key]
    for path in sorted(folder.glob("*.jsonl.gz")):
        split = read(task(key), "train", source=str(path))
        name = path.name.partition(".")[0]
        assert split.unusable == UNUSABLE.get((key, name), 0)
        for example in split.examples:
            assert example.prompt and example.target.strip() and example.prompt == example.prompt.lstrip()
            if example.options:
                assert example.options[example.gold] == example.target
                assert 2 <= len(example.options) <= 5
            else:
                assert example.references
            assert not example.target.endswith(" ")


def test_answers_of_arc_are_three_to_five(task, data):
    from collections import Counter

    split = read(task("arc-easy"), "train", source=str(data / "arc_easy_raw" / "train.jsonl.gz"))
    assert Counter(len(example.options) for example in split.examples) == {4: 2241, 3: 6, 5: 4}
    worded = read(task("commonsense(set=ARC-Easy)"), "train", source=str(data / "ARC-Easy"))
    assert Counter(len(example.options) for example in worded.examples) == {4: 2239, 3: 6, 5: 4}


def test_the_union_is_scored_by_set(task, data):
    split = read(task("commonsense"), "test", source=str(data), limit=400)
    assert split.found == 4000 and {example.group for example in split.examples} == set(SETS)


def test_every_gold_answer_is_judged_right_and_another_one_wrong(task, data):
    for key in FOLDERS:
        if task(key).scored != "generation":
            continue
        made = task(key)
        for example in read(made, "test", source=str(data / FOLDERS[key]), limit=200).examples:
            assert made.judge(example.target, example).score == 1, (key, example)
            others = [option for option in example.options if option != example.target]
            assert all(made.judge(option, example).score == 0 for option in others)


@pytest.mark.parametrize(("name", "raw"), [("ARC-Easy", "arc_easy_raw"), ("ARC-Challenge", "arc_challenge_raw")])
def test_arcs_own_rows_are_worded_as_llm_adapters_does(name, raw, task, rows):
    """The Hub's form against the files that LLM-Adapters ships, byte for byte."""
    made = task(f"commonsense(set={name})")
    hub = [
        {
            "question": row["question"],
            "choices": {"text": row["choices"], "label": [*"ABCDE"[: len(row["choices"])]]},
            "answerKey": "ABCDE"[row["label"]],
        }
        for split in ("train", "test")
        for row in rows(raw, split)
    ]
    found = {(e.prompt, e.target) for e in map(made.example, hub)}
    shipped = [made.example(row) for split in ("train", "test") for row in rows(name, split)]
    assert len(shipped) > 1000 and {(e.prompt, e.target) for e in shipped} <= found


def test_winograndes_own_rows_are_worded_as_llm_adapters_does(task, rows):
    made = task("commonsense(set=winogrande)")
    found = {(e.prompt, e.target) for e in map(made.example, rows("winogrande_raw", "validation"))}
    shipped = [made.example(row) for row in rows("winogrande", "test")]
    assert len(shipped) == 500 and {(e.prompt, e.target) for e in shipped} <= found


def test_boolqs_own_rows_are_worded_as_llm_adapters_does(task, rows):
    made = task("commonsense(set=boolq)")
    hub = [
        {"question": r["question"], "passage": r["passage"], "answer": r["label"]}
        for r in rows("boolq_passage", "validation")
    ]
    found = {(e.prompt, e.target) for e in map(made.example, hub)}
    shipped = {(e.prompt, e.target) for e in map(made.example, rows("boolq", "test"))}
    prompts = {prompt for prompt, _ in found}
    both = {pair for pair in shipped if pair[0] in prompts}
    assert len(both) > 100 and both <= found


def test_the_joined_lines_are_the_official_wikitext(task, data):
    import hashlib

    split = read(task("wikitext2"), "test", source=str(data / "wikitext2_raw"))
    text = "".join(example.target for example in split.examples)
    assert len(text.encode()) == 1_290_590
    official = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
    assert hashlib.sha256(text.encode()).hexdigest() == official
