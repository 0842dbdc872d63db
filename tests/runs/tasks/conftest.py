"""Tiny models and tokenizers whose tokens can be checked by hand."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from toolkit.interfaces import Answered, Example, Task
from toolkit.runs.tasks import Split

TEXT = "Question: what is 12 + 30?\nAnswer: 42 Yes No great terrible the correct answer is true. " * 20


def byte_level(merges: int, *, bos: bool = False, words: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on TEXT, with `</s>` as end and no padding token.

    `words`: as GPT-2's, pieces keep to words, and spaces are left out of the offsets; else they reach over words.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + merges,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([TEXT[at : at + 12] for at in range(0, 800, 5)], trainer)
    level = processors.ByteLevel(trim_offsets=words)
    if bos:
        level = processors.Sequence(
            [level, processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])]
        )
    core.post_processor = level
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>" if bos else None)


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte; `</s>` ends a text."""
    return byte_level(0)


@pytest.fixture(scope="session")
def merged():
    """Pieces of several letters, after a beginning-of-text token."""
    return byte_level(60, bos=True)


@pytest.fixture(scope="session")
def worded():
    """As GPT-2's: spaces belong to the next word, and are left out of the offsets."""
    return byte_level(60, words=True)


def tiny(family: str = "llama", vocabulary: int = 258, dtype: torch.dtype = torch.float32, context: int = 512):
    torch.manual_seed(7)
    if family == "gpt2":
        config = GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=4, n_positions=context, eos_token_id=1)
    else:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context,
            bos_token_id=0,
            eos_token_id=1,
        )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def model():
    return tiny()


@dataclasses.dataclass
class Toy(Task):
    """Rows are examples already."""

    name = "toy"

    def example(self, row):
        return row["example"]

    def judge(self, text, example):
        return Answered(text[:1] or None, float(text[:1] == example.references[0]))


class Generated(Toy):
    name = "generated"
    scored = "generation"
    new_tokens = 6


def split_of(*examples: Example) -> Split:
    return Split(list(examples), list(range(len(examples))), "code", len(examples))


def write_lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def made():
    """What the tests make models, tokenizers, tasks and splits with."""
    return types.SimpleNamespace(
        byte_level=byte_level, tiny=tiny, Toy=Toy, Generated=Generated, split=split_of, lines=write_lines
    )
