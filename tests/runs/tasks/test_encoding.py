"""Encoding: which tokens are predicted, what is cut, what is refused."""

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.interfaces import Example
from toolkit.runs.tasks.encoding import check_length, encode, encode_options, encode_prompt, padding

LETTERS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30)


def texts(tokenizer, encoded):
    """What is not predicted, and what is."""
    return tokenizer.decode(encoded.ids[: encoded.start]), tokenizer.decode(encoded.ids[encoded.start :])


def test_one_text_one_end(tokenizer):
    encoded = encode(tokenizer, Example("2 + 2 =", " 4"), 100)
    assert texts(tokenizer, encoded) == ("2 + 2 =", " 4</s>")
    assert encoded.tokens == 3 and encoded.ids[-1] == tokenizer.eos_token_id == 1


def test_the_end_is_predicted_although_it_is_the_padding(tokenizer):
    assert padding(tokenizer) == tokenizer.eos_token_id
    assert encode(tokenizer, Example("a", "b"), 9).target == (False, True, True)


@given(prompt=LETTERS, target=LETTERS)
def test_a_byte_tokenizer_predicts_the_bytes_of_the_target(tokenizer, prompt, target):
    encoded = encode(tokenizer, Example(prompt, target), 10_000)
    count = len(target.encode())
    if count == 0 or (not prompt and count == 0):
        assert encoded is None
        return
    first_is_lost = not prompt  # nothing stands before it
    assert encoded.tokens == count - first_is_lost + 1
    assert len(encoded.ids) == len((prompt + target).encode()) + 1


PIECES = "ab 12=:\nYesNo"


@pytest.mark.parametrize("which", ["merged", "worded"])
@given(prompt=st.text(PIECES, max_size=20), target=st.text(PIECES, min_size=1, max_size=20))
@hypothesis.example(prompt="e", target="s")
def test_tokens_belong_to_the_target_that_they_reach_into(which, merged, worded, prompt, target):
    """Against the tokens' own texts: the unpredicted ones end at or before the boundary, the next one ends after it."""
    tokenizer = {"merged": merged, "worded": worded}[which]
    encoded = encode(tokenizer, Example(prompt, target), 10_000)
    before, after = texts(tokenizer, encoded)
    before, after = before.removeprefix("<s>"), after.removesuffix("</s>")
    assert before + after == prompt + target
    if which == "worded" and len(tokenizer.decode(encoded.ids[:1])) > len(prompt):  # nothing stands before that token
        assert encoded.start == 1
        return
    assert len(before) <= len(prompt)
    first = tokenizer.decode(encoded.ids[encoded.start : encoded.start + 1])
    assert len(before) + len(first) > len(prompt)


def test_a_token_over_the_boundary_is_met_as_in_running_text(merged):
    """Apart, "Answer:" and " 42" give other tokens than the text that a model reads."""
    whole = merged("what is 12 + 30?\nAnswer: 42")["input_ids"]
    encoded = encode(merged, Example("what is 12 + 30?\nAnswer", ": 42"), 100)
    assert list(encoded.ids) == [*whole, 1]
    apart = merged("what is 12 + 30?\nAns", add_special_tokens=False)["input_ids"]
    apart += merged("wer: 42", add_special_tokens=False)["input_ids"]
    assert apart != whole[1:]  # the case is real


def test_tokenizers_that_add_an_end_themselves_do_not_end_twice(made):
    from tokenizers import processors

    tokenizer = made.byte_level(0)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    assert tokenizer("ab")["input_ids"][-1] == 1
    encoded = encode(tokenizer, Example("a", "b"), 9)
    assert encoded.ids.count(1) == 1 and encoded.target == (False, True, True)
    assert encode_prompt(tokenizer, "ab", 9)[0].count(1) == 0


def test_without_an_end_of_text_token_none_is_taught(made):
    tokenizer = made.byte_level(0)
    tokenizer.eos_token = None
    assert encode(tokenizer, Example("a", "bc"), 9).target == (False, True, True)


@pytest.mark.parametrize("which", ["tokenizer", "merged"])
def test_the_prompt_loses_its_beginning_and_the_target_nothing(which, request):
    tokenizer = request.getfixturevalue(which)
    example = Example("0123456789" * 3, " the answer")
    whole = encode(tokenizer, example, 1000)
    bos = int(which == "merged")
    for length in range(len(whole.ids), 0, -1):
        encoded = encode(tokenizer, example, length)
        if encoded is None:
            assert length < whole.tokens + 1 + bos
            continue
        assert len(encoded.ids) == length and encoded.shortened == len(whole.ids) - length
        assert encoded.ids[encoded.start :] == whole.ids[whole.start :]
        assert encoded.ids[:bos] == whole.ids[:bos]
    assert encode(tokenizer, example, whole.tokens + bos + 1 - bos - 1) is None


def test_options_of_a_row_follow_the_same_prompt(tokenizer):
    short, long = encode_options(tokenizer, "0123456789", [" a", " abcdef"], 12)
    assert short.shortened == long.shortened == 5
    assert texts(tokenizer, short) == ("56789", " a") and texts(tokenizer, long) == ("56789", " abcdef")
    assert encode_options(tokenizer, "01", [" a", " abcdef"], 7) == [None, None]


def test_generation_prompts_are_cut_alike(merged):
    ids, lost = encode_prompt(merged, "0123456789", 4)
    assert merged.decode(ids) == "<s>789" and lost == 7


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="Slow gives no character offsets"):
        encode(Slow(), Example("a", "b"), 9)


def test_images_are_refused(tokenizer):
    with pytest.raises(InputError, match="1 images"):
        encode(tokenizer, Example("a", "b", images=(b"",)), 9)


def test_padding_is_the_first_that_there_is(made):
    tokenizer = made.byte_level(0)
    tokenizer.pad_token = "a"
    assert padding(tokenizer) == tokenizer.convert_tokens_to_ids("a")
    tokenizer.pad_token = tokenizer.eos_token = None
    assert padding(tokenizer) == 0


def test_more_tokens_than_the_model_reads(made):
    model = made.tiny(context=64)
    check_length(model, 64)
    with pytest.raises(InputError, match=r"65 tokens .* at most 64; give a length of at most 64"):
        check_length(model, 65)
    with pytest.raises(InputError, match=r"60 tokens and 5 generated ones .* at most 64; give a length of at most 59"):
        check_length(model, 60, 5)


HOSTILE = "one</s>two<s>three"


@pytest.mark.parametrize("which", ["tokenizer", "merged", "worded"])
def test_the_letters_of_a_special_token_in_a_row_are_letters(which, tokenizer, merged, worded):
    used = {"tokenizer": tokenizer, "merged": merged, "worded": worded}[which]
    special = {used.convert_tokens_to_ids("<s>"), used.convert_tokens_to_ids("</s>")}
    leading = 1 if used.bos_token_id is not None else 0
    assert special & set(used(HOSTILE)["input_ids"][leading:])  # what would happen otherwise
    encoded = encode(used, Example(HOSTILE, HOSTILE), 200)
    assert not special & set(encoded.ids[leading:-1]) and encoded.ids[-1] == used.eos_token_id
    assert used.decode(encoded.ids[leading:-1]) == HOSTILE * 2
    assert len(used.decode(encoded.ids[leading : encoded.start])) <= len(HOSTILE)
    for option in encode_options(used, HOSTILE, [" </s>", " <s>"], 200):
        assert not special & set(option.ids[leading:])
    prompt, _ = encode_prompt(used, HOSTILE, 200)
    assert not special & set(prompt[leading:]) and used.decode(prompt[leading:]) == HOSTILE
    assert special & set(used(HOSTILE)["input_ids"][leading:])  # the tokenizer is left as it was
