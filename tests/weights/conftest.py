"""Small random models of every family, built by the installed transformers."""

from __future__ import annotations

from typing import Any

import pytest

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 80, "n_positions": 64},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "gpt_neox": {"max_position_embeddings": 64},
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "head_dim": 16,
        "mlp_only_layers": [0],
    },
}
"""model_type → settings beside the common ones."""

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `family` runs once for each."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", list(FAMILIES))


@pytest.fixture(scope="session")
def build() -> Any:
    """The function that builds a small random model of a family."""
    return build_model


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A saved small Llama in bfloat16, for tests that only read it."""
    import torch

    folder = tmp_path_factory.mktemp("models") / "llama"
    build_model("llama", dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def build_model(family: str, *, tied: bool | None = None, seed: int = 0, dtype: Any = None, **changes: Any) -> Any:
    """A small random causal language model of a family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"vocab_size": 96} if family == "gpt2" else dict(COMMON)
    settings |= FAMILIES.get(family, {}) | changes
    if tied is not None:
        settings["tie_word_embeddings"] = tied
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).eval()
    with torch.no_grad():  # biases and norms start as zeros and ones; make every parameter tell
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model
