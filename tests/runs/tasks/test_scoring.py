"""Likelihoods of targets, against each sequence alone in float64."""

import dataclasses

import pytest
import torch

from toolkit.errors import InputError, RunError
from toolkit.interfaces import Example
from toolkit.runs.tasks.encoding import Encoded, encode, encode_options
from toolkit.runs.tasks.scoring import Halvings, _batches, _Context, _contexts, nlls

PROMPTS = ["2 + 2 =", "what is 12 + 30?\nAnswer:", "a", "Question: what is the correct answer, true or false?"]
OPTIONS = [" 4", " 42 Yes", " No", " the answer", " 5"]


def alone(model, encoded):
    """Σ −log q of the targets of one sequence, from the whole logits, in float64."""
    double = model.double()
    with torch.inference_mode():
        logits = double(torch.tensor([encoded.ids])).logits[0]
    model.float()
    logs = torch.log_softmax(logits, -1)
    return -sum(logs[i - 1, token].item() for i, token in enumerate(encoded.ids) if encoded.target[i])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_sums_equal_each_sequence_alone(made, tokenizer, family, batch):
    model = made.tiny(family)
    rows = [encode_options(tokenizer, prompt, OPTIONS, 200) for prompt in PROMPTS]
    expected = [[alone(model, option) for option in row] for row in rows]
    found = nlls(model, rows, pad=1, batch=batch)
    for got, right in zip(found, expected, strict=True):
        assert got == pytest.approx(right, abs=2e-4)


def test_they_are_what_transformers_calls_the_loss(model, tokenizer):
    encoded = encode(tokenizer, Example(PROMPTS[1], " 42"), 200)
    labels = [token if wanted else -100 for token, wanted in zip(encoded.ids, encoded.target, strict=True)]
    with torch.inference_mode():
        mean = model(torch.tensor([encoded.ids]), labels=torch.tensor([labels])).loss.item()
    assert nlls(model, [[encoded]], pad=1, batch=1)[0][0] == pytest.approx(mean * encoded.tokens, rel=1e-5)


def test_what_fills_a_batch_changes_nothing(model, tokenizer):
    rows = [encode_options(tokenizer, prompt, OPTIONS, 200) for prompt in PROMPTS]
    assert nlls(model, rows, pad=1, batch=64) == nlls(model, rows, pad=77, batch=64)


def test_bfloat16_is_near(made, tokenizer):
    rows = [encode_options(tokenizer, prompt, OPTIONS, 200) for prompt in PROMPTS]
    exact = nlls(made.tiny(), rows, pad=1, batch=8)
    rough = nlls(made.tiny(dtype=torch.bfloat16), rows, pad=1, batch=8)
    for a, b in zip(exact, rough, strict=True):
        assert b == pytest.approx(a, rel=0.05)


def test_options_of_one_token_share_one_context():
    row = [Encoded((5, 6, token), (False, False, True)) for token in (1, 2, 3)]
    longer = Encoded((5, 6, 1, 9), (False, False, True, True))
    contexts, count = _contexts([[*row, longer]])
    assert count == 4 and [context.ids for context in contexts] == [(5, 6, 1)]
    assert sorted(contexts[0].asked) == [(1, 1, 0), (1, 1, 3), (1, 2, 1), (1, 3, 2), (2, 9, 3)]


def test_contexts_are_not_shared_between_rows():
    row = [Encoded((5, 6, 1), (False, False, True))]
    assert len(_contexts([row, row])[0]) == 2


def test_a_pass_holds_no_more_logits_than_it_may():
    contexts = [_Context(tuple(range(n)), [(n - 1, 0, n), (n - 3, 0, n)]) for n in range(40, 4, -1)]
    found = list(_batches(contexts, 8, 24))
    assert [context for chosen in found for context in chosen] == contexts
    for chosen in found:
        places = [position for context in chosen for position, *_ in context.asked]
        assert len(chosen) <= 8 and len(chosen) * (max(places) - min(places) + 1) <= 24
    assert [len(chosen) for chosen in _batches(contexts, 8, 1)] == [1] * 36
    assert [len(chosen) for chosen in _batches(contexts, 8, 10**9)] == [8] * 4 + [4]


def test_a_model_without_chosen_logits_gives_the_same(model, tokenizer):
    rows = [encode_options(tokenizer, prompt, OPTIONS, 200) for prompt in PROMPTS]

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, attention_mask, use_cache):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    for a, b in zip(nlls(Plain(), rows, pad=1, batch=8), nlls(model, rows, pad=1, batch=8), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_a_batch_that_does_not_fit_is_halved(made, tokenizer):
    """The device's error is raised here by a hook: no device is filled."""
    model = made.tiny()
    rows = [encode_options(tokenizer, prompt, OPTIONS, 200) for prompt in PROMPTS]
    right = nlls(model, rows, pad=1, batch=64)

    def full(_, given):
        if given["input_ids"].shape[0] > 5:
            raise torch.cuda.OutOfMemoryError("simulated")

    handle = model.register_forward_pre_hook(lambda module, args, kwargs: full(module, kwargs), with_kwargs=True)
    halvings = Halvings()
    found = nlls(model, rows, pad=1, batch=64, halvings=halvings)
    handle.remove()
    assert halvings.count > 0
    for a, b in zip(found, right, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_one_row_that_does_not_fit_is_an_error(made, tokenizer):
    model = made.tiny()

    def full(*_):
        raise torch.cuda.OutOfMemoryError("simulated")

    model.register_forward_pre_hook(full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        nlls(model, [encode_options(tokenizer, "a", [" b", " c"], 20)], pad=1, batch=4)


def test_a_loss_that_is_not_finite_is_an_error(made, tokenizer):
    model = made.tiny()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(RunError, match="scored row 0 is not finite"):
        nlls(model, [encode_options(tokenizer, "a", [" b", " c"], 20)], pad=1, batch=4)


def test_the_mode_is_restored_and_no_gradient_is_kept(made, tokenizer):
    model = made.tiny().train()
    nlls(model, [[dataclasses.replace(encode(tokenizer, Example("a", "b"), 9))]], pad=1, batch=1)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.gpu
def test_a_gpu_finds_the_same(made, tokenizer):
    rows = [encode_options(tokenizer, prompt, OPTIONS, 200) for prompt in PROMPTS]
    expected = nlls(made.tiny(), rows, pad=1, batch=8)
    for a, b in zip(nlls(made.tiny().cuda(), rows, pad=1, batch=8), expected, strict=True):
        assert a == pytest.approx(b, abs=1e-2)


def test_a_token_that_the_model_does_not_know_is_named(made):
    encoded = Encoded((5, 9, 258), (False, False, True))
    with pytest.raises(InputError, match=r"token id 258, and the model has embeddings for 258 tokens \(0 to 257\)"):
        nlls(made.tiny(), [[encoded]], pad=0, batch=1)
