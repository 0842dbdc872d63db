"""Tasks of lm-evaluation-harness: how they are named, and what is made of the library's samples."""

import importlib.util

import pytest
from toolkit_plugins.tasks.lm_eval import _metrics, _row

from toolkit.errors import InputError
from toolkit.interfaces import Scored
from toolkit.registry import registry
from toolkit.runs.tasks import read

INSTALLED = importlib.util.find_spec("lm_eval") is not None


def test_a_colon_names_the_task():
    made = registry.make("task", "lm-eval:arc_easy")
    assert made == registry.make("task", "lm-eval(task=arc_easy)")
    assert made.key == "lm-eval(task=arc_easy)" and registry.make("task", made.key) == made
    assert registry.make("task", "lm-eval:arc_easy(shots=5)").shots == 5


@pytest.mark.parametrize("key", ["sst2:x", "lm-eval:"])
def test_other_colons_are_refused(key):
    with pytest.raises(InputError, match="no option that is written after a colon"):
        registry.make("task", key)


def test_it_reads_no_rows_and_trains_on_none():
    task = registry.make("task", "lm-eval:arc_easy")
    assert read(task, "test", limit=7).limit == 7
    with pytest.raises(InputError, match="only scores: name the task that is trained on"):
        read(task, "train")


@pytest.mark.skipif(INSTALLED, reason="lm-eval is installed")
def test_the_extra_is_named_where_it_is_missing():
    with pytest.raises(InputError, match=r"pip install 'qlora-toolkit\[lm-eval\]'"):
        registry.make("task", "lm-eval:arc_easy").score(None, None, limit=1, length=99, batch=1)


def test_samples_become_rows():
    asked = [("Q:", " no"), ("Q:", " yes")]
    sample = {
        "arguments": asked,
        "target": 1,
        "filtered_resps": [(-3.5, False), (-2.25, True)],
        "acc": 1.0,
        "acc_norm": 0.0,
    }
    assert _row(sample, "t") == Scored("Q:", " yes", 1.0, options=(3.5, 2.25), gold=1, prediction=1)
    text = {"arguments": [("Q:", {"until": []})], "target": "18", "filtered_resps": ["it is 18"], "exact_match": 1.0}
    assert _row(text, "t") == Scored("Q:", "18", 1.0, prediction="['it is 18']")
    with pytest.raises(InputError, match="'t' gives its samples none of exact_match"):
        _row({"arguments": asked, "target": 1, "filtered_resps": []}, "t")


def test_metrics_are_the_librarys_own():
    results = {"arc_easy": {"alias": "arc_easy", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.25}}
    assert _metrics(results) == {"acc": 0.5, "acc_norm": 0.25}


TOY = """
task: toy_arc
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs the extra lm-eval")
def test_the_library_finds_the_likelihoods_that_ours_finds(checkpoints, tmp_path, monkeypatch):
    """The same rows as the library's task and as our own: option by option, and the library's accuracy."""
    import functools
    import json

    import lm_eval.tasks
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toolkit.runs.tasks import evaluate

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [
        {"question": f"what is {n} + 1?", "choices": [f"{n}", f"{n + 1}", "none of these"], "label": n % 3}
        for n in range(2, 9)
    ]
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "toy.yaml").write_text(TOY.replace("FILE", str(file)), encoding="utf-8")
    manager = functools.partial(lm_eval.tasks.TaskManager, include_path=str(tmp_path))
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)
    folder = checkpoints("llama", torch.float32)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    state = torch.random.get_rng_state()
    theirs = registry.make("task", "lm-eval:toy_arc")
    found = evaluate(model, tokenizer, theirs, read(theirs, "test"), length=512, batch=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    ours = registry.make("task", "arc-easy")
    expected = evaluate(model, tokenizer, ours, read(ours, "test", source=str(file)), length=512, batch=4)
    right = {row[1]: row for row in expected.rows}
    for row in found.rows:
        mine = right[row[1]]
        assert row[4] == pytest.approx(mine[4], abs=1e-2) and row[2] == pytest.approx(mine[2], abs=1e-2)
        assert (row[3], row[5], row[6], row[7]) == (mine[3], mine[5], mine[6], mine[7])
    scores = found.scores[""]
    assert scores.further["acc"] == scores.score == expected.scores[""].score
    assert scores.loss == pytest.approx(expected.scores[""].loss, abs=1e-3)
    with pytest.raises(InputError, match="lm-eval has no task 'toy_ark'; did you mean 'toy_arc'"):
        evaluate(model, tokenizer, registry.make("task", "lm-eval:toy_ark"), read(theirs, "test"), length=99, batch=1)
