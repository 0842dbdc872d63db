"""Greedy answers: the same in every batch, and those of one row alone."""

import pytest
import torch
from transformers import GenerationConfig

from toolkit.runs.tasks.encoding import encode_prompt
from toolkit.runs.tasks.generating import generate
from toolkit.runs.tasks.scoring import Halvings

PROMPTS = [
    "a",
    "what is 12 + 30?",
    "2 + 2 =",
    "Question: true or false? The answer is",
    "No",
    "Yes Yes Yes Yes No",
    "b",
    "7",
]


def ids(tokenizer):
    return [encode_prompt(tokenizer, prompt, 100)[0] for prompt in PROMPTS]


def alone(model, prompt, count, end=1):
    """Greedy decoding without cache, mask or padding: the whole sequence again for each token."""
    known = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            token = model(torch.tensor([known])).logits[0, -1].argmax().item()
        if token == end:
            break
        known.append(token)
    return known[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_answer_does_not_depend_on_the_batch(made, tokenizer, family):
    model = made.tiny(family)
    prompts = ids(tokenizer)
    expected = [tokenizer.decode(alone(model, prompt, 12), skip_special_tokens=True) for prompt in prompts]
    assert len(set(expected)) > 3  # they differ, so that a mix-up would show
    for batch in (1, 3, 8):
        assert generate(model, tokenizer, prompts, new_tokens=12, pad=1, batch=batch) == expected
    assert generate(model, tokenizer, prompts[::-1], new_tokens=12, pad=50, batch=8) == expected[::-1]


def test_stop_texts_end_an_answer(made, tokenizer):
    model = made.tiny()
    prompts = ids(tokenizer)
    whole = generate(model, tokenizer, prompts, new_tokens=12, pad=1, batch=8)
    mark = whole[1][2:4]
    found = generate(model, tokenizer, prompts, new_tokens=12, stop=(mark,), pad=1, batch=8)
    assert found == [text.partition(mark)[0] for text in whole]
    assert len(found[1]) <= 2


def test_the_checkpoints_own_settings_do_not_count(made, tokenizer):
    model = made.tiny()
    prompts = ids(tokenizer)
    right = generate(model, tokenizer, prompts, new_tokens=12, pad=1, batch=8)
    own = GenerationConfig(repetition_penalty=9.0, do_sample=True, temperature=5.0, bad_words_ids=[[3], [40]])
    model.generation_config = own
    model.config.use_cache = False  # as training with checkpointing leaves it
    assert generate(model, tokenizer, prompts, new_tokens=12, pad=1, batch=8) == right
    assert model.generation_config is own


def test_a_batch_that_does_not_fit_is_halved(made, tokenizer):
    """The device's error is raised here by a hook: no device is filled."""
    model = made.tiny()
    prompts = ids(tokenizer)
    right = generate(model, tokenizer, prompts, new_tokens=6, pad=1, batch=8)

    def full(_, args, kwargs):
        if kwargs["input_ids"].shape[0] > 2:
            raise torch.cuda.OutOfMemoryError("simulated")

    handle = model.register_forward_pre_hook(full, with_kwargs=True)
    halvings = Halvings()
    assert generate(model, tokenizer, prompts, new_tokens=6, pad=1, batch=8, halvings=halvings) == right
    handle.remove()
    assert halvings.count == 3


@pytest.mark.gpu
def test_an_answer_does_not_depend_on_the_batch_on_a_gpu(made, tokenizer):
    model = made.tiny().cuda()
    prompts = ids(tokenizer)
    right = generate(model, tokenizer, prompts, new_tokens=12, pad=1, batch=1)
    for batch in (3, 8):
        assert generate(model, tokenizer, prompts, new_tokens=12, pad=1, batch=batch) == right
