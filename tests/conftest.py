"""Small random models of several families, with a byte tokenizer, saved as any checkpoint is."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: more threads only wait for each other, here and in
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes that tests start

import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
)

# a busy machine makes an example slow, and not wrong
settings.register_profile("toolkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("toolkit")

VOCABULARY = 256


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def configs() -> dict:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return {
        "llama": LlamaConfig(**COMMON, **small, num_key_value_heads=2, tie_word_embeddings=True),
        "phi3": Phi3Config(**COMMON, **small, num_key_value_heads=2),
        "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=128),
        "mixtral": MixtralConfig(**COMMON, **small, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    }


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: what is tokenized can be counted by hand."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def save_model(folder: Path, family: str, dtype: torch.dtype, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs()[family])
    for parameter in model.parameters():  # weights large enough that rounding them moves the loss
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """family, dtype → folder of a saved model."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
        if (family, dtype) not in made:
            made[family, dtype] = save_model(tmp_path_factory.mktemp(family), family, dtype)
        return made[family, dtype]

    return get


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """A text of 2,000 letters."""
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(chr(97 + (i * i + 3 * i) % 26) for i in range(2000)), encoding="utf-8")
    return path
