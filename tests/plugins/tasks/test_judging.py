"""Generated answers: how they are parsed and scored."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolkit_plugins.tasks.gsm8k import number

from toolkit.interfaces import Answered, Example
from toolkit.registry import registry


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234", 1234),
        ("$5.", 5),
        ("5.00", 5),
        ("#### 18", 18),
        ("#### 1,000,000 dollars", 1_000_000),
        ("She has 3 apples and 4 pears.\n#### 7", 7),
        ("#### -12", -12),
        ("#### −12", -12),
        ("#### $-1.50", Decimal("-1.5")),
        ("#### -$3", -3),
        ("so 10-5", 5),
        ("1990-1995", 1995),
        ("The answer is: 42", 42),
        ("The answer is $\\boxed{18}$.", 18),
        ("The answer is 3.\nThe answer is 4 apples, not 9.", 4),
        ("#### 18\nThe answer is: 18", 18),
        ("#### .5", Decimal("0.5")),
        ("50%", 50),
        ("1,23", 23),
        ("no number", None),
        ("", None),
        ("#### nothing, but before it 6", 6),
        ("...", None),
    ],
)
def test_numbers(text, expected):
    assert number(text) == expected


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=2))
def test_a_number_is_found_as_it_is_written(value):
    for text in (f"#### {value}", f"so it is ${abs(value):,.2f}." if value >= 0 else f"The answer is {value:,.2f}."):
        assert number(text) == value


@pytest.mark.parametrize(
    ("text", "answered"),
    [
        ("2 + 2 = 4\n#### 1,234.00", Answered("1234", 1.0)),
        ("#### 1235", Answered("1235", 0.0)),
        ("I cannot say.", Answered(None, 0.0)),
    ],
)
def test_gsm8k_compares_numbers(text, answered):
    task = registry.make("task", "gsm8k")
    example = task.example({"question": "q", "answer": "#### 1,234"})
    assert task.judge(text, example) == answered


@pytest.mark.parametrize(
    ("response", "text", "answered"),
    [
        ("The answer is: 5.00", "#### 5", Answered("5", 1.0)),
        ("The answer is: \\frac{3}{4}", "thus The answer is: \\frac{3}{4}.", Answered("\\frac{3}{4}", 1.0)),
        ("The answer is: \\frac{3}{4}", "The answer is: 3", Answered("3", 0.0)),
        ("The answer is: \\frac{3}{4}", "3", Answered(None, 0.0)),
    ],
)
def test_metamathqa_compares_numbers_or_letters(response, text, answered):
    task = registry.make("task", "metamathqa")
    assert task.judge(text, task.example({"query": "q", "response": response})) == answered


@pytest.mark.parametrize(
    ("gold", "text", "answered"),
    [
        ("true", "the correct answer is true", Answered("true", 1.0)),
        ("true", "false, or is it true?", Answered("false", 0.0)),
        ("true", "It is untrue", Answered("true", 1.0)),  # as LLM-Adapters finds it, inside a word too
        ("true", "True", Answered(None, 0.0)),
        ("answer3", "the correct answer is answer3", Answered("answer3", 1.0)),
        ("answer3", "answer5", Answered("answer5", 0.0)),
        ("answer3", "answer: 3", Answered(None, 0.0)),
        ("solution2", "the correct answer is solution2\nsolution1", Answered("solution2", 1.0)),
        ("ending4", "ending4", Answered("ending4", 1.0)),
        ("option1", "option2", Answered("option2", 0.0)),
        ("option1", "", Answered(None, 0.0)),
    ],
)
def test_the_first_allowed_word_counts(gold, text, answered):
    example = Example("p", f"the correct answer is {gold}", references=(gold,))
    assert registry.make("task", "commonsense").judge(text, example) == answered


@pytest.mark.parametrize(
    ("text", "f1", "exact"),
    [
        ("the Norman conquest", 1.0, 1.0),  # articles, case and punctuation do not count
        ("conquest of England", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2), 0.0),
        ("1066", 1.0, 1.0),
        ("the battle", 0.0, 0.0),
    ],
)
def test_squad_takes_the_nearest_answer(text, f1, exact):
    task = registry.make("task", "squad")
    example = Example("p", " Norman Conquest", references=("Norman Conquest", "1066"))
    answered = task.judge(f" {text} ", example)
    assert answered.answer == text and answered.score == pytest.approx(f1, abs=1e-6)
    assert task.metrics([answered], [example])["exact match"] == exact


def test_squad_without_an_answer():
    task = registry.make("task", "squad")
    example = Example("p", " a", references=("a",))
    assert task.judge("  ", example) == Answered(None, 0.0)
    assert task.metrics([Answered(None, 0.0), Answered("a", 1.0)], [example] * 2) == {"exact match": 0.5}


def test_samsum_by_the_longest_common_subsequence():
    """F of 4 common words in order, of 5 said and of 6 in the reference."""
    task = registry.make("task", "samsum")
    example = Example("p", " x", references=("Ann will bring the blue umbrella",))
    answered = task.judge(" Ann will take the umbrella\n", example)
    precision, recall = 4 / 5, 4 / 6
    assert answered.answer == "Ann will take the umbrella"
    assert answered.score == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-6)
    assert task.judge("\n", example) == Answered(None, 0.0)
