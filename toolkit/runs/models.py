"""Loading a model and its tokenizer: by Hugging Face id, local directory, or the id of the embedded model.

Only safetensors are read and no code from the hub is run. A model is loaded in the dtype of its checkpoint, so
that it is quantized from the stored values, and cast to the compute dtype afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, RunError, closest
from toolkit.records.profile import PROFILE, Profile

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.weights.layers import Layer

DTYPES = ("float32", "bfloat16", "float16")


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, or CUDA where there is one, else the CPU.

    Raises:
        InputError: an unknown device, or CUDA where there is none.
    """
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"no device is called {str(device)!r}; {closest(str(device), ['cpu', 'cuda'])}") from None
    if chosen.type == "cuda" and (not torch.cuda.is_available() or (chosen.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"device {chosen} is asked for, and this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def compute_dtype(device: torch.device, dtype: str | torch.dtype | None = None) -> torch.dtype:
    """The dtype asked for; else bfloat16 on a device that has instructions for it, and float32 elsewhere.

    Without them bfloat16 is 20 times slower on a CPU. The reports name the dtype, and results of two dtypes are
    never mixed.

    Raises:
        InputError: no float32, bfloat16 or float16.
    """
    import torch

    if dtype is None:
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(f"no compute dtype is called {name!r}; {closest(name, DTYPES)}")
    return getattr(torch, name)


def _has_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 run natively: Ampere GPUs and newer, CPUs with AVX512-BF16 or AMX."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device.type == "cpu" and any(probe is not None and probe() for probe in probes)


def load_model(source: str | Path, *, device: str | torch.device | None = None, attention: str = "sdpa") -> nn.Module:
    """A causal language model in its checkpoint's dtype, in evaluation mode, on the device.

    Raises:
        InputError: no such model, no safetensors in it, an architecture that needs code from the hub, or an
            implementation of attention that is not installed or that the model does not have.
    """
    from transformers import AutoModelForCausalLM

    target = choose_device(device)
    path = _location(source)
    with _reading(source), quiet():
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", use_safetensors=True, trust_remote_code=False, attn_implementation=attention
        )
    return model.eval().requires_grad_(False).to(target)


def load_profiled(source: str | Path, profile: Profile) -> tuple[nn.Module, dict[str, Layer]]:
    """The model that a profile is of, as `load_model` has it, on the CPU; and its layers by name, in profile order.

    Raises:
        InputError: as `load_model`; or the model has other layers than the profile.
        RunError: the model that is built has other weights than its files.
    """
    from toolkit.weights.layers import layers_of
    from toolkit.weights.profiling import fingerprint_of

    model = load_model(source, device="cpu")
    found = fingerprint_of(model)
    if found != profile.fingerprint:
        raise RunError(
            f"the model that transformers builds from {source} has other weights ({found[:12]}) than its files "
            f"({profile.fingerprint[:12]})"
        )
    layers = {layer.name: layer for layer in layers_of(model)}
    if list(layers) != profile.names:
        raise InputError(
            f"{PROFILE} lists {len(profile)} layers, and the model has {len(layers)} (or others): remove that file "
            "from the results folder to have it made anew"
        )
    return model, layers


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a model.

    Raises:
        InputError: the model has none, or it needs code from the hub.
    """
    from transformers import AutoTokenizer

    path = _location(source)
    with _reading(source, "tokenizer"), quiet():
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def skeleton(source: str | Path) -> nn.Module:
    """The model that transformers would build, on the meta device: names and shapes, no weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = _location(source)
    with _reading(source), quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def cast(model: nn.Module, dtype: torch.dtype, *, keep: Container[int] = ()) -> nn.Module:
    """Cast 16- and 32-bit float parameters in place, tied ones together; buffers keep their dtype.

    Buffers hold rotary frequencies and packed weights, which must not be rounded. Parameters that the model
    declares as float32 (`_keep_in_fp32_modules`) stay so, and so do those whose `id` is in `keep`.
    """
    import torch

    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if id(parameter) in keep or parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            continue
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    if hasattr(getattr(model, "config", None), "dtype"):
        model.config.dtype = dtype
    return model


def check_vocabulary(model: Any, rows: Iterable[Sequence[int]]) -> None:
    """Refuse token ids that the model has no embedding for: a GPU would stop at one without saying which.

    Raises:
        InputError: names the id, and how many embeddings there are.
    """
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    count = getattr(embeddings, "num_embeddings", None)
    largest = max((max(ids) for ids in rows if ids), default=0)
    if count is not None and largest >= count:
        raise InputError(
            f"the tokenizer gives token id {largest}, and the model has embeddings for {count} tokens (0 to "
            f"{count - 1}): this tokenizer is another model's"
        )


def _location(source: str | Path) -> str:
    """A local folder, or the hub id itself (its tokenizer is fetched by transformers).

    Raises:
        InputError: there is no such model, or its weights are no readable safetensors.
    """
    from toolkit.weights.checkpoints import open_checkpoint
    from toolkit.weights.sources import resolve

    found = resolve(source)
    open_checkpoint(found.path)
    return found.name if found.hub else str(found.folder)


@contextlib.contextmanager
def _reading(source: str | Path, what: str = "model") -> Iterator[None]:
    """Whatever transformers raises while it reads becomes one error that names the model."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"cannot load the {what} of {source}: {reason}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers among ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
