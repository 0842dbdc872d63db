"""A model of one block, so that a driver is made in a second; and where a step waits for the device."""

import collections
import contextlib
import inspect
import warnings

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


class Waits:
    """Places in Python that waited for the device, told by the warnings of CUDA's synchronization debug mode.

    A warning of torch's own is located at the line of Python that called into torch; one raised in a backward is
    raised again where `backward` was called, so that it has a place as well.

    Args:
        message: how the warnings that count begin.
    """

    def __init__(self, message="called a synchronizing CUDA operation"):
        self._message, self._open, self._seen = message, contextlib.ExitStack(), []

    def begin(self):
        """Record from here on."""
        self._seen = self._open.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")

    def end(self):
        """Record no more."""
        self._open.close()

    def split(self, *functions):
        """(how often a line inside of one of the functions waited, "file:line" → how often any other did)."""
        known, elsewhere = 0, collections.Counter()
        homes = []
        for function in functions:
            lines, first = inspect.getsourcelines(function)
            homes.append((inspect.getsourcefile(function), range(first, first + len(lines))))
        for seen in self._seen:
            if not str(seen.message).startswith(self._message):
                continue
            if any(seen.filename == file and seen.lineno in lines for file, lines in homes):
                known += 1
            else:
                elsewhere[f"{seen.filename}:{seen.lineno}"] += 1
        return known, elsewhere


@pytest.fixture
def waits():
    """The class `Waits`."""
    return Waits


@pytest.fixture
def packing():
    """transformers' own looks for packed rows, which wait for the device once a forward where there is no mask."""
    from transformers import masking_utils

    found = getattr(masking_utils, "find_packed_sequence_indices", None)
    return [] if found is None else [found]
