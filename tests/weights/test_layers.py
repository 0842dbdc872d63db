"""Layers of a model object: names, order, orientation, heads, blocks, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.weights.layers import block_count, head_of, layer_of, layers_of


def names(model: nn.Module, **options: bool) -> list[str]:
    return [layer.name for layer in layers_of(model, **options)]


def test_every_weight_maps_input_to_output_as_the_module_does(family, build):
    """The oracle is each module's own forward pass: y(x) − y(0) = W·x."""
    model = build(family, seed=1)
    for layer in layers_of(model):
        if layer.index is not None:
            continue
        x = torch.randn(layer.shape[1])
        with torch.no_grad():
            linear = layer.module(x) - layer.module(torch.zeros_like(x))
        assert tuple(layer.weight().shape) == layer.shape
        torch.testing.assert_close(layer.weight() @ x, linear, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_put_in_is_read_back_and_nothing_else_changes(family, build):
    """Whole parameters, transposed ones and experts of a stack; what an embedding shares with a head stays its own."""
    model = build(family, seed=1)
    layers = layers_of(model, include_head=True)
    before = {layer.name: layer.weight().clone() for layer in layers}
    embedded = model.get_input_embeddings().weight.detach().clone()
    for at, layer in enumerate(layers):
        if at % 2 and layer.name != head_of(model):
            continue
        given = torch.randn(layer.shape[1], layer.shape[0]).mT  # not contiguous
        layer.put(layer.stored(given))
        before[layer.name] = given
    for layer in layers:
        assert torch.equal(layer.weight(), before[layer.name]), layer.name
    assert torch.equal(model.get_input_embeddings().weight, embedded)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_experts_are_read_out_by_in(kind, build):
    """The oracle is the experts' own forward pass, one expert a token, with the gate's formula of each family."""
    options = {"num_local_experts": 3, "head_dim": 16, "pad_token_id": 0} if kind == "gpt_oss" else {}
    model = build(kind, seed=2, **options)
    experts = next(m for _, m in model.named_modules() if hasattr(m, "gate_up_proj") and hasattr(m, "num_experts"))
    path = next(p for p, m in model.named_modules() if m is experts)
    x = torch.randn(1, 48)
    for index in range(3):
        up = layer_of(model, f"{path}.gate_up_proj[{index}]")
        down = layer_of(model, f"{path}.down_proj[{index}]")
        assert (up.role, down.role, up.index) == ("gate_up_proj", "down_proj", index)
        gate_up, w_down = up.weight(), down.weight()
        assert gate_up.shape == up.shape and w_down.shape == down.shape
        with torch.no_grad():
            hidden = x @ gate_up.T
            if kind == "gpt_oss":
                hidden = hidden + experts.gate_up_proj_bias[index]
            expected = experts._apply_gate(hidden) @ w_down.T
            if kind == "gpt_oss":
                expected = expected + experts.down_proj_bias[index]
            one = torch.tensor([[index]])
            weights = torch.ones(1, 1)
            found = experts(x, one, weights)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_roles_and_blocks_of_a_fused_model(build):
    layers = layers_of(build("phi3"))
    assert {layer.role for layer in layers} == {"o_proj", "qkv_proj", "gate_up_proj", "down_proj"}
    assert [layer.block for layer in layers] == [0] * 4 + [1] * 4 + [2] * 4
    assert layers[1].name == "model.layers.0.self_attn.qkv_proj"


def test_routers_are_no_layers_and_a_shared_gate_is_one(build):
    found = names(build("qwen2_moe"))
    assert "model.layers.0.mlp.gate" not in found
    assert "model.layers.0.mlp.shared_expert_gate" in found


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_no_layer_unless_asked_for(family, build, tied):
    model = build(family, tied=tied)
    assert head_of(model) == "lm_head"
    assert "lm_head" not in names(model)
    assert names(model, include_head=True) == [*names(model), "lm_head"]


def test_a_head_by_another_name_is_known_by_being_the_output_embedding():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.score = nn.Linear(8, 20)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.lm_head = nn.Linear(8, 8)

        def get_output_embeddings(self) -> nn.Module:
            return self.score

    assert head_of(Model()) == "score"
    assert names(Model()) == ["layers.0", "layers.1", "lm_head"]


def test_a_classifier_has_its_score_as_head(build):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    small = build("llama").config.to_dict()
    model = LlamaForSequenceClassification(LlamaConfig(**small | {"num_labels": 3}))
    assert head_of(model) == "score"
    assert "score" not in names(model) and len(names(model)) == 21
    assert names(model, include_head=True)[-1] == "score"


@pytest.mark.parametrize("tie", [True, False])
def test_a_plain_module_has_the_layer_of_its_embedding_as_head(tie):
    model = nn.ModuleDict(
        {"embed": nn.Embedding(20, 8), "blocks": nn.ModuleList([nn.Linear(8, 20)]), "out": nn.Linear(8, 20, bias=False)}
    )
    if tie:
        model["out"].weight = model["embed"].weight
    assert head_of(model) == "out"
    assert names(model) == ["blocks.0"]


def test_a_module_list_at_the_root_numbers_its_blocks():
    model = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(5, 3)}) for _ in range(12)])
    layers = layers_of(model)
    assert [layer.block for layer in layers] == [n for n in range(12) for _ in "ab"]
    assert layers[-1].name == "11.b" and block_count(model) == 12


def test_wrapper_prefixes_change_no_block(build):
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"language_model": inner})

    inner = build("llama")
    wrapped = Wrapper(inner.model)
    assert [x.block for x in layers_of(wrapped)] == [x.block for x in layers_of(inner)]
    assert names(wrapped)[0] == "model.language_model.layers.0.self_attn.q_proj"


def test_a_decoders_blocks_follow_the_encoders():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=32)
    )
    layers = {layer.name: layer.block for layer in layers_of(model)}
    assert layers["encoder.block.1.layer.0.SelfAttention.q"] == 1
    assert layers["decoder.block.0.layer.1.EncDecAttention.q"] == 2
    assert layers["decoder.block.2.layer.2.DenseReluDense.wo"] == 4
    assert block_count(model) == 5 and "lm_head" not in layers


def test_experts_in_their_own_module_list_stay_in_their_block():
    block = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    assert {layer.block for layer in layers_of(model)} == {0}


def test_unmarked_experts_are_oriented_by_their_sizes():
    class Experts(nn.Module):
        def __init__(self, *shapes: tuple[int, int]) -> None:
            super().__init__()
            self.num_experts = 3
            self.up = nn.Parameter(torch.randn(3, *shapes[0]))
            self.down = nn.Parameter(torch.randn(3, *shapes[1]))

    straight, turned = Experts((10, 4), (4, 5)), Experts((4, 10), (5, 4))
    for module in (straight, turned):
        assert [x.shape for x in layers_of(nn.ModuleDict({"e": module}))] == [(10, 4)] * 3 + [(4, 5)] * 3
    layer = layer_of(nn.ModuleDict({"e": turned}), "e.up[2]")
    assert torch.equal(layer.weight(), turned.up[2].T)


def test_other_three_dimensional_parameters_are_no_experts():
    model = nn.ModuleDict({"conv": nn.Conv1d(3, 5, 2), "lin": nn.Linear(2, 2)})
    assert names(model) == ["lin"]


def test_weights_are_views_of_the_model(build):
    for family in ("gpt2", "llama", "mixtral"):
        for layer in layers_of(build(family)):
            stored = getattr(layer.module, layer.parameter)
            assert layer.weight().untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
            assert not layer.weight().requires_grad


def test_quantized_layers_are_listed_and_refused_when_read():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    quantized = bitsandbytes.nn.Linear4bit(32, 16, quant_type="nf4")
    quantized.weight = bitsandbytes.nn.Params4bit(torch.randn(16, 32), quant_type="nf4", module=quantized).to("cpu")
    model = nn.ModuleDict({"layers": nn.ModuleList([quantized, nn.Linear(32, 16)])})
    first, second = layers_of(model)
    assert (first.name, first.shape) == ("layers.0", (16, 32))
    with pytest.raises(InputError, match=r"layers\.0 \(Linear4bit\).*already quantized"):
        first.weight()
    assert second.weight().shape == (16, 32)


def test_packed_layers_of_other_libraries_are_refused():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 8, 4
            self.register_buffer("qweight", torch.zeros(4, 2, dtype=torch.int32))

    (layer,) = layers_of(nn.ModuleDict({"a": Packed()}))
    assert layer.shape == (4, 8)
    with pytest.raises(InputError, match=r"layer a \(Packed\) holds no weight"):
        layer.weight()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_low_precision_weights_are_refused(dtype):
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    with pytest.raises(InputError, match=str(dtype).removeprefix("torch.")):
        layers_of(nn.ModuleDict({"a": linear}))[0].weight()


def test_meta_weights_are_refused():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    with pytest.raises(InputError, match="layer a is on the meta device"):
        layers_of(model)[0].weight()


def test_adapters_are_seen_through(build):
    peft = pytest.importorskip("peft")
    plain = build("llama")
    expected = names(plain)
    before = layers_of(plain)[0].weight().clone()
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    assert names(adapted) == expected
    assert torch.equal(layers_of(adapted)[0].weight(), before)


def test_an_unknown_name_offers_the_closest(build):
    with pytest.raises(InputError, match=r"did you mean 'model\.layers\.0\.self_attn\.q_proj'"):
        layer_of(build("llama"), "model.layers.0.self_attn.qproj")


def test_a_model_without_layers_or_head_is_refused():
    with pytest.raises(InputError, match="no linear layer"):
        layers_of(nn.ModuleDict({"e": nn.Embedding(4, 4)}))
    with pytest.raises(InputError, match="no output embedding"):
        layers_of(nn.ModuleDict({"a": nn.Linear(4, 4)}), include_head=True)
