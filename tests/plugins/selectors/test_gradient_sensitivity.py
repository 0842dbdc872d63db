"""gradient-sensitivity: its numbers are those of float64 autograd, and the rest of the toolkit can use them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.registry import registry
from toolkit.runs.calibration import calibrated
from toolkit.schemas import file_of
from toolkit.weights.layers import layers_of

KEY = "gradient-sensitivity"


@dataclasses.dataclass(frozen=True)
class Row:
    """An example as tokens; the core asks for these two only."""

    ids: tuple[int, ...]
    target: tuple[bool, ...]


def rows(count: int, seed: int = 0) -> list[Row]:
    """Random tokens of different lengths whose last few are to be predicted."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for at in range(count):
        ids = torch.randint(1, 256, (7 + 3 * (at % 4),), generator=made).tolist()
        found.append(Row(tuple(ids), tuple(i >= len(ids) - 2 - at % 3 for i in range(len(ids)))))
    return found


def by_hand(model: nn.Module, groups: list[list[Row]], elementwise: bool = True) -> list[float]:
    """Row by row without padding, all gradients kept, in float64: nothing of the code under test but the quantizer."""
    model = model.double()
    names = [layer.name for layer in layers_of(model)]
    weights = [model.get_submodule(name).weight.requires_grad_(True) for name in names]
    squares = [torch.zeros_like(w) for w in weights]
    for group in groups:
        nll, count = torch.zeros((), dtype=torch.float64), 0
        for row in group:
            logits = model(torch.tensor([row.ids])).logits[0]
            for at in range(1, len(row.ids)):
                if row.target[at]:
                    nll, count = nll - torch.log_softmax(logits[at - 1], -1)[row.ids[at]], count + 1
        for square, gradient in zip(squares, torch.autograd.grad(nll / count, weights), strict=True):
            square += gradient**2 / len(groups)
    quantizer, found = registry.make("quantizer", "nf4"), []
    for name, weight, fisher in zip(names, weights, squares, strict=True):
        transposed = type(model.get_submodule(name)).__name__ == "Conv1D"
        outin, fisher = (weight.detach().T, fisher.T) if transposed else (weight.detach(), fisher)
        kept = quantizer.quantize(outin.float())
        error = outin - kept.dequantize(torch.float32).double()
        found.append(float((fisher * error**2).sum() if elementwise else fisher.mean() * (error**2).sum()))
    return found


def loaded(folder, dtype=torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("elementwise", [True, False])
def test_the_numbers_are_those_of_float64_autograd(checkpoints, family, elementwise):
    """Padded batches and fused or transposed projections against single rows without padding."""
    folder = checkpoints(family, torch.float32)
    profile, data = tk.profile(folder, progress=False), rows(5)
    key = KEY if elementwise else f"{KEY}(elementwise=false)"
    made = calibrated(profile, key, model=folder, encoded=data, batch=2, device="cpu")
    groups = [data[0:2], data[2:4], data[4:5]]
    assert made.statistic(key) == pytest.approx(np.array(by_hand(loaded(folder), groups, elementwise)), rel=2e-4)
    assert made.statistics[key].batches == 3 and made.statistics[key].rows == 5
    assert made.statistics[key].tokens == sum(sum(row.target) for row in data)


def test_a_bfloat16_model_and_another_quantizer(checkpoints):
    """The profile is of bfloat16 weights; measured in float32 unless told otherwise, and then coarser."""
    folder = checkpoints("llama", torch.bfloat16)
    profile, data = tk.profile(folder, progress=False), rows(4)
    made = calibrated(profile, [KEY], model=folder, encoded=data, device="cpu")
    assert made.statistics[KEY].dtype == "float32"
    assert made.statistic(KEY) == pytest.approx(np.array(by_hand(loaded(folder), [data])), rel=2e-4)
    coarse = calibrated(profile, [KEY], model=folder, encoded=data, device="cpu", dtype="bfloat16")
    assert coarse.statistics[KEY].dtype == "bfloat16"
    assert coarse.statistic(KEY) == pytest.approx(made.statistic(KEY), rel=0.5)
    assert np.corrcoef(np.log(coarse.statistic(KEY)), np.log(made.statistic(KEY)))[0, 1] > 0.95
    lossless = calibrated(made, [f"{KEY}(quantizer=nf4(block=32))"], model=folder, encoded=data, device="cpu")
    fine, wide = lossless.statistic(f"{KEY}(quantizer=nf4(block=32))"), lossless.statistic(KEY)
    assert (fine < wide).mean() > 0.8  # smaller blocks have smaller errors, under the same gradients
    assert (wide == made.statistic(KEY)).all()  # what the profile held stays


def test_twice_the_loss_is_four_times_the_sensitivity(checkpoints, monkeypatch):
    from toolkit.runs import gradients

    folder = checkpoints("llama", torch.float32)
    profile, data = tk.profile(folder, progress=False), rows(3)
    once = calibrated(profile, KEY, model=folder, encoded=data, device="cpu")
    plain = gradients.token_loss
    monkeypatch.setattr(gradients, "token_loss", lambda m, b: (2 * plain(m, b)[0], plain(m, b)[1]))
    twice = calibrated(profile, KEY, model=folder, encoded=data, device="cpu")
    assert twice.statistic(KEY) == pytest.approx(4 * once.statistic(KEY), rel=1e-5)
    assert twice.statistics[KEY].loss == pytest.approx(2 * once.statistics[KEY].loss)


def test_the_order_of_rows_in_a_batch_and_of_batches_does_not_matter(checkpoints):
    folder = checkpoints("llama", torch.float32)
    profile, data = tk.profile(folder, progress=False), rows(6)
    orders = [data, [data[i] for i in (2, 0, 1, 5, 3, 4)], data[3:] + data[:3]]
    found = [calibrated(profile, KEY, model=folder, encoded=order, batch=3, device="cpu") for order in orders]
    for other in found[1:]:
        assert other.statistic(KEY) == pytest.approx(found[0].statistic(KEY), rel=1e-4)
    other = calibrated(profile, KEY, model=folder, encoded=[data[i] for i in (0, 3, 1, 4, 2, 5)], batch=3, device="cpu")
    assert other.statistic(KEY) != pytest.approx(found[0].statistic(KEY), rel=1e-3)  # other batches do


def test_experts_have_numbers_of_their_own_and_those_without_a_token_are_named(checkpoints):
    folder = checkpoints("mixtral", torch.float32)
    profile = tk.profile(folder, progress=False)
    data = [Row((3, 4), (False, True))]  # the two tokens of one row choose two experts of four in each block
    made = calibrated(profile, KEY, model=folder, encoded=data, device="cpu").statistics[KEY]
    model = loaded(folder)
    quantizer = registry.make("quantizer", "nf4")
    stacks = {n: p for n, p in model.named_parameters() if p.ndim == 3}
    loss = -torch.log_softmax(model(torch.tensor([[3, 4]])).logits[0, 0], -1)[4]
    gradients = dict(zip(stacks, torch.autograd.grad(loss, list(stacks.values())), strict=True))
    values = dict(zip(profile.names, made.values, strict=True))
    silent = 0
    for name, stack in stacks.items():
        for index in range(4):
            weight, gradient = stack[index].detach(), gradients[name][index]
            error = weight - quantizer.quantize(weight).dequantize()
            expected = float((gradient.double() ** 2 * error.double() ** 2).sum())
            assert values[f"{name}[{index}]"] == pytest.approx(expected, rel=1e-4, abs=1e-30)
            silent += expected == 0.0
    assert silent >= 3  # of four experts at most three are chosen by two tokens


def test_a_layer_that_no_gradient_reaches_is_zero_and_named(checkpoints):
    """An adapter-like bypass: the module is never called."""
    folder = checkpoints("llama", torch.float32)
    profile = tk.profile(folder, progress=False)
    model = loaded(folder)
    name = "model.layers.1.mlp.down_proj"
    model.get_submodule("model.layers.1").mlp.forward = lambda x: torch.zeros_like(x)
    made = calibrated(profile, KEY, model=model, encoded=rows(2)).statistics[KEY]
    gate, up = (f"model.layers.1.mlp.{role}_proj" for role in ("gate", "up"))
    assert set(made.unreached) == {gate, up, name}
    assert [v for n, v in zip(profile.names, made.values, strict=True) if n in made.unreached] == [0.0] * 3


def test_the_model_object_is_left_as_it_was(checkpoints):
    folder = checkpoints("llama", torch.float32)
    profile, model = tk.profile(folder, progress=False), loaded(folder)
    model.train()
    model.model.norm.weight.requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = {n: (p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}
    calibrated(profile, KEY, model=model, encoded=rows(2))
    assert model.training and all(m.training for m in model.modules())
    for name, parameter in model.named_parameters():
        kept, wanted = before[name]
        assert torch.equal(parameter, kept) and parameter.requires_grad == wanted
        assert (parameter.grad is None) == (parameter is not model.lm_head.weight)
        assert not parameter._post_accumulate_grad_hooks


def test_one_gradient_is_in_memory_at_a_time(checkpoints):
    """When a layer's gradient arrives, no other parameter holds one."""
    from toolkit.runs.calibration import _batches, _tensors
    from toolkit.runs.gradients import layers_in, mean_over_batches

    folder = checkpoints("llama", torch.float32)
    profile, model = tk.profile(folder, progress=False), loaded(folder)
    seen: list[tuple[str, int]] = []

    def look(layer, gradient):
        assert gradient.shape == layer.shape
        seen.append((layer.name, sum(p.grad is not None for p in model.parameters())))
        return 1.0

    batches = [_tensors(group, torch.device("cpu")) for group in _batches(rows(4), 2)]
    assert mean_over_batches(model, batches, layers_in(model, profile), look) == [1.0] * len(profile)
    assert len(seen) == 2 * len(profile) and {held for _, held in seen} == {0}


def test_a_selection_by_it_matched_draws_and_every_form_of_budget(checkpoints, tmp_path):
    folder = checkpoints("llama", torch.bfloat16)
    profile = calibrated(tk.profile(folder, progress=False), KEY, model=folder, encoded=rows(3), device="cpu")
    profile = tk.Profile.load(profile.save(tmp_path / "profile.json"))
    order = sorted(range(len(profile)), key=lambda i: -profile.statistic(KEY)[i])
    chosen = tk.select(KEY, profile, "layers=0.2")
    assert chosen.layers == [profile.names[i] for i in sorted(order[: len(chosen.layers)])]
    assert tk.select(f"{KEY}(rounding=floor)", profile, "layers=0.2").layers != []  # one statistic for both
    drawn = tk.select("random-matched", profile, like=chosen, seed=3)
    assert abs(drawn.mismatch) <= 0.001 or drawn.parameters == chosen.parameters
    assert tk.select(KEY, profile, "parameters=0.5").share <= 0.5


def test_without_a_statistic_it_says_how_one_is_made(tiny):
    with pytest.raises(tk.InputError, match=r"ranks layers by what data say.*toolkit calibrate 'gradient-sensitivity'"):
        tk.select(KEY, tiny, "layers=0.2")
    with pytest.raises(tk.InputError, match=r"quantizer=mxfp4\)' --model"):
        tk.select(KEY, tiny, "layers=0.2", quantizer="mxfp4")


def test_a_weight_that_is_not_finite_and_a_gradient_that_is_not(checkpoints):
    folder = checkpoints("llama", torch.float32)
    profile, model = tk.profile(folder, progress=False), loaded(folder)
    layer = model.model.layers[1].mlp.up_proj
    layer.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * float("nan"),))
    with pytest.raises(tk.InputError, match=r"layer model\.layers\.1\.mlp\.up_proj: its gradient .*batch 1 of 1"):
        calibrated(profile, KEY, model=model, encoded=rows(2))
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    with pytest.raises(tk.InputError, match="loss of calibration batch 1 of 1 is nan"):
        calibrated(profile, KEY, model=model, encoded=rows(2))


def test_quantized_and_other_models_are_refused(checkpoints):
    folder = checkpoints("llama", torch.float32)
    profile = tk.profile(folder, progress=False)
    with pytest.raises(tk.InputError, match="already quantized"):
        calibrated(profile, KEY, model=tk.build(folder, tk.Plan.protecting(None, "nf4"), device="cpu"), encoded=rows(1))
    with pytest.raises(tk.InputError, match="the model to calibrate on belongs to"):
        calibrated(profile, KEY, model=checkpoints("gpt2", torch.float32), encoded=rows(1), device="cpu")


def test_the_profiles_json_is_plain(checkpoints, tmp_path):
    folder = checkpoints("llama", torch.float32)
    profile = tk.profile(folder, progress=False)
    assert "statistics" not in profile.to_json()  # and so the hashes of profiles without any are what they were
    made = calibrated(profile, KEY, model=folder, encoded=rows(2), device="cpu", task="sst2", source="hub")
    data = json.loads(made.save(tmp_path / "p.json").read_text())
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (the test extra)")
    jsonschema.validate(data, json.loads(file_of("profile").read_text(encoding="utf-8")))
    assert tk.Profile.load(tmp_path / "p.json") == made
    held = data["statistics"][KEY]
    assert held["task"] == "sst2" and held["source"] == "hub" and len(held["values"]) == len(profile)
    assert made.hash != profile.hash and made.fingerprint == profile.fingerprint
