"""Gradients of the data flow against float64 autograd over transformers' own blocks, switch by switch."""

from __future__ import annotations

import copy

import pytest
import torch
from toolkit_plugins.dataflows.pact.settings import Settings

from tests.plugins.dataflows.slow import IDS, SMALL, Recorder, built, close, dense, inner, lora, slow

SWITCHES = [
    {},
    {"layouts": "shared"},
    {"source": "original"},
    {"gradients": "stochastic"},
    {"gradients": "16bit"},
    {"norm": "16bit"},
    {"gates": "16bit"},
    {"gates": "int4"},
    {"gates": "int2"},
    {"nonlinear": "nvfp4"},
    {"reuse": False},
    {"norm": "16bit", "gates": "16bit", "gradients": "16bit", "layouts": "shared", "reuse": False},
]


def key(options: dict) -> str:
    inside = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in options.items())
    return f"pact({inside})" if inside else "pact"


def compared(source, flow: str, options: dict) -> None:
    """One forward and backward pass of both: loss, logits, every adapter's gradients and that of the embeddings."""
    model = built(copy.deepcopy(source), flow)
    run = Recorder().record(model)
    targets = IDS.roll(-1, 1)
    embedded = source.get_input_embeddings()(IDS).detach()

    def passed(model, x):
        logits = model(inputs_embeds=x, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        return logits.detach()

    x = embedded.clone().requires_grad_()
    found = passed(model, x)
    reference = slow(model, run, source, Settings(**options))
    wide = embedded.double().requires_grad_()
    expected = passed(reference, wide)
    close(found, expected)
    close(x.grad, wide.grad)
    gradients = lora(inner(model))
    assert gradients
    for name, gradient in gradients.items():
        path, _, rest = name.rpartition(".lora_")
        close(gradient, getattr(reference.get_submodule(path), rest[0]).grad)
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("options", SWITCHES, ids=key)
def test_gradients_of_a_whole_model(options):
    compared(dense("llama"), key(options), options)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "phi3"])
def test_gradients_of_every_family(family):
    compared(dense(family), "pact", {})


def test_gradients_where_nothing_is_a_multiple_of_16():
    compared(dense(hidden_size=60, intermediate_size=90, head_dim=10), "pact", {})
    assert SMALL["hidden_size"] != SMALL["intermediate_size"]


def test_gradients_where_a_norm_weight_is_zero():
    """What such a weight hides is not in ŷ, and is taken as zero; all other gradients are as ever."""
    source = dense()
    with torch.no_grad():
        for block in source.model.layers:
            block.input_layernorm.weight[5] = 0
            block.post_attention_layernorm.weight[[0, 63]] = 0
    compared(source, "pact", {})
