"""A swept state computes what the built model computes for the same plan."""

from __future__ import annotations

import pytest
import torch

import toolkit as tk
from toolkit.errors import InputError
from toolkit.records.plan import Plan
from toolkit.runs.building import build
from toolkit.runs.models import load_model
from toolkit.runs.ranking.sweep import Sweep

IDS = torch.arange(64).view(2, 32) * 11 % 256


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def profiles(checkpoints):
    kept = {}

    def get(family, dtype):
        if (family, dtype) not in kept:
            kept[family, dtype] = tk.profile(checkpoints(family, dtype), ["nf4"], progress=False)
        return kept[family, dtype]

    return get


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("base", ["nf4", "nvfp4"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "mixtral"])
def test_swept_states_equal_built_models(checkpoints, profiles, family, base, stored):
    """Bit for bit in float32 on a CPU; Conv1D within rounding, because its product is taken in another layout."""
    folder, profile = checkpoints(family, stored), profiles(family, stored)
    sweep = Sweep(load_model(folder, device="cpu"), profile.names, base=base, protect="none", dtype=torch.float32)
    found = []
    top = tk.select("top-error", profile, budget=tk.Budget(layers="0.3"))
    random = tk.select("random-count", profile, budget=tk.Budget(layers="0.5"), seed=4)
    for selection in (top, random, None, top):
        sweep.set(selection.layers if selection else ())
        swept = logits(sweep.model)
        plan = Plan.protecting(selection, base)
        built = logits(build(folder, plan, device="cpu", dtype="float32"))
        if family == "gpt2":
            torch.testing.assert_close(swept, built, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(swept, built)
        found.append(swept)
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[3])  # and back again


def test_bfloat16_states_equal_built_models(checkpoints, profiles):
    folder, profile = checkpoints("llama", torch.bfloat16), profiles("llama", torch.bfloat16)
    sweep = Sweep(load_model(folder, device="cpu"), profile.names, base="mxfp4", protect="none", dtype=torch.bfloat16)
    top = tk.select("top-error", profile, budget=tk.Budget(layers="0.3"))
    sweep.set(top.layers)
    built = build(folder, Plan.protecting(top, "mxfp4"), device="cpu", dtype="bfloat16")
    assert torch.equal(logits(sweep.model), logits(built))


def test_everything_protected_is_the_model_itself(checkpoints, profiles):
    folder, profile = checkpoints("llama", torch.bfloat16), profiles("llama", torch.bfloat16)
    expected = logits(load_model(folder, device="cpu").float())
    sweep = Sweep(load_model(folder, device="cpu"), profile.names, base="nf4", protect="none", dtype=torch.float32)
    low = logits(sweep.model)
    with sweep.everything():
        assert torch.equal(logits(sweep.model), expected)
    assert sweep.protected == frozenset()
    assert torch.equal(logits(sweep.model), low) and not torch.equal(low, expected)


def test_a_tied_head_is_untied_and_the_embedding_kept(checkpoints, profiles):
    folder = checkpoints("llama", torch.bfloat16)
    names = [*profiles("llama", torch.bfloat16).names, "lm_head"]
    model = load_model(folder, device="cpu")
    embedding = model.get_input_embeddings().weight.detach().clone()
    sweep = Sweep(model, names, base="nf4", protect="none", dtype=torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert not torch.equal(model.lm_head.weight, embedding)
    sweep.set(names)
    assert torch.equal(model.lm_head.weight, embedding)


def test_rotary_frequencies_keep_their_dtype(checkpoints, profiles):
    profile = profiles("llama", torch.bfloat16)
    model = load_model(checkpoints("llama", torch.float32), device="cpu")
    Sweep(model, profile.names, base="nf4", protect="none", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for n, b in model.named_buffers() if "inv_freq" in n} == {torch.float32}


def test_unknown_names_are_refused(checkpoints, profiles):
    names = profiles("llama", torch.bfloat16).names
    model = load_model(checkpoints("llama", torch.bfloat16), device="cpu")
    sweep = Sweep(model, names, base="nf4", protect="none", dtype=torch.float32)
    with pytest.raises(InputError, match=r"no layer 'model.layers.0.mlp.up'.*did you mean"):
        sweep.set(["model.layers.0.mlp.up"])
    with pytest.raises(InputError, match="the model has no layer 'nowhere'"):
        Sweep(model, ["nowhere"], base="nf4", protect="none", dtype=torch.float32)
