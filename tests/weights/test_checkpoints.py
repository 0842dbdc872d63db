"""Reading safetensors: the same tensors as the safetensors library, mapped and not copied; and every refusal."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from toolkit.errors import InputError
from toolkit.weights.checkpoints import open_checkpoint, read_header


@pytest.fixture
def sharded(build, tmp_path):
    build("llama", dtype=torch.float16).save_pretrained(tmp_path, max_shard_size="30kB")
    return tmp_path


def test_tensors_equal_those_of_the_safetensors_library(llama_folder):
    checkpoint = open_checkpoint(llama_folder)
    expected = load_file(llama_folder / "model.safetensors")
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint[name].dtype == tensor.dtype
        assert torch.equal(checkpoint[name], tensor)
        assert checkpoint.tensors[name].elements == tensor.numel()


def test_shards_are_read_through_the_index(sharded):
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 3
    expected = {name: t for shard in shards for name, t in load_file(shard).items()}
    for path in (sharded, sharded / "model.safetensors.index.json"):
        checkpoint = open_checkpoint(path)
        assert set(checkpoint.tensors) == set(expected)
        assert all(torch.equal(checkpoint[n], t) for n, t in expected.items())


def test_a_tensor_is_mapped_and_not_copied(llama_folder):
    checkpoint = open_checkpoint(llama_folder)
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint[name].data_ptr() == checkpoint[name].data_ptr()
    before = (llama_folder / "model.safetensors").read_bytes()
    checkpoint[name].zero_()  # a private mapping: the file stays as it was
    assert (llama_folder / "model.safetensors").read_bytes() == before


def test_a_header_of_any_length_is_read(tmp_path):
    """The format does not ask for padding: tensors may start at any byte."""
    values = torch.randn(5, 3)
    for pad in range(4):
        text = json.dumps({"w": {"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 60]}}).encode() + b" " * pad
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + values.numpy().tobytes())
        (tmp_path / "config.json").write_text("{}")
        assert torch.equal(open_checkpoint(tmp_path)["w"], values)


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_quantized_tensors_are_refused_by_name(tmp_path, dtype, stored):
    save_file({"layer.weight": torch.zeros(4, 4).to(dtype)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=rf"'layer\.weight'.*stored as {stored}.*already quantized"):
        open_checkpoint(tmp_path)["layer.weight"]


def test_an_unknown_tensor_offers_the_closest(llama_folder):
    with pytest.raises(InputError, match=r"did you mean .*'model\.norm\.weight'"):
        open_checkpoint(llama_folder)["model.norm.wieght"]


def test_a_missing_folder_offers_the_closest(tmp_path):
    (tmp_path / "SmolLM2-135M").mkdir()
    with pytest.raises(InputError, match="did you mean 'SmolLM2-135M'"):
        open_checkpoint(tmp_path / "SmolLM2-135m")
    with pytest.raises(InputError, match="there is no folder"):
        open_checkpoint(tmp_path / "nowhere" / "model")


def test_an_empty_folder(tmp_path):
    with pytest.raises(InputError, match="is an empty folder"):
        open_checkpoint(tmp_path)


def test_a_folder_of_other_things(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no safetensors \(found config\.json\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "w.pkl"])
def test_pickle_is_refused_with_the_reason(tmp_path, name):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(InputError, match=r"pickle.*refused.*run any code"):
            open_checkpoint(path)
    assert not marker.exists()


def test_gguf_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.Q4_1.gguf"):
        with pytest.raises(InputError, match=r"GGUF.*gguf_file="):
            open_checkpoint(path)


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match="adapter and no model"):
        open_checkpoint(tmp_path)


def test_shards_without_their_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_checkpoint(sharded)


def test_no_config(llama_folder, tmp_path):
    shutil.copy(llama_folder / "model.safetensors", tmp_path)
    with pytest.raises(InputError, match=r"no file .*config\.json"):
        open_checkpoint(tmp_path)


def test_an_absent_shard_is_named(sharded):
    gone = sorted(sharded.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(InputError, match=f"1 of them is not in .*{gone.name}"):
        open_checkpoint(sharded)


def test_an_absent_tensor_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shard = next(iter(data["weight_map"].values()))
    data["weight_map"]["model.layers.9.extra.weight"] = shard
    index.write_text(json.dumps(data))
    with pytest.raises(InputError, match=rf"lack, such as 'model\.layers\.9\.extra\.weight' in {shard}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_an_index_without_a_map(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="has no `weight_map`"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", ".."])
def test_an_index_reaches_no_file_outside_its_folder(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="a shard is a plain file beside its index"):
        open_checkpoint(tmp_path)


def test_a_git_lfs_pointer_is_told_apart(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="Git LFS pointer"):
        open_checkpoint(tmp_path)


def test_truncation_says_which_tensor_is_cut(llama_folder, tmp_path):
    whole = (llama_folder / "model.safetensors").read_bytes()
    file = tmp_path / "model.safetensors"
    file.write_bytes(whole[:-10])
    with pytest.raises(InputError, match=r"model\.safetensors is truncated: tensor '.*' ends at byte"):
        read_header(file)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_is_an_input_error(llama_folder, tmp_path, data):
    whole = (llama_folder / "model.safetensors").read_bytes()
    length = data.draw(st.one_of(st.integers(0, 4000), st.integers(0, len(whole) - 1)))
    file = tmp_path / "model.safetensors"
    file.write_bytes(whole[:length])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_header(file)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=300))
def test_junk_is_an_input_error(tmp_path, junk):
    file = tmp_path / "model.safetensors"
    file.write_bytes(junk)
    if junk[:8] == (2).to_bytes(8, "little") and junk[8:10] == b"{}":
        assert read_header(file) == {}
        return
    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_header(file)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [2, 2]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]},
        [1],
        7,
    ],
)
def test_a_damaged_header_is_an_input_error(tmp_path, entry):
    text = json.dumps({"w": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(InputError, match="header is damaged"):
        read_header(file)
