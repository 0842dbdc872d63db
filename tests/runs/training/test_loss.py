"""The target-token loss and its gradient against the whole sequence's, masked, one example at a time, in float64."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import trainer
from toolkit.runs.training.batches import collate
from toolkit.runs.training.loss import TargetLoss


def by_hand(model, data):
    """Σ −log p over the target tokens of unpadded examples, each in its own forward pass, with the stock mask."""
    total, count = 0.0, 0
    for row in data:
        ids = torch.tensor([row.ids])
        scores = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].log_softmax(-1)
        for at in range(1, len(row.ids)):
            if row.target[at]:
                total = total - scores[at - 1, row.ids[at]]
                count += 1
    return total / count, count


def double(dense, family):
    model = dense(family, 3).double()
    names = {"llama": ["q_proj", "down_proj"], "phi3": ["qkv_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}[family]
    torch.manual_seed(3)
    config = LoraConfig(r=3, lora_alpha=8, target_modules=names, fan_in_fan_out=family == "gpt2")
    model = get_peft_model(model, config, autocast_adapter_dtype=False).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_loss_and_gradient_equal_those_of_single_examples(dense, rows, family):
    data = rows(7)
    model = double(dense, family)
    expected, count = by_hand(model, data)
    expected.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    oracle = {n: p.grad.clone() for n, p in trained.items()}
    model.zero_grad()

    loss = TargetLoss(model)
    total = 0.0
    for at in (0, 3, 5):  # micro-batches of 3, 2 and 2 examples, and of different numbers of targets
        micro = data[at : at + (3 if at == 0 else 2)]
        value = loss(model, collate(micro, pad=0), count)
        value.backward()
        total += value.item()
    assert total == pytest.approx(expected.item(), rel=1e-6)  # the loss itself is taken in float32
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, oracle[name], rtol=2e-5, atol=1e-8)


def test_only_the_target_positions_reach_the_head(dense, rows):
    model = dense()
    loss, seen = TargetLoss(model), []
    model.lm_head.register_forward_hook(lambda m, args, output: seen.append(tuple(output.shape)))
    data = rows(5)
    loss(model, collate(data, pad=0), 1)
    assert seen == [(1, sum(sum(row.target) for row in data), 64)]
    ids = torch.tensor([data[0].ids])
    assert model(input_ids=ids).logits.shape[1] == len(data[0].ids)  # evaluation sees all
    loss.remove()
    assert not model.lm_head._forward_pre_hooks


def test_a_head_of_another_form_is_chosen_from_afterwards(dense, rows):
    model, data = dense(), rows(5)
    batch = collate(data, pad=0)
    loss = TargetLoss(model)
    chosen = loss(model, batch, 3)
    loss.remove()
    torch.testing.assert_close(loss(model, batch, 3), chosen)  # without its hook


def test_an_empty_micro_batch_adds_nothing(dense, rows):
    model = double(dense, "llama")
    loss = TargetLoss(model)
    value = loss(model, collate([], pad=0), 5)
    value.backward()
    assert value.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters() if p.requires_grad)


def test_a_step_of_the_trainer_is_one_large_batch(arm, rows, adapters, tmp_path):
    """6 × 8 with ragged lengths: the gradient before the update equals that of all 48 examples at once."""
    data = rows(48)
    model = arm("nf4")
    expected, _ = by_hand(model, data)
    expected.backward()
    oracle = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    made = trainer(model, data, Levers(steps=1, clip=1e9), Seeds.all(3), folder=tmp_path, pad=0)
    seen = {}
    clip = made._clip_grad_norm

    def look(model):
        seen.update({n: p.grad.clone() for n, p in made.model.named_parameters() if p.requires_grad})
        return clip(model)

    made._clip_grad_norm = look
    with made.ready():
        made.train()
    assert len(made.plan.steps[0]) == 8
    assert float(made.losses[0]) == pytest.approx(expected.item(), rel=1e-5)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in oracle.values()))
    assert float(made.norms[0]) == pytest.approx(norm, rel=1e-4)
    for name, gradient in oracle.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-7)


def test_the_last_step_of_fewer_micro_batches_weights_its_own_tokens(arm, rows, tmp_path):
    data = rows(20)
    model = arm("none")
    levers = Levers(batch=4, accumulation=3, epochs=1, learning_rate=1e-12)
    made = trainer(model, data, levers, Seeds.all(0), folder=tmp_path, pad=0)
    with made.ready():
        made.train()
    assert [len(step) for step in made.plan.steps] == [3, 2]
    for step, loss in zip(made.plan.steps, made.losses, strict=True):
        expected, _ = by_hand(model, [data[r] for micro in step for r in micro])
        assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
