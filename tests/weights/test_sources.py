"""What is a path and what is a hub id; and that a path never becomes a request."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from toolkit.errors import InputError
from toolkit.weights import demo_model, sources


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def requests(monkeypatch):
    """The files asked of the hub; each request fails as an unreachable hub does."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[tuple[str, str]] = []

    def download(repo, file, **options):
        asked.append((repo, file))
        raise LocalEntryNotFoundError("outgoing traffic has been disabled")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


@pytest.mark.parametrize(
    "model",
    [
        "./model",
        "../model",
        ".",
        "/models/llama",
        "~/models/llama",
        "a/b/c",
        "models\\llama",
        "model.safetensors",
        "org/model.gguf",
        "pytorch_model.bin",
        "org/Model.GGUF",
        "config.yaml",
        "org/model.tar.gz",
        "org/",
        "/name",
        "with space",
        "",
        "C:\\models",
        "nul\0byte",
        "./" + "x" * 300,
        Path("org/name"),
    ],
)
def test_paths_are_local_and_never_asked_of_the_hub(model, requests):
    assert sources.is_local(model)
    with pytest.raises(InputError):
        sources.resolve(Path("gone") if str(model) == "." else model)
    assert requests == []


@pytest.mark.parametrize("model", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B", "org/a_b-c.d"])
def test_hub_ids_are_asked_of_the_hub(model, requests):
    assert not sources.is_local(model)
    with pytest.raises(InputError, match=f"{model} is not in the hub's cache and the hub cannot be reached"):
        sources.resolve(model)
    assert requests == [(model, "config.json")]


@pytest.mark.parametrize(("model", "meant"), [("demoo", "demo"), ("lama-1b", "llama-1b")])
def test_an_unreachable_hub_leaves_room_for_a_slip(here, requests, model, meant):
    (here / "llama-1b").mkdir()
    with pytest.raises(InputError, match=rf"there is no '{model}' here; .*; did you mean '{meant}'\?"):
        sources.resolve(model)


def test_what_exists_here_is_local(here, requests, llama_folder):
    (here / "gpt2").mkdir()
    shutil.copytree(llama_folder, here / "org" / "name")
    assert sources.is_local("gpt2") and sources.is_local("org/name")
    found = sources.resolve("org/name")
    assert (found.folder, found.name, found.hub) == (Path("org/name"), "org/name", False)
    assert requests == []


def test_a_misspelt_name_in_a_folder_here_is_no_request(here, requests):
    (here / "models" / "llama-1b").mkdir(parents=True)
    with pytest.raises(InputError, match=r"did you mean 'llama-1b'.*read as a path, because the folder models exists"):
        sources.resolve("models/lama-1b")
    assert requests == []


def test_a_hub_model_is_fetched_file_by_file(here, monkeypatch, build):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError
    from transformers import AutoModelForCausalLM

    remote = here / "remote"
    build("llama").save_pretrained(remote, max_shard_size="30kB")
    (remote / "pytorch_model.bin").write_bytes(b"never asked for")
    asked = []

    def download(repo, file, **options):
        asked.append(file)
        if not (remote / file).exists():
            raise EntryNotFoundError(f"404 Client Error: {file}")
        return str(remote / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = sources.resolve("org/model")
    assert (found.folder, found.name, found.hub) == (remote, "org/model", True)
    shards = sorted(f.name for f in remote.glob("model-*.safetensors"))
    assert asked == ["config.json", "model.safetensors", "model.safetensors.index.json", *shards]
    assert AutoModelForCausalLM.from_pretrained(remote) is not None  # the fake is a real model


def test_a_cached_sharded_model_needs_no_network(here, monkeypatch, build):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    cached = here / "cached"
    build("llama").save_pretrained(cached, max_shard_size="30kB")

    def download(repo, file, **options):
        if not (cached / file).exists():
            raise LocalEntryNotFoundError("no network")
        return str(cached / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert sources.resolve("org/model").folder == cached


@pytest.mark.parametrize("model", ["a--b/c", "org/name.git"])
def test_names_that_the_hub_does_not_allow(model):
    with pytest.raises(InputError, match=r"no model .* here or on the hub"):
        sources.resolve(model)


def test_a_hub_model_of_pickles_is_refused(monkeypatch, here):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    (here / "config.json").write_text("{}")

    def download(repo, file, **options):
        if file != "config.json":
            raise EntryNotFoundError(f"404 Client Error: {file}")
        return str(here / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(InputError, match="pickle checkpoints are refused"):
        sources.resolve("org/old-model")


def test_the_demo_model_by_its_id_and_by_its_shown_name(monkeypatch, here):
    monkeypatch.setattr(demo_model, "demo_model", lambda: here / "cached")
    monkeypatch.setattr(demo_model, "demo_folder", lambda: here / "cached")
    for name in ("demo", "SmolLM2-135M-Instruct (dequantized Q4_1)"):
        assert not sources.is_local(name)
        assert sources.resolve(name) == sources.Source(here / "cached", "SmolLM2-135M-Instruct (dequantized Q4_1)")
    assert sources.shown(here / "cached") == "SmolLM2-135M-Instruct (dequantized Q4_1)"
    assert sources.shown("other") == "other"
