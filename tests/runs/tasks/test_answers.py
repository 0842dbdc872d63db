"""Tasks of strangers that raise, or answer what no score can be made of: each is named, with what was asked for."""

import itertools
import random

import pytest

from toolkit.errors import InputError
from toolkit.interfaces import Answered, Example, Scored
from toolkit.runs.tasks import evaluate, read

GOOD = Example("a", " b", (" b", " c"), 0)


def boom(*_, **__):
    raise ZeroDivisionError("of\nmany lines")


def of(base, **changed):
    return type("Strange", (base,), {"name": "strange", "__doc__": "A stranger's."} | changed)()


def rows(*made):
    return lambda self, split: [{"example": example} for example in made]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"make": boom}, "make, of the test rows, failed: ZeroDivisionError: of many lines"),
        ({"prepare": boom}, "prepare, of code, failed: ZeroDivisionError"),
        ({"example": boom}, "example, of code, row 0, failed: ZeroDivisionError"),
        ({"make": lambda self, split: 5}, "make, of the test rows, failed: TypeError"),
        ({"make": lambda self, split: [5]}, r"code, row 0: task strange has 5 \(int\) as a row; a mapping"),
        ({"make": lambda self, split: [{"example": random.random()}]}, "makes other test rows each time"),
        ({"make": rows("text")}, r"code, row 0: task strange made 'text' \(str\) of it; an Example"),
        ({"make": rows(Example(5, " b"))}, r"gave prompt 5 \(int\)"),
        ({"make": rows(Example("a", None))}, "gave target None"),
        ({"make": rows(Example("a", "b", "bc", 0))}, r"gave options 'bc' \(str\)"),
        ({"make": rows(Example("a", " b", (" b", None), 0))}, "gave options"),
        ({"make": rows(Example("a", " b", (" b", " c"), "0"))}, r"gave gold '0' \(str\)"),
        ({"make": rows(Example("a", " b", (" b", " c"), False))}, r"gave gold False \(bool\)"),
        ({"make": rows(Example("a", " b", (" b", " c"), 0, group=3))}, r"gave group 3 \(int\)"),
        ({"scored": "vibes"}, "scored is 'vibes'; allowed: generation, options, own, text"),
        ({"columns": "number"}, "columns is 'number'; a tuple of names"),
        ({"scored": "generation", "new_tokens": 0}, "new_tokens is 0; at least one"),
        ({"scored": "generation", "stop": ("",)}, "none of them empty"),
        ({"scored": "generation", "stop": "."}, r"stop is '\.'; a tuple of texts"),
    ],
)
def test_rows_that_are_none(made, changed, message):
    with pytest.raises(InputError, match=message) as caught:
        read(of(made.Toy, **({"make": rows(GOOD)} | changed)), "test")
    assert "strange" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_rows_without_an_end_are_refused(made, monkeypatch):
    monkeypatch.setattr("toolkit.runs.tasks.split.MOST", 1000)
    endless = of(made.Toy, make=lambda self, split: ({"example": GOOD} for _ in itertools.count()))
    with pytest.raises(InputError, match="makes more than 1,000 test rows"):
        read(endless, "test")


def test_a_task_that_changes_its_rows_changes_its_own(made):
    kept = [{"number": n} for n in range(4)]

    def example(self, row):
        row["number"] += 1
        return Example(f"{row['number']}", " b", (" b", " c"), 0)

    strange = of(made.Toy, make=lambda self, split: kept, example=example)
    first, again = read(strange, "test"), read(strange, "test")
    assert first.sha256 == again.sha256 and kept == [{"number": n} for n in range(4)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"judge": boom}, "judge, of the answer to row 0, failed: ZeroDivisionError: of many lines"),
        ({"judge": lambda *_: None}, "judge gave None .* an Answered is asked for"),
        ({"judge": lambda *_: Answered(object(), 1.0)}, "judge gave the answer <object"),
        ({"judge": lambda *_: Answered("a", 7.0)}, r"score of row 0 is 7\.0 .* from 0 to 1"),
        ({"judge": lambda *_: Answered("a", float("nan"))}, "score of row 0 is nan"),
        ({"judge": lambda *_: Answered("a", "right")}, r"score of row 0 is 'right' \(str\)"),
        ({"metrics": boom}, "metrics failed: ZeroDivisionError"),
        ({"metrics": lambda *_: None}, "the metrics are None"),
        ({"metrics": lambda *_: {"x": "y"}}, r"metric 'x' is 'y' \(str\)"),
        ({"scored": "own"}, "score failed: NotImplementedError"),
        ({"scored": "own", "score": boom}, "score failed: ZeroDivisionError"),
        ({"scored": "own", "score": lambda *_, **__: 5}, "score gave 5"),
        ({"scored": "own", "score": lambda *_, **__: ([5], {})}, "score gave 5 .* as row 0"),
        ({"scored": "own", "score": lambda *_, **__: ([Scored("a", "b", 2.0)], {})}, r"score of row 0 is 2\.0"),
        ({"scored": "text", "windows": lambda *_: 5}, "windows gave 5"),
    ],
)
def test_answers_that_are_none(made, model, tokenizer, changed, message):
    strange = of(made.Generated, **({"judge": lambda *_: Answered("a", 1.0)} | changed))
    with pytest.raises(InputError, match=f"task strange: .*{message}") as caught:
        evaluate(model, tokenizer, strange, made.split(Example("a", " b")), length=32, batch=2)
    assert len(str(caught.value).splitlines()) == 1


def test_a_lack_of_memory_is_no_fault_of_the_task(made, model, tokenizer):
    def score(*_, **__):
        raise MemoryError("no more")

    with pytest.raises(MemoryError):
        evaluate(model, tokenizer, of(made.Toy, scored="own", score=score), made.split(GOOD), length=32, batch=2)


def test_a_score_may_be_a_truth_value(made, model, tokenizer):
    strange = of(made.Generated, judge=lambda *_: Answered("a", True))
    found = evaluate(model, tokenizer, strange, made.split(Example("a", " b")), length=32, batch=2)
    assert found.scores[""].score == 1.0 and found.rows[0][7] == 1.0
