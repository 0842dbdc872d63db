"""A model of one block, so that a driver is made in a second."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.runs.tasks.encoding import Encoded


@pytest.fixture
def tiny():
    """dtype → a dense model of two blocks."""

    def make(dtype=torch.float32, blocks=2):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        return LlamaForCausalLM(config).to(dtype)

    return make


@pytest.fixture
def examples():
    """(lengths of the micro-batches' examples) → micro-batches of examples."""

    def make(*micro):
        return [
            [Encoded(tuple((7 * i + n) % 60 + 1 for i in range(n)), (False,) * 3 + (True,) * (n - 3)) for n in lengths]
            for lengths in micro
        ]

    return make
