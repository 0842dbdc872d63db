"""A calibrated initializer that keeps what it was given, and models whose inputs a test can work out."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import toolkit as tk
from tests.conftest import configs
from toolkit.interfaces import Given, Initializer, Moments, Start
from toolkit.registry import registry

LETTERS = "".join(chr(97 + (i * i + 3 * i) % 26) for i in range(2000))


@dataclasses.dataclass(frozen=True)
class Watcher(Initializer):
    """Q of half the weight, and a B that is not zero: what follows differs much from the dense model's."""

    name = "watcher"
    needs_calibration = True
    needs_rank = False
    seen: ClassVar[dict[str, Moments]] = {}
    order: ClassVar[list[str]] = []

    activations: str = "none"  # type: ignore[assignment]

    def initialize(self, given: Given) -> Start:
        assert given.moments is not None
        self.seen[given.name] = given.moments
        self.order.append(given.name)
        b = None
        if given.A is not None:
            b = given.weight.float() @ given.moments.second @ given.A.T
            b /= b.norm() * 4
        base = given.quantizer.quantize(given.weight * 0.5)
        return Start(base, given.A, b, given.scaling, (0.1, 0.5), 1)


@pytest.fixture
def watcher():
    tk.register(Watcher)
    Watcher.seen.clear()
    Watcher.order.clear()
    yield Watcher
    registry.manager.unregister(name=f"{Watcher.__module__}.{Watcher.__qualname__}:inline")


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    path = tmp_path_factory.mktemp("letters") / "letters.txt"
    path.write_text(LETTERS, encoding="utf-8")
    return str(path)


def make(family: str = "llama", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs()[family])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.to(dtype).eval()
