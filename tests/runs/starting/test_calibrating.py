"""Calibration block by block, against a reference that runs the whole model anew for every group of layers."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPTNeoXConfig, OPTConfig, Qwen3MoeConfig

import toolkit as tk
from tests.conftest import COMMON, byte_tokenizer
from tests.runs.starting.conftest import LETTERS, make
from toolkit.errors import InputError, RunError
from toolkit.records.plan import LayerPlan, Plan
from toolkit.records.start import StartFile
from toolkit.runs import starts
from toolkit.runs.starting.calibrating import UNSEEN, calibrate
from toolkit.weights.layers import layers_of

WINDOWS, WINDOW = 11, 24  # 11 = 4 + 4 + 3: an unequal last batch
ADAPTER = {"rank": 3, "alpha": 16.0, "scaler": "rslora"}
STAGES = {
    "llama": [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]],
    "phi3": [["qkv_proj"], ["o_proj"], ["gate_up_proj"], ["down_proj"]],
    "gpt2": [["attn.c_attn"], ["attn.c_proj"], ["mlp.c_fc"], ["mlp.c_proj"]],
    "mixtral": [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["experts.gate_up_proj"], ["experts.down_proj"]],
}


def ids(windows: int = WINDOWS, window: int = WINDOW) -> torch.Tensor:
    tokens = byte_tokenizer()(LETTERS)["input_ids"][: windows * window]
    return torch.tensor(tokens).view(windows, window)


def settings(**changes):
    return {
        "tokenizer": byte_tokenizer(),
        "windows": WINDOWS,
        "window": WINDOW,
        "batch": 4,
        "dtype": "float32",
        "progress": False,
    } | changes


def inputs_of(model: nn.Module, names: list[str], tokens: torch.Tensor, rounding: dict[str, str]) -> dict:
    """Layer → all its input rows, by a plain forward pass of the whole model over all windows.

    Args:
        rounding: layer → quantizer key, of the layers whose input is rounded row by row.
    """
    found: dict[str, torch.Tensor] = {}
    handles = []
    layers = {layer.name: layer for layer in layers_of(model)}

    def hook(name):
        def see(_, args):
            x = args[0]
            if name in rounding:
                rows = [tk.quantizer(rounding[name]).each_row(row[None]) for row in x.reshape(-1, x.shape[-1])]
                x = torch.cat(rows).view(x.shape)
            if name in names:
                found[name] = x.reshape(-1, x.shape[-1]).detach()
            return (x, *args[1:])

        return see

    def experts(path):
        def see(module, args):
            hidden, chosen, _ = args
            for e in range(module.num_experts):
                rows = hidden.reshape(-1, hidden.shape[-1])[(chosen == e).any(-1)]
                found[f"{path}.gate_up_proj[{e}]"] = rows
                gate, up = (rows @ module.gate_up_proj[e].T).chunk(2, dim=-1)
                found[f"{path}.down_proj[{e}]"] = nn.functional.silu(gate) * up

        return see

    for name, layer in layers.items():
        if layer.index is None:
            handles.append(layer.module.register_forward_pre_hook(hook(name)))
        elif layer.index == 0 and layer.parameter == "gate_up_proj":
            handles.append(layer.module.register_forward_pre_hook(experts(layer.path)))
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: found[name] for name in names if name in found}


def reference(model, plan, stages, folder, rounding=None, tokens=None):
    """Layer → exact R, each with every layer before it replaced by its start in the folder."""
    model = model.float()
    tokens = ids() if tokens is None else tokens
    layers = {layer.name: layer for layer in layers_of(model)}
    found = {}
    for block in range(3):
        for stage in stages:
            names = [n for n, one in layers.items() if one.block == block and any(part in n for part in stage)]
            for name, rows in inputs_of(model, names, tokens, rounding or {}).items():
                wide = rows.double()
                found[name] = (wide.T @ wide / max(len(rows), 1), len(rows))
            for name in names:
                if plan.of(name).initializer == "zero":
                    continue
                start = starts.read(folder, name)
                with torch.no_grad():
                    layers[name].weight().copy_(start.effective(torch.float32))
    return found


def agree(seen, exact):
    assert set(seen) == {name for name, (_, tokens) in exact.items() if tokens}
    for name, moments in seen.items():
        second, tokens = exact[name]
        assert moments.tokens == tokens, name
        assert (moments.second.double() - second).abs().max() < 2e-4 * second.abs().max(), name


@pytest.mark.parametrize("family", list(STAGES))
def test_moments_are_those_of_the_whole_model_with_all_layers_before_replaced(family, watcher, letters, tmp_path):
    about = {} if family == "mixtral" else ADAPTER
    plan = Plan.protecting(None, "nf4", initializer="watcher", **about)
    dense = make(family)
    before = {name: p.clone() for name, p in dense.state_dict().items()}
    file = calibrate(plan, letters, tmp_path, model=dense, **settings())
    assert all(torch.equal(p, before[name]) for name, p in dense.state_dict().items()), "the model was changed"
    assert set(file.layers) == {layer.name for layer in layers_of(dense)}
    agree(watcher.seen, reference(make(family), plan, STAGES[family], tmp_path))
    assert file.calibration.tokens == WINDOWS * WINDOW and file.calibration.windows == WINDOWS
    if family != "mixtral":
        assert all(m.tokens == WINDOWS * WINDOW for m in watcher.seen.values())
    shared = [n for n in watcher.seen if n.endswith(("layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"))]
    for name in shared:  # one input, one R
        assert torch.equal(watcher.seen[name].second, watcher.seen[shared[0]].second)


def test_inputs_are_rounded_as_they_will_be(watcher, letters, tmp_path):
    """Moments and forward pass see each token rounded alone; layers kept in 16 bit take theirs as they are."""
    plan = Plan.protecting(None, "nvfp4", initializer="watcher(activations=nvfp4)")
    kept = {
        f"model.layers.{at}.{name}": LayerPlan(quantizer="none")
        for at, name in ((0, "self_attn.o_proj"), (1, "mlp.up_proj"))
    }
    plan = plan.model_copy(update={"layers": kept})
    dense = make()
    rounding = {layer.name: "nvfp4" for layer in layers_of(dense) if layer.name not in kept}
    few = ids(3, 12)
    file = calibrate(plan, letters, tmp_path, model=dense, **settings(windows=3, window=12, batch=2))
    assert file.calibration.activations == "nvfp4" and not set(kept) & set(file.layers)
    assert all(m.activations == "nvfp4" for m in watcher.seen.values())
    exact = reference(make(), plan, STAGES["llama"], tmp_path, rounding, few)
    agree(watcher.seen, {name: each for name, each in exact.items() if name not in kept})
    plain = reference(make(), plan, STAGES["llama"], tmp_path, tokens=few)
    name = "model.layers.0.mlp.down_proj"
    assert (plain[name][0] - exact[name][0]).abs().max() > 1e-3 * exact[name][0].abs().max()


def test_without_sequence_a_block_is_seen_dense(watcher, letters, tmp_path):
    plan = Plan.protecting(None, "nf4", initializer="watcher", **ADAPTER)
    calibrate(plan, letters, tmp_path, model=make(), **settings(sequential=False))
    together = [[part for stage in STAGES["llama"] for part in stage]]
    agree(watcher.seen, reference(make(), plan, together, tmp_path))


FURTHER = {
    "gemma2": (Gemma2Config, {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}),  # a mask by layer
    "gpt_neox": (GPTNeoXConfig, {}),  # attention and MLP side by side
    "opt": (OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),  # layers outside
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}


@pytest.mark.parametrize("family", list(FURTHER))
def test_blocks_are_called_as_their_model_calls_them(family, watcher, letters, tmp_path):
    """Masks, positions and what stands before the blocks come from a pass through the model's own code."""

    def other() -> nn.Module:
        kind, further = FURTHER[family]
        small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**COMMON, **small, **further))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.15)
        return model.to(torch.bfloat16).eval()

    outside = [layer.name for layer in layers_of(other()) if layer.block is None]
    plan = Plan.protecting(None, "nf4", initializer="watcher")
    plan = plan.model_copy(update={"layers": {name: LayerPlan(quantizer="nvfp4") for name in outside}})
    calibrate(plan, letters, tmp_path, model=other(), **settings(sequential=False))
    dense = other().float()
    for layer in layers_of(dense):
        if layer.name in outside:
            with torch.no_grad():
                layer.weight().copy_(
                    tk.quantizer("nvfp4").quantize(layer.weight().bfloat16()).dequantize(torch.float32)
                )
    exact = reference(dense, plan, [[""]], tmp_path)
    agree(watcher.seen, {name: each for name, each in exact.items() if name not in outside})


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_batches_do_not_matter(batch, watcher, letters, tmp_path):
    plan = Plan.protecting(None, "nvfp4", initializer="watcher(activations=nvfp4)")
    calibrate(plan, letters, tmp_path / "a", model=make(), **settings())
    first = dict(watcher.seen)
    calibrate(plan, letters, tmp_path / "b", model=make(), **settings(batch=batch))
    for name, moments in watcher.seen.items():
        assert moments.tokens == first[name].tokens
        if ".0.self_attn.q_proj" in name:  # later ones may round a tie the other way
            assert torch.allclose(moments.second, first[name].second, rtol=1e-5, atol=1e-6)


def contents(folder):
    return {p.name: p.read_bytes() for p in (folder / "layers").iterdir()}


def tensors(folder):
    """Every tensor of every layer, without the seconds that records hold."""
    from safetensors.torch import load_file

    return {p.name: load_file(p) for p in sorted((folder / "layers").iterdir())}


def same(one, other):
    assert one.keys() == other.keys()
    for name, held in one.items():
        assert held.keys() == other[name].keys()
        assert all(torch.equal(held[key], other[name][key]) for key in held), name


@pytest.mark.parametrize("initializer", ["gptq(activations=nvfp4)", "loftq(base=gptq,iterations=1)"])
def test_resumed_equals_uninterrupted(initializer, letters, tmp_path, checkpoints):
    """Killed in mid-block, the starts are the same bit for bit; from files as from the object."""
    plan = Plan.protecting(None, "nvfp4", initializer=initializer, **ADAPTER)
    about = {key: value for key, value in settings().items() if key != "tokenizer"}
    whole = calibrate(plan, letters, tmp_path / "whole", model=checkpoints(), **about)

    def stop(done, total, name):
        assert total == 21
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(plan, letters, tmp_path / "cut", model=checkpoints(), **about | {"progress": stop})
    assert not (tmp_path / "cut" / starts.REPORT).exists() and len(contents(tmp_path / "cut")) == 10
    kept = contents(tmp_path / "cut")
    resumed = calibrate(plan, letters, tmp_path / "cut", model=checkpoints(), **about)
    assert all(contents(tmp_path / "cut")[name] == held for name, held in kept.items()), "made anew"
    same(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert resumed.base == whole.base
    strip = {"seconds": 0.0}
    assert {n: r.model_copy(update=strip) for n, r in resumed.layers.items()} == {
        n: r.model_copy(update=strip) for n, r in whole.layers.items()
    }
    again = calibrate(plan, letters, tmp_path / "cut", model=checkpoints(), **about)
    assert again == resumed == StartFile.load(tmp_path / "cut" / starts.REPORT)
    model = AutoModelForCausalLM.from_pretrained(checkpoints(), dtype="auto").eval()
    calibrate(plan, letters, tmp_path / "object", model=model, **settings())
    same(tensors(tmp_path / "object"), tensors(tmp_path / "whole"))


def test_what_is_built_computes_what_was_calibrated(letters, tmp_path):
    plan = Plan.protecting(None, "nvfp4", initializer="gptq", **ADAPTER)
    file = calibrate(plan, letters, tmp_path, model=make(), **settings())
    model = tk.build(make(), plan, dtype="float32", start=tmp_path)
    assert model.plan.start == file.base
    dense = make().float()
    with torch.no_grad():
        for layer in layers_of(dense):
            layer.weight().copy_(starts.read(tmp_path, layer.name).effective(torch.float32))
        truth = dense(input_ids=ids(), use_cache=False).logits
        found = model(input_ids=ids(), use_cache=False).logits
    assert (found - truth).abs().max() < 2e-5 * truth.abs().max()
    notes = [r.notes for r in file.layers.values()]
    assert all(n["output_error"] < n["output_error_rounding"] for n in notes)


def test_experts_that_saw_no_token_start_plainly_and_are_named(letters, tmp_path):
    """One letter over and over: every token is the same, and two of four experts see none."""
    text = tmp_path / "a.txt"
    text.write_text("a" * 600)
    plan = Plan.protecting(None, "nvfp4", initializer="gptq")
    dense, where = make("mixtral"), tmp_path / "starts"
    about = settings(windows=4)
    with pytest.raises(RunError, match=r"12 of 36 calibrated layers.*no calibration token.*experts\.gate_up_proj\["):
        calibrate(plan, str(text), where, model=dense, **about)
    assert not (where / starts.REPORT).exists() and len(contents(where)) == 36
    file = calibrate(plan, str(text), where, model=dense, **about, fallbacks=0.4)
    fallen = [name for name, each in file.layers.items() if each.notes.get("fallback") == UNSEEN]
    assert len(fallen) == 12 and all("experts" in name for name in fallen)
    for layer in layers_of(dense):
        if layer.name in fallen:
            start = starts.read(where, layer.name)
            assert torch.equal(start.base.dequantize(), tk.quantizer("nvfp4").quantize(layer.weight()).dequantize())
            assert file.layers[layer.name].base is None and file.layers[layer.name].initializer == "gptq"


def test_layers_that_start_plainly_or_by_weights_alone_are_quantized_on_the_way(watcher, letters, tmp_path):
    plan = Plan.protecting(None, "nf4", initializer="watcher", **ADAPTER)
    adapter = plan.default.adapter
    others = {
        "model.layers.0.self_attn.v_proj": LayerPlan(quantizer="nf4", adapter=adapter, initializer="loftq"),
        "model.layers.2.self_attn.q_proj": LayerPlan(quantizer="nf4", adapter=adapter, initializer="loftq"),
    }
    plan = plan.model_copy(update={"layers": others})
    file = calibrate(plan, letters, tmp_path, model=make(), **settings())
    assert set(others) < set(file.layers) and not set(others) & set(watcher.seen)
    exact = reference(make(), plan, STAGES["llama"], tmp_path)
    agree(watcher.seen, {name: each for name, each in exact.items() if name not in others})
    for name in others:
        weight = {layer.name: layer.weight() for layer in layers_of(make())}[name]
        alone = tk.initialize(weight, "loftq", "nf4", name=name, dtype=torch.float32, **ADAPTER)
        found = starts.read(tmp_path, name)
        assert torch.equal(found.A, alone.A) and torch.equal(found.B, alone.B)


@pytest.mark.gpu
def test_a_gpu_comes_to_the_same_moments(watcher, letters, tmp_path):
    """From a model object on the GPU as from one on the CPU, one block on the device at a time."""
    plan = Plan.protecting(None, "nf4", initializer="watcher", **ADAPTER)
    calibrate(plan, letters, tmp_path / "cpu", model=make(), **settings(device="cpu"))
    first = dict(watcher.seen)
    for name, model in (("moved", make()), ("there", make().cuda())):
        calibrate(plan, letters, tmp_path / name, model=model, **settings(device="cuda"))
        for layer, moments in watcher.seen.items():
            assert moments.second.is_cuda and moments.tokens == first[layer].tokens
            gap = (moments.second.cpu() - first[layer].second).abs().max()
            assert gap < 2e-3 * first[layer].second.abs().max(), layer


# what is refused


def test_inputs_that_are_not_finite_name_layer_and_window(watcher, letters, tmp_path):
    model = make()
    model.model.layers[1].post_attention_layernorm.weight.data[3] = float("nan")
    plan = Plan.protecting(None, "nf4", initializer="watcher")
    with pytest.raises(
        InputError, match=r"layers\.1\.mlp\.gate_proj: its inputs in window 1 \(and 3 more\) of letters"
    ):
        calibrate(plan, letters, tmp_path, model=model, **settings())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 128, "windows": 1, "text": "short"}, "less than one window of 128"),
        ({"text": "nowhere.txt"}, "no file nowhere.txt"),
        ({"windows": 0}, "windows is 0; at least 1"),
        ({"window": 0}, "window is 0; at least 2"),
        ({"window": -5}, "window is -5; at least 2"),
        ({"batch": 0}, "batch is 0; at least 1"),
        ({"fallbacks": 1.5}, "a share from 0 to 1"),
        ({"tokenizer": None}, "without its tokenizer"),
        ({"model": None}, "names no model"),
        ({"initializer": "loftq", "rank": 3}, r"calibrated \(loftq.*toolkit initialize PLAN"),
        ({"initializer": "zero"}, "starts every layer plainly"),
        ({"initializer": "qera-exact", "rank": 65}, r"layer model\.layers\.0\S*: .*65"),
        ({"mixed": True}, r"rounded by \S+ and layer \S+ by \S+"),
        ({"head": True}, "lm_head lies outside the blocks"),
        ({"window": 4000, "windows": 1, "long": True}, "reads at most"),
    ],
)
def test_bad_input(change, message, watcher, letters, tmp_path):
    change = dict(change)
    initializer, rank = change.pop("initializer", "watcher"), change.pop("rank", None)
    plan = Plan.protecting(None, "nf4", initializer=initializer, rank=rank)
    if change.pop("mixed", False):
        other = LayerPlan(quantizer="nf4", initializer="watcher(activations=nvfp4)")
        plan = plan.model_copy(update={"layers": {"model.layers.1.mlp.up_proj": other}})
    if change.pop("head", False):
        plan = plan.model_copy(update={"layers": {"lm_head": LayerPlan(quantizer="nf4", initializer="watcher")}})
    text = change.pop("text", letters)
    if text == "short" or change.pop("long", False):
        path = tmp_path / "t.txt"
        path.write_text("abc " * (10 if text == "short" else 3000))
        text = str(path)
    with pytest.raises(InputError, match=message):
        calibrate(plan, text, tmp_path / "out", **{"model": make()} | settings() | change)
    assert not list((tmp_path / "out").glob("layers/*"))


def test_a_folder_of_other_settings_is_refused(watcher, letters, tmp_path):
    plan = Plan.protecting(None, "nf4", initializer="watcher")
    where = tmp_path / "starts"
    calibrate(plan, letters, where, model=make(), **settings())
    for change, message in (
        ({"windows": 5}, "calibration windows is 11 there and 5 here"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"batch": 2}, "batch is 4 there and 2 here"),
        ({"model": make(seed=1)}, "fingerprint is"),
    ):
        with pytest.raises(InputError, match=message):
            calibrate(plan, letters, where, **{"model": make()} | settings() | change)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes\.txt"):
        calibrate(plan, letters, other, model=make(), **settings())
    shutil.rmtree(other)
