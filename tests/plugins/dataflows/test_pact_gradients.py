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


def compared(source, flow: str, options: dict, near: float = 2e-5, share: float = 0.01) -> None:
    """One forward and backward pass of both: loss, logits, every adapter's gradients and that of the embeddings."""
    model = built(copy.deepcopy(source), flow, dtype=str(source.dtype).removeprefix("torch."))
    run = Recorder(near, share).record(model)
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
    close(found, expected, near)
    close(x.grad, wide.grad, near)
    gradients = lora(inner(model))
    assert gradients
    for name, gradient in gradients.items():
        path, _, rest = name.rpartition(".lora_")
        close(gradient, getattr(reference.get_submodule(path), rest[0]).grad, near)
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("options", SWITCHES, ids=key)
def test_gradients_of_a_whole_model(options):
    compared(dense("llama"), key(options), options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bit(dtype):
    """To the precision of the dtype: a few units in the last place of the largest, for a few products in a row."""
    near = {torch.bfloat16: 0.04, torch.float16: 0.005}[dtype]
    compared(dense("llama", dtype), "pact", {}, near, share=0.15)


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
