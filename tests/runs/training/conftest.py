"""Small random models built from plans, and random examples of ragged lengths."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config

from toolkit.records.plan import Adapter, LayerPlan, Plan
from toolkit.runs.building import build
from toolkit.runs.tasks.encoding import Encoded
from toolkit.weights.layers import layers_of

COMMON = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def config(family: str, blocks: int):
    if family == "gpt2":
        return GPT2Config(vocab_size=64, n_embd=32, n_layer=blocks, n_head=4, n_positions=128)
    kind = {"llama": LlamaConfig, "phi3": Phi3Config}[family]
    return kind(**COMMON, **SMALL, num_hidden_layers=blocks)


def dense_model(family: str = "llama", blocks: int = 4, dtype: torch.dtype = torch.float32):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config(family, blocks), attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval().requires_grad_(False).to(dtype)


def built(base: str = "none", adapted=None, *, family="llama", blocks=4, dtype=torch.float32, rank=4, seed=0):
    model = dense_model(family, blocks, dtype)
    adapter = Adapter(rank=rank, alpha=2.75 * rank, scaler="lora", scaling=2.75)
    layers = {
        layer.name: LayerPlan(quantizer=base, adapter=adapter if adapted is None or layer.block in adapted else None)
        for layer in layers_of(model)
    }
    return build(model, Plan(default=LayerPlan(quantizer=base), layers=layers), seed=seed)


def examples(count: int = 50, seed: int = 0, longest: int = 30) -> list[Encoded]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        length = chance.randint(8, longest)
        target = chance.randint(1, 6)
        ids = tuple(chance.randrange(1, 64) for _ in range(length))
        found.append(Encoded(ids, (False,) * (length - target) + (True,) * target))
    return found


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="session")
def dense():
    """family, blocks, dtype → a new dense model, the same each time."""
    return dense_model


@pytest.fixture(scope="session")
def arm():
    """A built model: which quantizer, and which blocks get adapters; s = 2.75, not 1."""
    return built


@pytest.fixture(scope="session")
def rows():
    """Examples of ragged lengths whose last tokens, one to six, are the target."""
    return examples


@pytest.fixture(scope="session")
def adapters():
    """A copy of what is trained, by name."""
    return trained


@pytest.fixture(scope="session")
def here():
    """This file, whose functions other processes use too."""
    return Path(__file__)
