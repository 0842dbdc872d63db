"""The compressed-tensors export: the library reads the very codes, scales and weights, and quantizes no other layer."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import toolkit as tk
from tests.runs.exporting.conftest import begin, logits, plan_of
from toolkit.errors import InputError, RunError
from toolkit.interfaces import Layout
from toolkit.records.io import read_json
from toolkit.registry import registry
from toolkit.runs.exporting import compressed_tensors
from toolkit.runs.exporting.exporting import open_model
from toolkit.runs.exporting.origin import read
from toolkit.runs.exporting.packing import layouts, pack
from toolkit.weights.layers import layers_of

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

QUANTIZERS = ["nvfp4", "mxfp4"]
PRESETS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}


def exported(tmp_path, source, plan, family="llama", dtype=torch.bfloat16, **more):
    plan.save(tmp_path / "plan.json")
    folder = tmp_path / "base"
    report = tk.export(tmp_path / "plan.json", "compressed-tensors", folder, model=source(family, dtype), **more)
    return folder, report


def weights_of(model):
    return {layer.name: layer.weight().contiguous() for layer in layers_of(model)}


def dense(folder):
    return weights_of(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))


def layout_of(quantizer: str) -> Layout:
    return registry.make("quantizer", quantizer).layout("compressed-tensors")


def their_scheme(config: dict):
    parsed = QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    return BaseCompressor.get_value_from_registry(parsed.format), scheme


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_config_says_what_the_librarys_own_preset_says(quantizer):
    """Weights alone: 16-bit activations, as the data flow computed them."""
    _, scheme = their_scheme({**layout_of(quantizer).config(torch.bfloat16), "ignore": []})
    ours, preset = scheme.weights, PRESET_SCHEMES[PRESETS[quantizer]]["weights"]
    for field in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "scale_dtype"):
        assert getattr(ours, field) == getattr(preset, field), field
    assert scheme.input_activations is None


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 300.0])
def test_the_library_packs_the_same_codes_and_decodes_the_same_weights(quantizer, dtype, scale):
    """It is given W and our scales, and packs by itself; then it decodes what we wrote, in bfloat16."""
    torch.manual_seed(3)
    weight = (torch.randn(48, 160) * scale).to(dtype)
    weight[5], weight[:, 32:64] = 0, 0
    layout = layout_of(quantizer)
    packed = registry.make("quantizer", quantizer).quantize(weight)
    written = layout.tensors(packed, torch.bfloat16)
    compressor, scheme = their_scheme({**layout.config(torch.bfloat16), "ignore": []})
    scales = written["weight_scale"].float()
    if quantizer == "mxfp4":
        scales = torch.exp2(written["weight_scale"].double() - 127).float()
    given_ = {"weight": weight.float(), "weight_scale": scales}
    if "weight_global_scale" in written:
        given_["weight_global_scale"] = written["weight_global_scale"]
    theirs = compressor.compress(given_, scheme)
    other = theirs["weight_packed"] != written["weight_packed"]
    if other.any():  # they divide by s/G and we by s·g, an ulp apart: a tie may fall to either side
        ours, library = (layout.decoded({**written, "weight_packed": p}, (48, 160), torch.bfloat16).double()
                         for p in (written["weight_packed"], theirs["weight_packed"]))  # fmt: skip
        where = ours != library
        halves = (weight.double() - ours).abs()[where], (weight.double() - library).abs()[where]
        assert where.sum() < 30 and torch.allclose(*halves, rtol=0.02)
        assert quantizer == "nvfp4" and dtype == torch.bfloat16
    if quantizer == "nvfp4":
        assert torch.equal(theirs["weight_scale"].view(torch.uint8), written["weight_scale"].view(torch.uint8))
    else:  # 2^−127, of blocks of zeros, is below what the library's logarithm of a float32 reads
        used = written["weight_scale"] > 0
        assert torch.equal(theirs["weight_scale"][used], written["weight_scale"][used])
    decoded = compressor.decompress(dict(written), scheme)["weight"]
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded, layout.decoded(written, (48, 160), torch.bfloat16))
    assert torch.equal(decoded[5].float(), torch.zeros(160))


def test_nvfp4_decodes_by_the_stored_reciprocal():
    """(s/G)·e2m1 with G = fl(1/g), by hand; our own s·g·e2m1 is another float32 in places, and seldom another bf16."""
    torch.manual_seed(0)
    weight = torch.randn(256, 512) * 0.02
    layout, packed = layout_of("nvfp4"), registry.make("quantizer", "nvfp4").quantize(weight)
    written = layout.tensors(packed, torch.bfloat16)
    g = packed.tensors["global_scale"]
    assert written["weight_global_scale"].shape == (1,)
    assert written["weight_global_scale"].item() == (1 / g.double()).float().item()
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([written["weight_packed"] & 15, written["weight_packed"] >> 4], -1).view(256, 512)
    scale = (written["weight_scale"].float() / written["weight_global_scale"]).repeat_interleave(16, 1)
    by_hand = (levels[codes.long()] * scale).bfloat16()
    assert torch.equal(layout.decoded(written, (256, 512), torch.bfloat16), by_hand)
    ours = packed.dequantize(torch.float32)
    exact = levels[codes.long()] * scale
    assert ((ours - exact).abs() <= exact.abs() * 2**-22).all() and not torch.equal(ours, exact)
    assert (by_hand != ours.bfloat16()).float().mean() < 1e-3


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("family", ["llama", "untied", "phi3"])
def test_transformers_loads_the_decoded_weights_bit_for_bit(tmp_path, source, quantizer, family):
    keep = ("model.layers.1.self_attn.o_proj",)
    folder, report = exported(tmp_path, source, plan_of(quantizer, keep, rank=None), family, fused="separate")
    config = read_json(folder / "config.json")["quantization_config"]
    assert config["format"] == f"{quantizer}-pack-quantized" and config["ignore"] == [*keep, "lm_head"]
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.bfloat16
    )
    before = dense(source(family))
    maker, layout = registry.make("quantizer", quantizer), layout_of(quantizer)
    for name, weight in weights_of(theirs).items():
        expected = before[name]
        if name not in keep:
            packed = maker.quantize(expected)
            expected = layout.decoded(layout.tensors(packed, torch.bfloat16), tuple(expected.shape), torch.bfloat16)
            assert report.layers[name].base == "quantized"
        assert torch.equal(weight, expected), name
    assert all(not layer.differing for layer in report.layers.values())
    ours = AutoModelForCausalLM.from_pretrained(source(family), dtype="auto").eval()
    for name, weight in weights_of(ours).items():
        if name not in keep:
            ours.get_submodule(name).weight.data.copy_(maker.quantize(weight).dequantize())
    assert torch.equal(logits(theirs.eval()), logits(ours))


def test_the_compressed_model_computes_the_same(tmp_path, source):
    """As the library runs it: packed until the first forward pass."""
    folder, _ = exported(tmp_path, source, plan_of("nvfp4", rank=None), fused="separate")
    plain = CompressedTensorsConfig(dequantize=True)
    whole = AutoModelForCausalLM.from_pretrained(folder, quantization_config=plain, dtype=torch.bfloat16).eval()
    lazy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    assert hasattr(lazy.model.layers[0].mlp.up_proj, "weight_packed")
    assert torch.equal(logits(lazy), logits(whole))


# one scale for what is fused


def test_fused_layers_share_their_scale_and_the_change_is_reported(tmp_path, source):
    folder, report = exported(tmp_path, source, plan_of("nvfp4", rank=None))
    stored, before = load_file(folder / "model.safetensors"), dense(source("llama"))
    maker, layout = registry.make("quantizer", "nvfp4"), layout_of("nvfp4")
    for block in range(2):
        for roles in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            names = [f"model.layers.{block}.{role}" for role in roles]
            assert len({stored[f"{n}.weight_global_scale"].item() for n in names}) == 1
            own = {n: maker.quantize(before[n]) for n in names}
            largest = max(float(p.tensors["global_scale"]) for p in own.values())
            for n in names:
                same = float(own[n].tensors["global_scale"]) == largest
                moved = layout.at_scale(before[n], largest)
                assert torch.equal(stored[f"{n}.weight_packed"].view(-1), moved.tensors["codes"])
                old, new = own[n].dequantize(torch.float32), moved.dequantize(torch.float32)
                if same:
                    assert report.layers[n].rescaled is None and torch.equal(old, new)
                else:
                    assert report.layers[n].rescaled == pytest.approx(
                        ((new - old).norm() / old.norm()).item(), rel=1e-6
                    )
                    errors = [(x - before[n].float()).norm().item() for x in (old, new)]
                    assert errors[1] < 1.05 * errors[0]  # no worse than its own scale
    assert any("quantized anew" in note for note in report.notes)


@given(seed=st.integers(0, 2**31), factor=st.floats(1, 8), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_weight_under_its_own_scale_is_the_quantizers(seed, factor, dtype):
    weight = torch.randn(8, 48, generator=torch.Generator().manual_seed(seed)).to(dtype)
    maker, layout = registry.make("quantizer", "nvfp4"), layout_of("nvfp4")
    packed = maker.quantize(weight)
    g = layout.scale(packed)
    same = layout.at_scale(weight, g)
    assert all(torch.equal(same.tensors[k], t) for k, t in packed.tensors.items())
    other = layout.at_scale(weight, g * factor)
    assert layout.scale(other) == pytest.approx(g * factor, rel=1e-6)
    error = (other.dequantize(torch.float32) - weight.float()).norm() / weight.float().norm()
    assert error < 0.2  # block scales are normal E4M3 numbers still: nothing is lost to the range


def test_a_trained_base_moves_less(tmp_path, source, adapted):
    """An adapter belongs to the base as it is: it is rounded again from there, and not from the dense weights."""
    adapter, _ = adapted("llama", "nvfp4")
    trained = tk.export(adapter, "compressed-tensors", tmp_path / "a", model=source("llama"))
    _, plain = exported(tmp_path, source, plan_of("nvfp4", rank=None))
    pairs = [(trained.layers[n].rescaled, layer.rescaled) for n, layer in plain.layers.items() if layer.rescaled]
    assert len(pairs) >= 6 and all(0 < near < 0.06 < far < 0.2 for near, far in pairs)


def test_a_group_that_is_quantized_in_part_is_refused_for_vllm(tmp_path, source):
    keep = ("model.layers.0.self_attn.v_proj",)
    with pytest.raises(InputError, match=r"q_proj is quantized and layer model.layers.0.self_attn.v_proj is not"):
        exported(tmp_path, source, plan_of("nvfp4", keep, rank=None))
    _, report = exported(tmp_path, source, plan_of("nvfp4", keep, rank=None), fused="separate")
    assert any("vLLM does not read them rightly" in note for note in report.notes)


def test_a_base_that_an_initializer_made_is_kept_or_refused(tmp_path, source):
    plan = plan_of("nvfp4", initializer="loftq")
    folder = begin(tmp_path / "starts", source("llama"), plan)
    give = {"model": source("llama")}
    with pytest.raises(InputError, match=r"a base that an initializer made, under a scale of its own"):
        tk.export(folder, "compressed-tensors", tmp_path / "no", **give)
    kept = tk.export(folder, "compressed-tensors", tmp_path / "kept", fused="separate", **give)
    assert {layer.base for layer in kept.layers.values()} == {"start"} and kept.start is not None
    stored = load_file(tmp_path / "kept" / "model.safetensors")
    from toolkit.runs import starts

    for name in kept.layers:
        base = starts.read(folder, name).base.tensors
        assert torch.equal(stored[f"{name}.weight_packed"].view(-1), base["codes"])
        assert torch.equal(stored[f"{name}.weight_scale"].view(torch.uint8), base["scales"].view(torch.uint8))
    anew = tk.export(folder, "compressed-tensors", tmp_path / "anew", fused="requantize", **give)
    moved = [layer.rescaled for layer in anew.layers.values() if layer.rescaled is not None]
    assert moved and all(0 < m < 0.06 for m in moved)


@pytest.mark.parametrize("initializer", ["loftq(iterations=1)", "pissa"])
def test_a_base_whose_error_an_adapter_was_fitted_to_is_not_moved(tmp_path, source, initializer):
    """One pass of LoftQ leaves the base as the quantizer makes it; A and B fit no other."""
    plan = plan_of("nvfp4", initializer=initializer)
    folder = begin(tmp_path / "starts", source("llama"), plan, initializer)
    with pytest.raises(InputError, match=r"proj has a base .*under a scale of its own.*toolkit fuse"):
        tk.export(folder, "compressed-tensors", tmp_path / "no", model=source("llama"))
    kept = tk.export(folder, "compressed-tensors", tmp_path / "kept", model=source("llama"), fused="separate")
    assert all(layer.rescaled is None for layer in kept.layers.values())
    plan_of("nvfp4", rank=None).save(tmp_path / "plan.json")
    shared = tk.export(tmp_path / "plan.json", "compressed-tensors", tmp_path / "plain", model=source("llama"))
    assert any(layer.rescaled for layer in shared.layers.values())
    again = begin(tmp_path / "again", source("llama"), tk.fuse(plan, source("llama")), initializer)
    fused = tk.export(again, "compressed-tensors", tmp_path / "fused", model=source("llama"))
    assert all(layer.rescaled is None for layer in fused.layers.values())


def test_without_the_library_it_is_said_that_nothing_was_read_back(tmp_path, source, monkeypatch):
    plan = plan_of("mxfp4", rank=None)
    _, checked = exported(tmp_path, source, plan)
    assert checked.checked and compressed_tensors.UNREAD not in checked.notes
    for name in [name for name in sys.modules if name.partition(".")[0] == "compressed_tensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    _, unread = exported(tmp_path, source, plan, force=True)
    assert unread.checked == [] and compressed_tensors.UNREAD in unread.notes
    _, unasked = exported(tmp_path, source, plan, force=True, verify=False)
    assert unasked.checked == [] and unasked.notes == []


def test_stock_peft_on_the_decoded_base_has_the_logits_of_the_run(tmp_path, source, adapted):
    """MXFP4 is decoded alike by both."""
    folder = begin(tmp_path / "starts", source("llama"), plan_of("mxfp4", initializer="loftq"))
    adapter, ours = adapted("llama", "mxfp4", initializer="loftq", start=folder)
    tk.export(adapter, "compressed-tensors", tmp_path / "base", model=source("llama"), start=folder)
    tk.export(adapter, "peft", tmp_path / "out", model=source("llama"), start=folder, base=tmp_path / "base")
    config = CompressedTensorsConfig(dequantize=True)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config, dtype=torch.bfloat16)
    before = logits(base.eval())
    theirs = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert torch.equal(logits(theirs), logits(ours)) and not torch.equal(before, logits(ours))


def test_a_plan_that_is_fused_first_is_written_bit_for_bit(tmp_path, source):
    """A base that an initializer made under a shared scale needs no rounding again, and is the built model's."""
    plan = tk.fuse(plan_of("nvfp4", initializer="loftq"), source("llama"))
    before = dense(source("llama"))
    q, k, v, o = (f"model.layers.0.self_attn.{r}_proj" for r in "qkvo")
    largest = max(before[n].abs().max().item() for n in (q, k, v))
    assert {plan.of(n).quantizer for n in (q, k, v)} == {f"nvfp4(amax={largest})"}
    assert plan.of(o).quantizer == "nvfp4" and plan.fingerprint is not None
    folder = begin(tmp_path / "starts", source("llama"), plan)
    report = tk.export(folder, "compressed-tensors", tmp_path / "base", model=source("llama"))
    assert {layer.base for layer in report.layers.values()} == {"start"}
    assert report.notes == ["the base alone: the adapter is exported apart, by the format peft"]
    assert all(layer.rescaled is None for layer in report.layers.values())
    stored = load_file(tmp_path / "base" / "model.safetensors")
    from toolkit.runs import starts

    for name in (q, k, v):
        base = starts.read(folder, name).base.tensors
        assert torch.equal(stored[f"{name}.weight_packed"].view(-1), base["codes"])
        assert stored[f"{name}.weight_global_scale"] == stored[f"{q}.weight_global_scale"]
    ours = tk.build(source("llama"), plan, device="cpu", dtype="bfloat16", start=folder)
    assert ours.plan.start == report.start


def test_a_group_in_part_or_without_scales_is_not_fused(source):
    keep = "model.layers.0.self_attn.v_proj"
    plan = tk.fuse(plan_of("nvfp4", (keep,), rank=None), source("llama"))
    assert plan.of("model.layers.0.self_attn.q_proj").quantizer == "nvfp4" and plan.of(keep).quantizer == "none"
    assert plan.of("model.layers.1.self_attn.q_proj").quantizer.startswith("nvfp4(amax=")
    plain = plan_of("mxfp4", rank=None)
    assert tk.fuse(plain, source("llama")).layers == plain.layers


@given(seed=st.integers(0, 2**31), factor=st.floats(0.25, 8))
def test_an_amax_that_is_given_makes_the_scale(seed, factor):
    """At the weight's own amax nothing changes; the key is read back; below it values saturate."""
    weight = torch.randn(8, 48, generator=torch.Generator().manual_seed(seed))
    own = weight.abs().max().item()
    plain = registry.make("quantizer", "nvfp4").quantize(weight)
    same = registry.make("quantizer", f"nvfp4(amax={own})").quantize(weight)
    assert all(torch.equal(same.tensors[k], t) for k, t in plain.tensors.items())
    given_ = registry.make("quantizer", f"nvfp4(amax={own * factor})")
    assert registry.make("quantizer", given_.key) == given_
    packed = given_.quantize(weight)
    assert packed.tensors["global_scale"].item() == pytest.approx(own * factor / 2688, rel=1e-6)
    assert packed.dequantize().abs().max() <= own * factor * 1.0001 or factor > 1
    with pytest.raises(InputError, match="no amax of -1"):
        registry.make("quantizer", "nvfp4(amax=-1)")


def test_fused_groups_by_whole_names():
    names = ["a.q_proj", "a.k_proj", "b.q_proj", "b.qkv_proj", "b.gate", "b.gate_proj", "b.up_proj", "x.w1", "x.w3"]
    assert compressed_tensors.fused(names) == [["a.q_proj", "a.k_proj"], ["b.gate_proj", "b.up_proj"], ["x.w1", "x.w3"]]


# what cannot be held


@pytest.mark.parametrize(
    ("family", "quantizer", "message"),
    [
        ("llama", "nf4", r"quantized by nf4, which compressed-tensors cannot hold; it holds mxfp4, nvfp4, and 16 bit"),
        ("gpt2", "nvfp4", r"layer transformer.h.0.attn.c_attn is a Conv1D"),
        ("mixtral", "mxfp4", r"is one expert of a stacked parameter"),
    ],
)
def test_what_the_format_cannot_hold_is_named(tmp_path, source, family, quantizer, message):
    with pytest.raises(InputError, match=message):
        exported(tmp_path, source, plan_of(quantizer, rank=None), family)


def test_a_width_of_no_whole_blocks_is_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(40, 8)

    from toolkit.records.plan import LayerPlan
    from toolkit.runs.exporting.weights import Opened

    model = Odd()
    layers = {layer.name: layer for layer in layers_of(model)}
    for quantizer, multiple in (("nvfp4", 16), ("mxfp4", 32)):
        opened = Opened(model, layers, {"up": LayerPlan(quantizer=quantizer)}, "", torch.float32, None)
        with pytest.raises(InputError, match=rf"layer up has 40 input features, and .* a whole number of {multiple}"):
            layouts(opened, "compressed-tensors")


def test_a_file_that_is_not_read_as_written_is_no_export(tmp_path, source):
    plan = plan_of("mxfp4", rank=None)
    folder, report = exported(tmp_path, source, plan)
    assert report.checked == [
        "read by compressed-tensors: 14 layers quantized and no other, decoded in bfloat16 bit for bit"
    ]
    opened = open_model(read(tmp_path / "plan.json", model=source("llama")))
    held, _ = pack(opened, layouts(opened, "compressed-tensors"), {}, onto="base")
    assert compressed_tensors.check(folder, held, str(source("llama")))
    held["model.layers.0.mlp.up_proj"].packed.tensors["scales"][3, 1] += 1
    with pytest.raises(RunError, match=r"layer model.layers.0.mlp.up_proj: weight_scale is not read"):
        compressed_tensors.check(folder, held, str(source("llama")))
    del held["model.layers.0.mlp.up_proj"]
    with pytest.raises(RunError, match=r"reads model.layers.0.mlp.up_proj otherwise than planned"):
        compressed_tensors.check(folder, held, str(source("llama")))
