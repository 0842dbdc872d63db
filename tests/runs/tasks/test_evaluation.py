"""Scores: predictions, chance, flags and windows, against what can be counted by hand."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.interfaces import Example, Windows
from toolkit.records.trained import ROW
from toolkit.registry import registry
from toolkit.runs.tasks import check_task, evaluate, read
from toolkit.runs.tasks.encoding import encode
from toolkit.runs.tasks.summary import chance
from toolkit.runs.tasks.text import cut_text

DATA = Path(__file__).parents[3].parent / "shared" / "data"


def column(found, name):
    return [row[ROW.index(name)] for row in found.rows]


def choice(prompt, options, gold, group=""):
    return Example(prompt, options[gold], tuple(options), gold, group=group)


def nll(model, tokenizer, prompt, target, end=False):
    """One target alone, from the whole logits in float64."""
    ids = tokenizer(prompt + target)["input_ids"] + [1] * end
    start = len(ids) - len(target.encode()) - end
    with torch.inference_mode():
        logs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return -sum(logs[i - 1, ids[i]].item() for i in range(start, len(ids)))


ROWS = [
    choice("2 + 2 =", [" 4", " 5", " 777"], 0),
    choice("true or false?", [" true", " false"], 1),
    choice("what is it", [" Yes", " No", " great", " bad"], 3),
]


@pytest.mark.parametrize("batch", [1, 2, 50])
def test_options_are_compared_by_their_sums(model, tokenizer, made, batch):
    found = evaluate(model, tokenizer, made.Toy(), made.split(*ROWS), length=99, batch=batch)
    expected = [[nll(model, tokenizer, row.prompt, option) for option in row.options] for row in ROWS]
    for got, right in zip(column(found, "options"), expected, strict=True):
        assert got == pytest.approx(right, abs=1e-3)
    predictions = [values.index(min(values)) for values in expected]
    assert column(found, "prediction") == predictions and column(found, "gold") == [0, 1, 3]
    right = [float(p == g) for p, g in zip(predictions, [0, 1, 3], strict=True)]
    assert column(found, "score") == right
    golds = [values[row.gold] for values, row in zip(expected, ROWS, strict=True)]
    assert column(found, "nll") == pytest.approx(golds, abs=1e-3) and column(found, "tokens") == [2, 6, 4]
    scores = found.scores[""]
    assert scores.loss == pytest.approx(sum(golds) / 12, abs=1e-4)
    assert scores.score == sum(right) / 3 and scores.rows == 3 and scores.unparsed == 0
    assert scores.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3)


def test_an_option_that_begins_another_does_not_always_win(model, tokenizer, made):
    """Without the end of the text, " 1" is at least as likely as " 11" under every model."""
    row = choice("5 + 6 =", [" 1", " 11", " 13"], 1)
    found = evaluate(model, tokenizer, made.Toy(), made.split(row), length=99, batch=4)
    ended = [nll(model, tokenizer, row.prompt, option, end=True) for option in row.options]
    assert column(found, "options")[0] == pytest.approx(ended, abs=1e-3)
    assert column(found, "nll")[0] == pytest.approx(nll(model, tokenizer, row.prompt, " 11"), abs=1e-3)
    assert column(found, "tokens") == [3] and column(found, "prediction") == [ended.index(min(ended))]


def test_equal_options_go_to_the_first(model, tokenizer, made):
    found = evaluate(model, tokenizer, made.Toy(), made.split(choice("a", [" b", " b"], 1)), length=99, batch=4)
    assert column(found, "prediction") == [0] and column(found, "score") == [0.0]


def test_sets_are_scored_apart_and_together(model, tokenizer, made):
    rows = [choice("2 + 2 =", [" 4", " 5"], n % 2, group=g) for n, g in enumerate("aab")]
    found = evaluate(model, tokenizer, made.Toy(), made.split(*rows), length=99, batch=4)
    assert list(found.scores) == ["", "a", "b"] and [s.rows for s in found.scores.values()] == [3, 2, 1]
    nlls = column(found, "nll")
    assert found.scores["a"].loss == pytest.approx((nlls[0] + nlls[1]) / 4)
    assert found.scores["a"].score == 0.5 == found.scores["a"].chance
    reasons = [flag.reason for flag in found.flags if flag.check == "chance"]
    assert any("on a is not above chance (0.5000)" in reason for reason in reasons)


def test_generated_answers(model, tokenizer, made):
    from toolkit.runs.tasks.generating import generate

    prompts = ["a", "what is 12 + 30?", "2 + 2 =", "No"]
    ids = [tuple(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    answers = generate(model, tokenizer, ids, new_tokens=6, pad=1, batch=1)
    rows = [
        Example(prompt, f" {n}", references=(answer[0] if n < 2 else "?",))
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    for batch in (1, 3):
        found = evaluate(model, tokenizer, made.Generated(), made.split(*rows), length=99, batch=batch)
        assert column(found, "prediction") == [answer[0] for answer in answers]
        assert column(found, "score") == [1, 1, 0, 0] and column(found, "options") == [None] * 4
        right = [nll(model, tokenizer, prompt, f" {n}") for n, prompt in enumerate(prompts)]
        assert column(found, "nll") == pytest.approx(right, abs=1e-3) and column(found, "tokens") == [2] * 4
        assert found.scores[""].chance is None and found.scores[""].score == 0.5


def test_generated_answers_among_options_have_their_likelihoods_too(model, tokenizer, made):
    rows = [Example("2 + 2 =", " 4", (" 4", " 5"), 0, references=("x",))] * 3
    found = evaluate(model, tokenizer, made.Generated(), made.split(*rows), length=99, batch=4)
    right = [nll(model, tokenizer, "2 + 2 =", option) for option in (" 4", " 5")]
    assert column(found, "options")[2] == pytest.approx(right, abs=1e-3)
    scores = found.scores[""]
    assert scores.chance == 1 and scores.score == 0 and scores.constant
    assert {flag.check for flag in found.flags} == {"chance", "constant"}


def test_unparsed_answers_are_wrong_and_counted(made, tokenizer):
    silent = made.tiny()
    with torch.no_grad():  # the end of the text comes first, always
        silent.lm_head.weight.zero_()
        silent.model.norm.weight.zero_()
    silent.lm_head.bias = None
    rows = [Example("2 + 2 =", " 4", references=("4",))] * 4

    class Ends(made.Generated):
        def judge(self, text, example):
            answer = super().judge("", example)
            return answer

    found = evaluate(silent, tokenizer, Ends(), made.split(*rows), length=99, batch=4)
    assert column(found, "parsed") == [False] * 4 and found.scores[""].unparsed == 1
    assert found.scores[""].score == 0 and not found.scores[""].constant
    assert [f.reason for f in found.flags if f.check == "unparsed"] == [
        "100.0% of the answers could not be parsed, and count as wrong"
    ]


def test_rows_that_do_not_fit_are_left_out_and_counted(model, tokenizer, made):
    rows = [choice("p" * 30, [" a", " b"], 0), choice("p", [" a", " b" * 20], 0)]
    found = evaluate(model, tokenizer, made.Toy(), made.split(*rows), length=20, batch=4)
    assert found.cut == 1 and column(found, "row") == [0] and len(found.rows) == 1
    reasons = {flag.check: flag.reason for flag in found.flags}
    assert "1 scored rows were left out" in reasons["dropped"] and "prompts of 1 scored rows" in reasons["shortened"]
    with pytest.raises(InputError, match="none of 1 rows has a target that fits into a length of 5"):
        evaluate(model, tokenizer, made.Toy(), made.split(rows[1]), length=5, batch=4)


def test_too_long_for_the_model(made, tokenizer):
    model = made.tiny(context=32)
    with pytest.raises(InputError, match=r"30 tokens and 6 generated ones .* at most 32"):
        evaluate(model, tokenizer, made.Generated(), made.split(Example("a", "b")), length=30, batch=1)
    with pytest.raises(InputError, match=r"task wikitext2\(window=40\): length: 40 tokens .* at most 32"):
        check_task(model, registry.make("task", "wikitext2(window=40)"), 16)
    check_task(model, registry.make("task", "wikitext2(window=32)"), 16)
    check_task(model, made.Toy(), 32)
    with pytest.raises(InputError, match="batch: 0"):
        evaluate(model, tokenizer, made.Toy(), made.split(*ROWS), length=30, batch=0)


def test_progress_reaches_all_rows(model, tokenizer, made):
    told = []
    rows = [Example("2 + 2 =", " 4", references=("4",))] * 5
    evaluate(
        model, tokenizer, made.Generated(), made.split(*rows), length=99, batch=2, progress=lambda *t: told.append(t)
    )
    assert told[-1] == (10, 10) and told == sorted(told)


# chance


def test_chance_of_wsc_validation_is_always_saying_no(model, tokenizer):
    if not DATA.is_dir():
        pytest.skip("needs the real rows in ../shared/data")
    split = read(registry.make("task", "wsc"), "test", source=str(DATA / "wsc"))
    assert chance(split.examples) == 66 / 104
    assert round(chance(split.examples), 3) == 0.635


def test_a_model_that_always_says_no_is_flagged_on_wsc(made, tokenizer):
    if not DATA.is_dir():
        pytest.skip("needs the real rows in ../shared/data")
    split = read(registry.make("task", "wsc"), "test", source=str(DATA / "wsc"))
    model = made.tiny()
    letter = tokenizer(" No")["input_ids"][1]
    with torch.no_grad():  # every position prefers the letter N
        model.lm_head.weight.zero_()
        model.lm_head = torch.nn.Linear(32, 258)
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()
        model.lm_head.bias[letter] = 50.0
    found = evaluate(model, tokenizer, registry.make("task", "wsc"), split, length=512, batch=52)
    scores = found.scores[""]
    assert scores.score == scores.chance == 66 / 104 and scores.constant
    assert [flag.check for flag in found.flags][:2] == ["chance", "constant"]


def test_chance_counts_classes_by_text_where_options_are_fixed_though_their_order_is_not():
    rows = [
        choice("a", ["x", "y"], 0),
        choice("b", ["y", "x"], 1),
        choice("c", ["x", "y"], 0),
        choice("d", ["x", "y"], 1),
    ]
    assert chance(rows) == 0.75  # x, x, x, y; by place it would be 0.5


def test_chance_counts_places_where_options_differ():
    rows = [choice("a", ["x", "y", "z"], 2), choice("b", ["u", "v", "w"], 2), choice("c", ["r", "s", "t"], 0)]
    assert chance(rows) == pytest.approx(2 / 3)


@given(st.lists(st.tuples(st.integers(2, 5), st.integers(0, 4)), min_size=1, max_size=30))
def test_chance_is_never_below_uniform_or_any_constant_guess(rows):
    examples = [choice("p", [f"{n} {k}" for k in range(count)], gold % count) for n, (count, gold) in enumerate(rows)]
    uniform = sum(1 / count for count, _ in rows) / len(rows)
    guesses = [sum(gold % count == place for count, gold in rows) / len(rows) for place in range(5)]
    assert chance(examples) >= max(uniform, *guesses) - 1e-12
    if len(rows) > 1:
        assert chance(examples) == pytest.approx(max(uniform, *guesses))


# running text


def test_windows_score_each_token_once(tokenizer):
    text = "".join(chr(97 + n % 26) for n in range(50))
    plain = cut_text(tokenizer, text, Windows(10, 10), None, "t")
    assert len(plain) == 5 and [window.tokens for window in plain] == [9] * 5
    overlapping = cut_text(tokenizer, text, Windows(10, 4), None, "t")
    assert [window.tokens for window in overlapping] == [9] + [4] * 10
    scored = [
        (4 * n + place) for n, window in enumerate(overlapping) for place, wanted in enumerate(window.target) if wanted
    ]
    assert scored == list(range(1, 50))
    assert len(cut_text(tokenizer, text, Windows(10, 10), 3, "t")) == 3


def test_windows_may_begin_with_the_beginning_of_text(merged):
    text = "what is 12 + 30? " * 20
    ids = merged(text, add_special_tokens=False)["input_ids"]
    windows = cut_text(merged, text, Windows(9, 9, bos=True), None, "t")
    assert all(window.ids[0] == merged.bos_token_id and window.tokens == 8 for window in windows)
    assert [token for window in windows for token in window.ids[1:]] == ids[: 8 * len(windows)]


def test_bad_windows(tokenizer):
    with pytest.raises(InputError, match="windows of 10 tokens with a stride of 11"):
        cut_text(tokenizer, "a" * 50, Windows(10, 11), None, "t")
    with pytest.raises(InputError, match="has 5 tokens, less than one window of 10"):
        cut_text(tokenizer, "a" * 5, Windows(10, 10), None, "t")
    with pytest.raises(InputError, match="no beginning-of-text token"):
        cut_text(tokenizer, "a" * 50, Windows(10, 10, bos=True), None, "t")


def test_perplexity_with_its_windows(model, tokenizer, tmp_path, made):
    lines = ["", " = Title = \n", "", " what is it that is great ? \n"]
    made.lines(tmp_path / "test.jsonl", [{"text": line} for line in lines])
    task = registry.make("task", "wikitext2(window=8,stride=5)")
    split = read(task, "test", source=str(tmp_path), limit=4)
    assert [example.target for example in split.examples] == [line or " \n" for line in lines]
    found = evaluate(model, tokenizer, task, split, length=99, batch=3)
    text = "".join(line or " \n" for line in lines)
    ids = tokenizer(text)["input_ids"]
    total, count = 0.0, 0
    for n in range(4):
        part = ids[5 * n : 5 * n + 8]
        with torch.inference_mode():
            logs = torch.log_softmax(model(torch.tensor([part])).logits[0].double(), -1)
        places = range(1 if n == 0 else 3, 8)
        total -= sum(logs[i - 1, part[i]].item() for i in places)
        count += len(places)
    scores = found.scores[""]
    assert len(found.rows) == 4 and scores.score is None and scores.chance is None and not scores.constant
    assert scores.loss == pytest.approx(total / count, abs=1e-4)
    assert scores.further["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-3)
    assert (scores.further["window"], scores.further["stride"], scores.further["bos"]) == (8, 5, 0)
    assert scores.further["tokens"] == count == sum(column(found, "tokens"))
    assert found.flags == []


def test_the_gold_loss_is_what_training_calls_it(model, tokenizer, made):
    """Less the end-of-text token, which training also teaches."""
    found = evaluate(model, tokenizer, made.Toy(), made.split(ROWS[0]), length=99, batch=1)
    encoded = encode(tokenizer, ROWS[0], 99)
    labels = [t if wanted and t != 1 else -100 for t, wanted in zip(encoded.ids, encoded.target, strict=True)]
    with torch.inference_mode():
        loss = model(torch.tensor([encoded.ids]), labels=torch.tensor([labels])).loss.item()
    assert found.scores[""].loss == pytest.approx(loss, rel=1e-4)
