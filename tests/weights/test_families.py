"""Checkpoint names to module paths: files and model objects must tell the same, family by family."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.errors import InputError
from toolkit.records.profile import Profile
from toolkit.weights import families
from toolkit.weights.checkpoints import open_checkpoint
from toolkit.weights.families import layout
from toolkit.weights.profiling import fingerprint_of, profile

OTHERS = {
    "gpt_oss": {"num_local_experts": 3, "head_dim": 16, "pad_token_id": 0},
    "granitemoe": {"num_local_experts": 3, "pad_token_id": 0},
    "olmoe": {"num_experts": 3, "pad_token_id": 0},
    "stablelm": {},
    "bloom": {},
    "biogpt": {"pad_token_id": 0},
}
"""Families that the table does not know: fused and stacked experts, a head by another name."""


def plain(made: Profile) -> dict:
    """A profile's data, without what may differ between a file and an object."""
    data = made.to_json()
    for key in ("model", "fallbacks"):
        data.pop(key)
    for layer in data["layers"]:
        layer.pop("tensor")
    return data


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_profiles_from_files_and_from_the_model_agree(family, build, tmp_path, tied, dtype):
    model = build(family, tied=tied, dtype=dtype)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40kB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    expected = profile(model, "nf4", include_head=True)
    for folder in (tmp_path / "one", tmp_path / "many"):
        found = profile(folder, "nf4", include_head=True)
        assert plain(found) == plain(expected)
        assert found.fallbacks == expected.fallbacks  # the table did it
    headless = profile(tmp_path / "many", ())
    assert headless.names == expected.names[:-1]
    assert headless.fingerprint == expected.fingerprint
    assert headless.parameters + headless.other_parameters == sum(p.numel() for p in model.parameters())


def test_a_model_reloaded_in_another_dtype_has_the_same_fingerprint(family, build, tmp_path):
    from transformers import AutoModelForCausalLM

    build(family, dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert fingerprint_of(loaded) == fingerprint_of(tmp_path) == profile(tmp_path, ()).fingerprint


def test_names_are_module_paths_of_the_model(family, build, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    for layer in layout(open_checkpoint(tmp_path)).layers:
        path, _, index = layer.name.rstrip("]").partition("[")
        if index:
            parent, _, leaf = path.rpartition(".")
            weight = getattr(model.get_submodule(parent), leaf)[int(index)]
        else:
            weight = model.get_submodule(path).weight
        assert weight.numel() == layer.shape[0] * layer.shape[1]


def test_every_family_maps_the_same_through_the_skeleton(family, build, tmp_path, monkeypatch):
    build(family, tied=True).save_pretrained(tmp_path)
    table = profile(tmp_path, (), include_head=True)
    monkeypatch.setattr(families, "FAMILIES", {})
    skeleton = profile(tmp_path, (), include_head=True)
    assert plain(skeleton) == plain(table)
    assert [x.tensor for x in skeleton.layers] == [x.tensor for x in table.layers]
    assert any("skeleton" in k or "transformers builds" in k for k in skeleton.fallbacks)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_model_types_go_through_the_skeleton_and_say_so(kind, build, tmp_path):
    model = build(kind, dtype=torch.bfloat16, **OTHERS[kind])
    model.save_pretrained(tmp_path, max_shard_size="40kB")
    found, expected = profile(tmp_path, "nf4"), profile(model, "nf4")
    assert plain(found) == plain(expected)
    assert [k for k in found.fallbacks if repr(kind) in k]
    assert found.head == ("output_projection" if kind == "biogpt" else "lm_head")


def rewrite(folder, change, config=None):
    """Rename or edit the tensors of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    if config:
        data = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(data | config))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "opt"])
def test_checkpoints_of_the_bare_base_model(kind, build, tmp_path):
    model = build(kind, tied=True)
    model.base_model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith(model.base_model_prefix + ".") for name in names)
    assert plain(profile(tmp_path, "nf4", include_head=True)) == plain(profile(model, "nf4", include_head=True))


def test_constants_of_older_checkpoints_are_no_parameters(build, tmp_path):
    model = build("gpt2")
    model.save_pretrained(tmp_path)
    constants = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    rewrite(tmp_path, lambda t: t | constants)
    assert plain(profile(tmp_path, ())) == plain(profile(model, ()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_stored_head_counts_once_where_it_is_tied(build, tmp_path, tied):
    model = build("llama", tied=tied)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": model.lm_head.weight.detach().clone()})
    assert profile(tmp_path, ()).other_parameters == profile(model, ()).other_parameters


def test_a_tied_model_may_store_its_head_alone(build, tmp_path):
    model = build("llama", tied=True)
    model.save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda t: {k.replace("model.embed_tokens", "lm_head"): v for k, v in t.items()},
    )
    assert plain(profile(tmp_path, (), include_head=True)) == plain(profile(model, (), include_head=True))


def test_experts_stored_as_one_tensor(build, tmp_path):
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    expected = plain(profile(tmp_path, "nf4"))

    def merged(tensors):
        out = {k: v for k, v in tensors.items() if ".experts." not in k}
        for name, p in model.named_parameters():
            if ".experts." in name:
                out[name] = p.detach().clone()
        return out

    rewrite(tmp_path, merged)
    found = profile(tmp_path, "nf4")
    assert plain(found) == expected
    assert found.row("model.layers.1.mlp.experts.down_proj[2]").tensor == "model.layers.1.mlp.experts.down_proj"


def test_an_expert_names_the_tensors_it_was_read_from(build, tmp_path):
    build("mixtral").save_pretrained(tmp_path)
    row = profile(tmp_path, ()).row("model.layers.1.mlp.experts.gate_up_proj[2]")
    stem = "model.layers.1.block_sparse_moe.experts.2"
    assert row.tensor == [f"{stem}.w1.weight", f"{stem}.w3.weight"]
    tensors = load_file(tmp_path / "model.safetensors")
    both = torch.cat([tensors[name] for name in row.tensor]).double()
    assert row.shape == tuple(both.shape) and row.norm == pytest.approx(both.norm().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if "1.self_attn.k_proj" not in k}, r"block 1 lacks self_attn\.k_proj"),
        (lambda t: {k: v for k, v in t.items() if ".layers.2." not in k}, "config tells of 3 blocks.*tensors of 2"),
        (lambda t: {k: v for k, v in t.items() if ".layers.1." not in k}, "config tells of 3 blocks"),
        (lambda t: {f"wrong.{k}": v for k, v in t.items()}, "no tensor belongs to a block of 'llama'"),
        (
            lambda t: {k.replace("2.mlp.up_proj", "2.mlp.upp_proj"): v for k, v in t.items()},
            r"upp_proj\.weight' is no layer that 'llama' is known to have; did you mean .*'mlp\.up_proj'",
        ),
        (lambda t: t | {"layers.0.mlp.up_proj.weight": torch.zeros(80, 48)}, "are the same layer"),
        (lambda t: t | {"model.layers.0.mlp.up_proj.weight": torch.zeros(80)}, r"shape \(80,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_family(build, tmp_path, change, message):
    build("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(InputError, match=message):
        profile(tmp_path, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if "0.block_sparse_moe.experts.1.w3" not in k}, "expert 1 of .* lacks"),
        (lambda t: {k: v for k, v in t.items() if "0.block_sparse_moe.experts.2." not in k}, "3 experts.* has 2"),
    ],
)
def test_experts_that_are_not_whole(build, tmp_path, change, message):
    build("mixtral").save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(InputError, match=message):
        profile(tmp_path, ())


def test_the_skeleton_misses_no_layer_silently(build, tmp_path):
    build("stablelm").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: {k: v for k, v in t.items() if "1.mlp.up_proj" not in k})
    with pytest.raises(InputError, match=r"no tensor holds layer model\.layers\.1\.mlp\.up_proj"):
        profile(tmp_path, ())


def test_the_skeleton_checks_shapes(build, tmp_path):
    build("stablelm").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t, {"intermediate_size": 96})
    with pytest.raises(InputError, match=r"has shape \(96, 48\) by the config, and .* has \(80, 48\)"):
        profile(tmp_path, ())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": None}, "has no `model_type`"),
        ({"model_type": "lama"}, "does not know the model type 'lama'; did you mean .*'llama'"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}}, "own code, which is never done"),
        ({"model_type": "vit"}, "no causal language model of type 'vit'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"already quantized \(gptq\)"),
    ],
)
def test_configs_that_cannot_be_used(build, tmp_path, config, message):
    build("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t, config)
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(InputError, match=message):
        profile(tmp_path, ())


def test_no_head_to_include(build, tmp_path):
    build("llama", tied=False).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    assert profile(tmp_path, ()).head == "lm_head"
    with pytest.raises(InputError, match="holds no weight of the output embedding"):
        profile(tmp_path, (), include_head=True)
