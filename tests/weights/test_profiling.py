"""The profile's numbers against float64 numpy and bitsandbytes; what it refuses, warns of, and does not need."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import toolkit as tk
from toolkit.errors import InputError
from toolkit.interfaces import Errors, Quantizer
from toolkit.weights import native
from toolkit.weights.layers import layers_of
from toolkit.weights.profiling import fingerprint_of, profile


class Thirds(Quantizer):
    """Rounds to multiples of 1/3 through a path of its own; the oracle below does it in numpy."""

    name = "thirds"

    def encode(self, weight):
        return {"code": (weight.float() * 3).round()}

    def decode(self, tensors, shape):
        return tensors["code"] / 3


def numpy_errors(weight: torch.Tensor, rounded: np.ndarray) -> dict[str, float]:
    exact = weight.detach().float().numpy().astype(np.float64)
    error = exact - rounded.astype(np.float64)
    return {
        "mse": (error**2).mean(),
        "mae": np.abs(error).mean(),
        "relative": np.linalg.norm(error) / np.linalg.norm(exact),
        "max": np.abs(error).max(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "mixtral"])
def test_numbers_equal_float64_numpy(kind, dtype, build, tmp_path):
    model = build(kind, dtype=dtype)
    model.save_pretrained(tmp_path)
    made = profile(tmp_path, Thirds())
    for layer, row in zip(layers_of(model), made.layers, strict=True):
        exact = layer.weight().float().numpy().astype(np.float64)
        assert row.shape == exact.shape and row.parameters == exact.size and row.bytes == 2 * exact.size
        assert row.norm == pytest.approx(np.linalg.norm(exact), rel=1e-12)
        assert row.density == pytest.approx(np.abs(exact).mean(), rel=1e-12)
        steps = np.rint(layer.weight().float().numpy() * np.float32(3)) / np.float32(3)
        expected = numpy_errors(layer.weight(), steps)
        assert row.error["thirds"].model_dump() == pytest.approx(expected | {"bytes": 4 * exact.size}, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [True, False])
def test_nf4_errors_equal_those_of_bitsandbytes(dtype, double, build, tmp_path):
    """bitsandbytes quantizes each weight as (out, in), rows below one another, in blocks of 64.

    Rows are whole blocks here: its CPU dequantizer (0.50) is wrong where a block spans two rows.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    model = build("gpt2", dtype=dtype, n_embd=64, n_inner=128)  # transposed: tells a wrong orientation
    model.save_pretrained(tmp_path)
    key = "nf4" if double else "nf4(double=false)"
    made = profile(tmp_path, key)
    for layer, row in zip(layers_of(model), made.layers, strict=True):
        weight = layer.weight().contiguous()
        packed, state = functional.quantize_4bit(
            weight.float(), blocksize=64, quant_type="nf4", compress_statistics=double
        )
        back = functional.dequantize_4bit(packed, state).float().numpy()
        kept = [packed, state.absmax] + ([state.state2.absmax, state.offset] if double else [])
        expected = numpy_errors(weight, back) | {"bytes": sum(t.nbytes for t in kept)}
        assert row.error[key].model_dump() == pytest.approx(expected, rel=1e-6)
        assert row.error[key].bytes == expected["bytes"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_scale(rows, columns, scale, dtype, seed):
    linear = nn.Linear(columns, rows, bias=False)
    generator = torch.Generator().manual_seed(seed)
    linear.weight = nn.Parameter((torch.randn(rows, columns, generator=generator) * scale).to(dtype))
    row = profile(nn.ModuleDict({"a": linear}), "nf4").layers[0]
    exact = linear.weight.detach().float().numpy().astype(np.float64)
    assert row.norm == pytest.approx(np.linalg.norm(exact), rel=1e-12, abs=1e-300)
    assert row.density == pytest.approx(np.abs(exact).mean(), rel=1e-12, abs=1e-300)
    errors = row.error["nf4"]
    assert errors.mse == pytest.approx((errors.relative * row.norm) ** 2 / exact.size, rel=1e-9, abs=1e-300)
    assert errors.mae <= math.sqrt(errors.mse) * (1 + 1e-12) <= errors.max * (1 + 1e-6) + 1e-300
    assert errors.max <= np.abs(exact).max() + 1e-300


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.randoms())
def test_the_order_of_tensors_in_the_file_changes_nothing(llama_folder, tmp_path, order):
    tensors = list(load_file(llama_folder / "model.safetensors").items())
    order.shuffle(tensors)
    header, at = {}, 0
    for name, tensor in tensors:
        size = tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    body = b"".join(t.view(torch.uint8).numpy().tobytes() for _, t in tensors)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    (tmp_path / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    found, expected = profile(tmp_path, ()), profile(llama_folder, ())
    assert (found.layers, found.fingerprint) == (expected.layers, expected.fingerprint)


def test_several_quantizers_in_one_pass(llama_folder):
    both = profile(llama_folder, ["nf4", "nf4(block=128)", "nf4"])
    assert both.quantizers == ["nf4", "nf4(block=128)"]
    for key in both.quantizers:
        assert both.errors(key).tolist() == profile(llama_folder, key).errors(key).tolist()
    assert both.errors("nf4").tolist() != both.errors("nf4(block=128)").tolist()


def test_keys_are_canonical(llama_folder):
    assert profile(llama_folder, "nf4( double=False, block=64)").quantizers == ["nf4(double=false)"]


def test_nf4_where_no_quantizer_is_named(llama_folder):
    assert tk.profile(llama_folder).quantizers == ["nf4"]


def test_the_profile_goes_to_a_file_and_back(llama_folder, tmp_path):
    made = profile(llama_folder)
    made.save(tmp_path / "profile.json")
    assert tk.Profile.load(tmp_path / "profile.json") == made
    data = json.loads((tmp_path / "profile.json").read_text())
    assert {"schema", "model", "fingerprint", "layers"} <= set(data)
    wanted = {"name", "tensor", "role", "block", "shape", "parameters", "bytes", "norm", "density", "error"}
    assert wanted == set(data["layers"][0])
    assert set(data["layers"][0]["error"]["nf4"]) == {"mse", "mae", "relative", "max", "bytes"}


def test_the_model_is_named_and_its_reference_told(llama_folder, build):
    made = profile(llama_folder, ())
    assert made.model == str(llama_folder) and made.blocks == 3 and made.head == "lm_head"
    assert made.reference.dtype == "bfloat16" and not made.reference.lattice
    assert "bfloat16" in made.reference.note
    assert profile(build("llama"), ()).model == "LlamaForCausalLM"
    assert profile(build("llama"), ()).reference.dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantized_four_bit_weights_are_told(build, tmp_path, capsys, dtype):
    model = build("llama")
    with torch.no_grad():
        for layer in layers_of(model):  # 16 levels in each run of 32, with its own step and minimum
            weight = layer.weight()
            runs = weight.view(-1, 16)
            low, high = runs.amin(1, keepdim=True), runs.amax(1, keepdim=True)
            step = (high - low) / 15
            runs.copy_(((runs - low) / step).round() * step + low)
    model.to(dtype).save_pretrained(tmp_path)
    made = profile(tmp_path, ())
    assert not made.reference.lattice  # two lattices in each run of 32: more than 16 values
    with torch.no_grad():
        for layer in layers_of(model):
            weight = layer.weight()
            flat = weight.view(-1, 16)
            flat.copy_(flat[:1].expand_as(flat))
    capsys.readouterr()
    for source in (model, tmp_path):
        model.save_pretrained(tmp_path)
        made = profile(source, ())
        assert made.reference.lattice and "already rounded" in made.reference.note
        assert "already rounded weights" in capsys.readouterr().err


def test_one_unrounded_layer_makes_it_no_lattice(build, capsys):
    model = build("llama")
    with torch.no_grad():
        for layer in layers_of(model)[1:]:
            layer.weight().copy_(layer.weight().sign())
    assert not profile(model, ()).reference.lattice
    with torch.no_grad():
        layers_of(model)[0].weight().sign_()
    assert profile(model, ()).reference.lattice
    with torch.no_grad():
        for layer in layers_of(model):
            layer.weight().zero_()
    assert not profile(model, ()).reference.lattice  # zeros tell of no format


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(build, tmp_path, bad):
    model = build("mixtral", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2, 100, 7] = bad
    model.save_pretrained(tmp_path)
    name = r"layer model\.layers\.1\.mlp\.experts\.gate_up_proj\[2\] holds NaN or infinity in 1 of its 7,680 weights"
    for source in (model, tmp_path):
        with pytest.raises(InputError, match=name):
            profile(source, ())
        with pytest.raises(InputError, match=name):
            fingerprint_of(source)
    with pytest.raises(InputError, match=r"experts\.2\.w1\.weight, .*experts\.2\.w3\.weight"):
        profile(tmp_path, ())


def test_errors_of_a_quantizer_name_the_layer(llama_folder):
    class Picky(Thirds):
        name = "picky"

        def measure(self, weight) -> Errors:
            raise InputError("this weight does not suit me")

    with pytest.raises(InputError, match=r"layer model\.layers\.0\.self_attn\.q_proj: this weight does not suit me"):
        profile(llama_folder, Picky())


def test_an_unknown_quantizer_offers_the_closest_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match="no quantizer is called 'nf5'; did you mean 'nf4'"):
        profile(tmp_path / "nowhere", "nf5")


def test_the_fingerprint_follows_names_shapes_and_values(build):
    model = build("llama")
    first = fingerprint_of(model)
    assert first == profile(model, ()).fingerprint == profile(model, "nf4", include_head=True).fingerprint
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
    assert fingerprint_of(model) == first  # the fingerprint is of the layers
    weight = model.model.layers[2].mlp.down_proj.weight
    with torch.no_grad():
        old = weight[0, 0].item()
        weight[0, 0] = float(np.nextafter(np.float32(old), np.float32(9)))
    changed = fingerprint_of(model)
    assert changed != first
    with torch.no_grad():
        weight[0, 0] = old
    assert fingerprint_of(model) == first
    model.model.layers[2].mlp.down_proj = nn.Linear(48, 80, bias=False)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.copy_(weight.reshape(80, 48))
    assert fingerprint_of(model) != first  # the same values in another shape
    assert fingerprint_of(nn.ModuleDict({"w": build("llama").model})) != first  # the same values under other names


def test_profiles_of_another_model_are_told_apart(build):
    a, b = profile(build("llama", seed=0), ()), profile(build("llama", seed=1), ())
    with pytest.raises(InputError, match="whose weights have changed since"):
        a.expect(b.model, b.fingerprint, "the plan")


def test_float64_weights_are_measured_as_float32():
    wide = nn.Linear(40, 30).double()
    made = profile(nn.ModuleDict({"a": wide}), "nf4")
    assert made.reference.dtype == "float64"
    narrow = nn.Linear(40, 30)
    narrow.weight = nn.Parameter(wide.weight.detach().float())
    assert profile(nn.ModuleDict({"a": narrow}), "nf4").layers == made.layers


def test_mixed_dtypes_are_all_told(build, tmp_path):
    build("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, tmp_path / "model.safetensors")
    assert profile(tmp_path, ()).reference.dtype == "bfloat16 and float32"


def test_the_model_object_is_left_as_it_was(build):
    model = build("gpt2", dtype=torch.bfloat16)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    profile(model, "nf4", include_head=True)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_a_quantized_layer_in_the_model_is_refused_by_name(build):
    model = build("llama")
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(InputError, match=r"layer model\.layers\.1\.mlp\.up_proj .* already quantized"):
        profile(model, ())


def test_progress_counts_parameters(llama_folder, capsys):
    calls = []
    made = profile(llama_folder, (), progress=lambda done, total, name: calls.append((done, total, name)))
    assert [c[2] for c in calls] == made.names
    assert calls[-1][0] == calls[-1][1] == made.parameters
    assert capsys.readouterr().err == ""  # no bar where stderr is no terminal
    profile(llama_folder, (), progress=True)


def test_the_fall_back_is_counted_and_gives_the_same_numbers(llama_folder, monkeypatch, capsys):
    fast = profile(llama_folder)
    if fast.fallbacks:
        pytest.skip(f"no native kernel here: {native.why_not()}")
    monkeypatch.setenv("TOOLKIT_NATIVE", "0")
    slow = profile(llama_folder)
    assert list(slow.fallbacks.values()) == [len(slow)]
    assert "TOOLKIT_NATIVE=0" in next(iter(slow.fallbacks)) and "TOOLKIT_NATIVE=0" in capsys.readouterr().err
    assert slow.fingerprint == fast.fingerprint
    for a, b in zip(slow.layers, fast.layers, strict=True):
        assert a.norm == pytest.approx(b.norm, rel=1e-12)
        assert a.error["nf4"].model_dump() == pytest.approx(b.error["nf4"].model_dump(), rel=1e-9)


FRESH = """
import sys
for name in ("transformers", "bitsandbytes", "scipy", "matplotlib", "huggingface_hub"):
    sys.modules[name] = None  # an import of it fails
import toolkit as tk
made = tk.profile(sys.argv[1])
print(len(made), made.fingerprint)
"""


def test_files_are_profiled_without_transformers_or_bitsandbytes(llama_folder):
    done = subprocess.run([sys.executable, "-c", FRESH, str(llama_folder)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["21", fingerprint_of(llama_folder)], done.stderr


MEMORY = """
import sys, threading, time
import torch
import toolkit as tk
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024
tk.profile(sys.argv[1])  # imports, the kernel, the thread pool
peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)
threading.Thread(target=watch, daemon=True).start()
for folder in sys.argv[2:]:
    base = peak = anonymous()
    made = tk.profile(folder)
    print(len(made), peak - base)
done = True
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
def test_one_layer_is_in_memory_at_a_time(tmp_path, llama_folder, build):
    """Views, transposed weights and experts of two parts: less than 3 times the largest layer in float32."""
    size = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {"llama": size, "gpt2": {"n_embd": 1024, "n_inner": 3072, "n_head": 8}, "mixtral": size}
    expected = []
    for kind, options in sizes.items():
        model = build(kind, dtype=torch.bfloat16, **options)
        model.save_pretrained(tmp_path / kind)
        layers = layers_of(model)
        largest = 4 * max(layer.parameters for layer in layers)
        assert sum(2 * layer.parameters for layer in layers) > 3 * largest  # keeping all of them would be told
        expected.append((len(layers), largest))
    folders = [str(tmp_path / kind) for kind in sizes]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(llama_folder), *folders], capture_output=True, text=True, check=False
    )
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [f[0] for f in found] == [e[0] for e in expected], done.stderr
    ratios = {kind: extra / largest for kind, (_, extra), (_, largest) in zip(sizes, found, expected, strict=True)}
    assert max(ratios.values()) < 3, ratios
