"""Small models whose widths every format can hold, adapters away from their start, and starts written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Phi3Config

import toolkit as tk
from tests.conftest import COMMON, byte_tokenizer
from toolkit.records.start import LayerStart, StartFile
from toolkit.runs import adapters, starts
from toolkit.runs.building import decide
from toolkit.runs.models import load_model
from toolkit.weights.layers import layers_of
from toolkit.weights.profiling import fingerprint_of

IDS = torch.arange(48).view(2, 24) * 7 % 256
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(family: str):
    more = {**COMMON, **SMALL, "num_key_value_heads": 2}
    return {
        "llama": lambda: LlamaConfig(**more, tie_word_embeddings=True),
        "untied": lambda: LlamaConfig(**more, tie_word_embeddings=False, attention_bias=True),
        "deep": lambda: LlamaConfig(**(more | {"num_hidden_layers": 12})),
        "narrow": lambda: LlamaConfig(**(more | {"intermediate_size": 96})),
        "phi3": lambda: Phi3Config(**more),
        "gpt2": lambda: GPT2Config(**COMMON, n_embd=64, n_layer=2, n_head=4, n_positions=128),
        "mixtral": lambda: MixtralConfig(**more, num_local_experts=4, num_experts_per_tok=2),
    }[family]()


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Callable[..., Path]:
    """family, dtype → folder of a saved model."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
        if (family, dtype) not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config_of(family))
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.12 if parameter.ndim > 1 else 0.3)
            folder = tmp_path_factory.mktemp(family)
            model.to(dtype).save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            made[family, dtype] = folder
        return made[family, dtype]

    return get


def trained(model: nn.Module, size: float = 0.05) -> nn.Module:
    """Every adapter away from its start, as after training."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.trainable(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def plan_of(
    quantizer: str = "nf4", keep: tuple[str, ...] = (), *, rank: int | None = 4, scaler: str = "rslora", **more
) -> tk.Plan:
    """Everything quantized but `keep`; s = 8 under rsLoRA, 4 under LoRA."""
    plan = tk.Plan.protecting(None, quantizer, rank=rank, alpha=16.0, scaler=scaler, **more)
    dense = plan.default.model_copy(update={"quantizer": "none", "initializer": "zero"})
    return plan.model_copy(update={"layers": dict.fromkeys(keep, dense)})


@pytest.fixture
def adapted(source, tmp_path):
    """A trained adapter on disk, and the model that it was saved from."""

    def make(
        family: str = "llama",
        quantizer: str = "nf4",
        keep: tuple[str, ...] = (),
        *,
        dtype: torch.dtype = torch.bfloat16,
        size: float = 0.05,
        start: Path | None = None,
        **more,
    ) -> tuple[Path, nn.Module]:
        plan = plan_of(quantizer, keep, **more)
        model = tk.build(source(family, dtype), plan, device="cpu", dtype=dtype, start=start)
        return adapters.save(trained(model, size), tmp_path / "adapter"), model

    return make


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits.float()


def stock(folder: Path, dtype: torch.dtype) -> nn.Module:
    """A checkpoint as transformers loads it; without the CPU layout that rounds bitsandbytes' scales to bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": "cpu"}).eval()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def begin(folder: Path, model: Path, plan: tk.Plan, initializer: str = "loftq") -> Path:
    """A folder of starts, as the verb writes it."""
    dense = load_model(model, device="cpu")
    layers = {layer.name: layer for layer in layers_of(dense)}
    about = {}
    for name, layer in decide(dense, plan).items():
        if layer.initializer == "zero":
            continue
        start = tk.initialize(
            layers[name].weight().contiguous(),
            initializer,
            layer.quantizer,
            rank=layer.adapter.rank,
            alpha=layer.adapter.alpha,
            scaler=layer.adapter.scaler,
            name=name,
        )
        starts.write(folder, name, start)
        about[name] = LayerStart(
            initializer=layer.initializer,
            quantizer=layer.quantizer,
            rank=layer.adapter.rank,
            scaling=start.scaling,
            residuals=list(start.residuals),
            kept=start.kept,
            base=starts.changed(start, layers[name].weight().contiguous()),
        )
    fingerprint = fingerprint_of(dense)
    base = starts.digest_over({n: s.base for n, s in about.items() if s.base is not None})
    plan = plan.model_copy(update={"fingerprint": fingerprint})
    plan.save(folder / starts.PLAN)
    StartFile(fingerprint=fingerprint, plan=plan.hash, dtype="bfloat16", base=base, layers=about).save(
        folder / starts.REPORT
    )
    return folder
