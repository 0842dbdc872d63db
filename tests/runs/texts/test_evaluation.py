"""Evaluation: sums against float64 arithmetic written out, whatever the batch, the chunk and the memory."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toolkit.errors import InputError, RunError
from toolkit.runs.texts.evaluation import Evaluation, WindowScore, total, window_scores

VOCABULARY, WINDOW = 37, 19


class Table(nn.Module):
    """A model whose logits depend on the present token alone: row x of a table."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter((3 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)).to(dtype))

    def forward(self, input_ids, use_cache):
        assert use_cache is False
        return SimpleNamespace(logits=self.table[input_ids])


def ids(windows: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (windows, WINDOW), generator=torch.Generator().manual_seed(seed))


def by_hand(q_table: torch.Tensor, p_table: torch.Tensor, window: torch.Tensor) -> tuple[float, float, int]:
    """Token by token in Python floats."""
    nll = kl = 0.0
    top = 0
    for x, target in zip(window[:-1].tolist(), window[1:].tolist(), strict=True):
        q, p = q_table[x].tolist(), p_table[x].tolist()
        zq, zp = (max(v) + math.log(sum(math.exp(a - max(v)) for a in v)) for v in (q, p))
        nll -= q[target] - zq
        kl += sum(math.exp(b - zp) * ((b - zp) - (a - zq)) for a, b in zip(q, p, strict=True))
        top += q[p.index(max(p))] == max(q)
    return nll, kl, top


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("chunk", [VOCABULARY, 4 * VOCABULARY, 10**6])
def test_sums_are_those_of_the_equations(dtype, batch, chunk):
    model, other = Table(dtype), Table(dtype, seed=1).table.data
    evaluation = Evaluation(model, {"a": ids(5), "b": ids(2, seed=8)}, batch=batch)
    evaluation._chunk = chunk
    reference = model.table.data.clone()
    first = evaluation.keep_reference()
    model.table.data = other
    second = evaluation.measure()
    for name, windows in (("a", ids(5)), ("b", ids(2, seed=8))):
        for at, window in enumerate(windows):
            for found, table in ((first, reference), (second, other)):
                nll, kl, top = by_hand(table.double(), reference.double(), window)
                assert found[name][at, 0].item() == pytest.approx(nll, rel=2e-6)
                assert found[name][at, 1].item() == pytest.approx(kl, rel=2e-5, abs=2e-5)
                assert found[name][at, 2].item() == top
    assert second["a"][:, 1].min() > 1  # the two tables differ


def test_the_reference_against_itself_is_exactly_nothing():
    evaluation = Evaluation(Table(), {"a": ids(3)}, batch=2)
    evaluation.keep_reference()
    scores = window_scores(evaluation.measure(), {"a": WINDOW})["a"]
    assert [(w.tokens, w.kl, w.top) for w in scores] == [(WINDOW - 1, 0.0, WINDOW - 1)] * 3


@pytest.mark.parametrize("memory", [0, 2 * WINDOW * VOCABULARY * 4, 10**9])
def test_reference_beyond_its_memory_is_recomputed_and_counted(memory):
    model = Table()
    reference, other = model.table.data, Table(seed=1).table.data

    @contextlib.contextmanager
    def sixteen_bit():
        model.table.data = reference
        yield
        model.table.data = other

    evaluation = Evaluation(model, {"a": ids(6)}, batch=2, reference_memory=memory)
    evaluation.keep_reference()
    model.table.data = other
    found = evaluation.measure(sixteen_bit)["a"]
    assert evaluation.recomputed == {0: 3, 2 * WINDOW * VOCABULARY * 4: 2, 10**9: 0}[memory]
    full = Evaluation(model, {"a": ids(6)}, batch=2)
    model.table.data = reference
    full.keep_reference()
    model.table.data = other
    assert torch.equal(found, full.measure()["a"])
    if memory == 0:
        with pytest.raises(RunError, match="did not fit"):
            evaluation.measure()


def test_measuring_before_the_reference_is_refused():
    with pytest.raises(RunError, match="reference is measured first"):
        Evaluation(Table(), {"a": ids(1)}, batch=1).measure()


def test_windows_longer_than_the_model_reads_are_refused():
    model = Table()
    model.config = SimpleNamespace(max_position_embeddings=WINDOW - 1)
    with pytest.raises(InputError, match=f"windows of {WINDOW} tokens on text 'a': the model reads at most"):
        Evaluation(model, {"a": ids(1)}, batch=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error(bad):
    values = torch.tensor([[1.0, 2.0, 3.0], [1.0, bad, 3.0]], dtype=torch.float64)
    with pytest.raises(RunError, match=r"text 'a', window 1, is not finite"):
        window_scores({"a": values}, {"a": 4})


def test_total_divides_sums_by_tokens():
    score = total([WindowScore(3, 6.0, 0.3, 2), WindowScore(7, 9.0, 0.2, 7)])
    assert (score.tokens, score.loss, score.agreement) == (10, 1.5, 0.9)
    assert score.kl == pytest.approx(0.05)
    assert score.perplexity == pytest.approx(4.4816890703)


def test_loss_is_that_of_transformers(checkpoints):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.float32).eval()
    windows = torch.randint(0, 256, (3, 33), generator=torch.Generator().manual_seed(0))
    evaluation = Evaluation(model, {"a": windows}, batch=2)
    score = total(window_scores(evaluation.keep_reference(), {"a": 33})["a"])
    with torch.inference_mode():
        expected = model(input_ids=windows, labels=windows).loss.item()
    assert score.loss == pytest.approx(expected, rel=1e-5)
