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
