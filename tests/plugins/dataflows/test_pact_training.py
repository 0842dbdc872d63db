"""Under the trainer: noise survives an interruption, backward ends at the lowest adapter, autocast changes nothing."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.dataflows.slow import ADAPTER, IDS, Recorder, built, dense, inner, lora, planned
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import LayerPlan, Plan
from toolkit.runs import adapters
from toolkit.runs.building import build
from toolkit.runs.tasks.encoding import Encoded
from toolkit.runs.training import train

LEVERS = Levers(batch=4, accumulation=2, steps=6, learning_rate=1e-2, checkpointing=True)
DATA = [Encoded(tuple(range(1 + at, 9 + at + at % 5)), (False,) * 4 + (True,) * (4 + at % 5)) for at in range(48)]


def trained(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Ended(Exception):
    """What ends a run from inside."""


@pytest.mark.parametrize("flow", ["pact", "pact(gradients=stochastic)"])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, flow):
    def made():
        return build(dense(), planned(flow), dtype="float32")

    def run(model, folder):
        return train(model, DATA, LEVERS, Seeds.all(3), folder=folder, pad=0, progress=False, save_steps=2)

    torch.manual_seed(1)
    whole = made()
    expected = run(whole, tmp_path / "whole")
    torch.manual_seed(1)
    stopped, passes = made(), []

    def stop(*_):
        passes.append(1)
        if len(passes) == 2 * 4 + 2:  # in step 5, its second micro-batch
            raise Ended

    inner(stopped).lm_head.register_forward_hook(stop)
    with pytest.raises(Ended):
        run(stopped, tmp_path / "stopped")
    torch.manual_seed(99)  # another process knows nothing of the first one's generator
    again = made()
    found = run(again, tmp_path / "stopped")
    assert found.course.resumed == 1 and found.course.last_loss == expected.course.last_loss
    for name, value in trained(whole).items():
        assert torch.equal(trained(again)[name], value), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_backward_ends_at_the_lowest_adapter(tmp_path, checkpointing):
    """Of four blocks the third is the lowest adapted: no gradient enters a layer of the first two."""
    layers = {
        f"model.layers.{at}.{part}": LayerPlan(quantizer="nvfp4", adapter=ADAPTER)
        for at in (2, 3)
        for part in ("self_attn.q_proj", "mlp.down_proj")
    }
    plan = Plan(dataflow="pact", default=LayerPlan(quantizer="nvfp4"), layers=layers)
    model = build(dense(num_hidden_layers=4), plan, dtype="float32")
    run = Recorder().record(model)
    levers = LEVERS.model_copy(update={"checkpointing": checkpointing, "steps": 2})
    outcome = train(model, DATA, levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert outcome.finished and outcome.course.lowest == 2
    entered = {
        name.removesuffix(".base_layer")
        for name, module in inner(model).named_modules()
        if id(module) in run.gradients and hasattr(module, "packed")
    }
    expected = {name for name in _layers(model) if name.startswith(("model.layers.2.mlp", "model.layers.3"))}
    # attention of the third block: its output projection passes the gradient on to q; k and v feed nothing trained
    assert entered == expected | {"model.layers.2.self_attn.o_proj"}


def _layers(model) -> list[str]:
    return [name for name, module in inner(model).named_modules() if name.endswith("_proj") and module is not None]


def test_a_16_bit_model_is_the_same_under_autocast():
    """As it is trained and scored: float32 adapters, bfloat16 products, with the casts of PEFT left out or not."""
    model = built(dense(), dtype="bfloat16")

    def passed():
        model.zero_grad()
        logits = model(input_ids=IDS, use_cache=False).logits
        logits.float().logsumexp(-1).mean().backward()
        return logits.detach(), {name: gradient.clone() for name, gradient in lora(model).items()}

    plain = passed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = passed()
        with adapters.uncast(model):
            scored = passed()
    for other in (cast, scored):
        assert torch.equal(plain[0], other[0])
        assert all(torch.equal(plain[1][name], other[1][name]) for name in plain[1])
