"""One literal example a task, and its rows' wrong values. The rows here are made up."""

import pytest

from toolkit.errors import InputError
from toolkit.interfaces import Example

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
YES_NO = (" Yes", " No")

CASES = {
    "sst2": (
        {"sentence": "a warm film . ", "label": 1},
        Example("a warm film . It was", " great", (" terrible", " great"), 1),
    ),
    "rte": (
        {"premise": "It rained.", "hypothesis": "It was wet.", "label": "not_entailment"},
        Example('It rained.\nQuestion: Does this mean that "It was wet." is true?\nAnswer:', " No", YES_NO, 1),
    ),
    "boolq": (
        {"passage": "Rain -- Rain is wet.", "question": "is rain wet", "label": True},
        Example("Rain -- Rain is wet.\nQuestion: is rain wet?\nAnswer:", " Yes", YES_NO, 0),
    ),
    "wsc": (
        {"text": "Ann met Eve. She smiled.", "target": {"span1_text": "Ann", "span2_text": "She"}, "label": False},
        Example(
            'Ann met Eve. She smiled.\nQuestion: In the text above, does the pronoun "She" refer to "Ann"?\nAnswer:',
            " No",
            YES_NO,
            1,
        ),
    ),
    "wic": (
        {"word": "bank", "sentence1": "A river bank.", "sentence2": "A bank loan.", "label": False},
        Example(
            "Word: bank\nSentence 1: A river bank.\nSentence 2: A bank loan.\n"
            "Question: Does the word have the same meaning in both sentences?\nAnswer:",
            " No",
            YES_NO,
            1,
        ),
    ),
    "copa": (
        {"premise": "It rained.", "choice1": "I got wet.", "choice2": "The sun set.", "question": "effect", "label": 1},
        Example("It rained so", " the sun set.", (" I got wet.", " the sun set."), 1),
    ),
    "winogrande": (
        {"sentence": "Ann thanked Eve because _ had helped.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        Example("Sentence: Ann thanked Eve because", " Eve had helped.", (" Ann had helped.", " Eve had helped."), 1),
    ),
    "arc-easy": (
        {
            "question": "What is wet?",
            "choices": {"text": ["sand", "rain", "air"], "label": ["1", "2", "3"]},
            "answerKey": "2",
        },
        Example("Question: What is wet?\nAnswer:", " rain", (" sand", " rain", " air"), 1),
    ),
    "arc-challenge": (
        {"question": "What is wet?", "choices": ["sand", "rain"], "label": 1},
        Example("Question: What is wet?\nAnswer:", " rain", (" sand", " rain"), 1),
    ),
    "squad": (
        {
            "context": "Rain is wet.",
            "question": "What is wet?",
            "answers": {"text": ["Rain", "rain"], "answer_start": [0, 0]},
        },
        Example("Context: Rain is wet.\nQuestion: What is wet?\nAnswer:", " Rain", references=("Rain", "rain")),
    ),
    "samsum": (
        {"dialogue": "Ann: Hi!\r\nEve: Hi, rain today.", "summary": "It rains.\n"},
        Example("Dialogue:\nAnn: Hi!\nEve: Hi, rain today.\nSummary:", " It rains.", references=("It rains.",)),
    ),
    "scienceqa": (
        {"question": "What is wet?", "choices": ["sand", "rain"], "answer": 1, "hint": "It falls.", "image": None},
        Example("Question: What is wet?\nContext: It falls.\nA. sand\nB. rain\nAnswer:", " B", (" A", " B"), 1),
    ),
    "gsm8k": (
        {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
        Example(ALPACA.format("Two and two?"), "2 + 2 = 4\n#### 4", references=("4",)),
    ),
    "metamathqa": (
        {"query": "Two and two?", "response": "It is $4$.\nThe answer is: 4", "type": "GSM_Rephrased"},
        Example(ALPACA.format("Two and two?"), "It is $4$.\nThe answer is: 4", references=("4",)),
    ),
    "arithmetic": (
        {"left": 1, "operator": "+", "right": 2, "options": [2, 3, 4, 13], "gold": 1},
        Example("Question: what is 1 + 2?\nAnswer:", " 3", (" 2", " 3", " 4", " 13"), 1),
    ),
    "commonsense": (
        {
            "instruction": "Is rain wet?\n\nAnswer format: true/false",
            "input": "",
            "output": "the correct answer is true",
            "answer": "true",
        },
        Example(
            ALPACA.format("Is rain wet?\n\nAnswer format: true/false"),
            "the correct answer is true",
            ("the correct answer is true", "the correct answer is false"),
            0,
            references=("true",),
        ),
    ),
    "wikitext2": ({"text": " Rain . \n"}, Example("", " Rain . \n")),
}


@pytest.mark.parametrize("key", CASES)
def test_the_prompt_is_pinned(key, task):
    row, expected = CASES[key]
    made = task(key)
    assert all(column in row for column in made.columns)
    assert made.example(row) == expected


def test_every_task_has_its_prompt_pinned():
    from toolkit.registry import registry

    assert set(CASES) == {*registry.of_kind("task")} - {"lm-eval"}


WORDED = {
    "piqa": (
        {"goal": "stay dry", "sol1": "go out", "sol2": "stay in", "label": 1},
        "Please choose the correct solution to the question: stay dry\n\nSolution1: go out\n\nSolution2: stay in\n\n"
        "Answer format: solution1/solution2",
        "solution2",
    ),
    "social_i_qa": (
        {
            "context": "Ann sang.",
            "question": "Why?",
            "answerA": "joy",
            "answerB": "fear",
            "answerC": "rage",
            "label": "1",
        },
        "Please choose the correct answer to the question: Ann sang. Why?\n\n"
        "Answer1: joy Answer2: fear Answer3: rage\n\nAnswer format: answer1/answer2/answer3",
        "answer1",
    ),
    "hellaswag": (
        {
            "activity_label": "Rain",
            "ctx": "It rains. a man",
            "endings": ["runs.", "sits.", "eats.", "naps."],
            "label": "2",
        },
        "Please choose the correct ending to complete the given sentence: Rain: It rains. a man\n\n"
        "Ending1: runs. Ending2: sits. Ending3: eats. Ending4: naps.\n\nAnswer format: ending1/ending2/ending3/ending4",
        "ending3",
    ),
    "openbookqa": (
        {"question_stem": "Rain is", "choices": {"text": ["dry", "wet"], "label": ["A", "B"]}, "answerKey": "B"},
        "Please choose the correct answer to the question: Rain is\n\nAnswer1: dry Answer2: wet\n\n"
        "Answer format: answer1/answer2",
        "answer2",
    ),
}


@pytest.mark.parametrize("name", WORDED)
def test_original_rows_are_worded(name, task):
    row, instruction, answer = WORDED[name]
    example = task(f"commonsense(set={name})").example(row)
    assert example.prompt == ALPACA.format(instruction) and example.references == (answer,)


def test_an_input_stands_in_its_own_place(task):
    row = CASES["commonsense"][0] | {"input": "It falls."}
    assert task("commonsense").example(row).prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nIs rain wet?\n\nAnswer format: "
        "true/false\n\n### Input:\nIt falls.\n\n### Response:\n"
    )


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (
            "commonsense",
            {"answer": "maybe", "output": "the correct answer is maybe"},
            "found 'maybe'; .* allows true, false",
        ),
        ("commonsense", {"output": "true"}, "column 'output': found 'true'; 'the correct answer is true' is asked for"),
        ("rte", {"label": "entails"}, "found label 'entails'; allowed: 'entailment', 0, 'not_entailment', 1"),
        ("rte", {"label": True}, "found label True"),
        ("wsc", {"target": "Ann"}, "column 'target': found 'Ann'"),
        ("wsc", {"target": {"span1_text": "Ann"}}, "column 'span2_text': found None"),
        ("copa", {"question": "why"}, "found label 'why'; allowed: 'cause', 'effect'"),
        ("winogrande", {"sentence": "no blank"}, "exactly one blank"),
        ("winogrande", {"answer": ""}, "hidden"),
        ("arc-challenge", {"label": 2}, "found 2; a place from 0 to 1"),
        ("arc-easy", {"answerKey": "D"}, "found 'D'; the choices are called 1, 2, 3"),
        ("arc-easy", {"choices": "rain"}, "column 'choices': found 'rain'"),
        ("squad", {"answers": ["Rain"]}, "column 'answers': found"),
        ("gsm8k", {"answer": "I do not know"}, "ends in no number: 'I do not know'"),
        ("arithmetic", {"gold": 4}, "found label 4; allowed: 0, 1, 2, 3"),
        ("wikitext2", {"text": None}, "column 'text': found None"),
    ],
)
def test_values_that_no_row_may_hold(key, change, message, task):
    with pytest.raises(InputError, match=message):
        task(key).example(CASES[key][0] | change)


def test_rows_of_neither_schema(task):
    with pytest.raises(InputError, match=r"no column 'instruction' .* no row of piqa as on the Hub; there are: sent"):
        task("commonsense(set=piqa)").example({"sentence": "a"})


def test_unknown_sets_and_options(task):
    with pytest.raises(InputError, match="did you mean 'openbookqa'"):
        task("commonsense(set=openbook)")
    with pytest.raises(InputError, match="4 to 1000"):
        task("arithmetic(largest=3)")


def test_rows_with_an_image(task):
    row = CASES["scienceqa"][0]
    assert task("scienceqa").example(row | {"image": {"bytes": b"x"}}) is None
    assert task("scienceqa").example(row | {"has_image": True}) is None
    assert task("scienceqa(images=true)").example(row | {"image": b"x"}).images == (b"x",)


def test_a_dialogue_that_is_empty_cannot_be_used(task):
    assert task("samsum").example({"dialogue": "", "summary": "Nothing."}) is None


def test_the_hub_labels_of_superglue(task):
    assert task("rte").example(CASES["rte"][0] | {"label": 0}).target == " Yes"
    assert task("wic").example(CASES["wic"][0] | {"label": 1}).target == " Yes"
    assert task("boolq").example(CASES["boolq"][0] | {"label": 0}).target == " No"
    row = {"text": "Ann met Eve. She smiled.", "span1_text": "Ann", "span2_text": "She", "label": 1}
    assert task("wsc").example(row).target == " Yes"
