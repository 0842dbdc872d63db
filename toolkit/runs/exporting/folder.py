"""A folder that appears whole or not at all, and a checkpoint in it as stock loaders read it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, RunError

if TYPE_CHECKING:
    import torch
    from torch import nn

REPORT = "export.json"
PLAN = "plan.json"


def check(folder: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Refuse, before work is done for it, a folder that cannot be written.

    Raises:
        InputError: it is a file; or it holds something, and is not to be replaced; or it holds no export, which is
            never replaced.
    """
    path = Path(folder)
    if not str(folder):
        raise InputError("the folder to export to has no name: give one with -o")
    above = next((p for p in path.absolute().parents if p.exists()), None)
    if above is not None and not above.is_dir():
        raise InputError(f"{path} cannot be written: {above} is a file, not a folder")
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file, and an export is a folder")
    if path.is_dir() and any(path.iterdir()):
        if not (path / REPORT).is_file():
            raise InputError(f"{path} holds something that is no export, and is not replaced; name another folder")
        if not force:
            raise InputError(f"{path} holds an export already: --force replaces it")
    return path


@contextlib.contextmanager
def whole(folder: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder`, moved to it when the block ends well; else removed.

    Raises:
        InputError: as `check`.
        RunError: the disk is full or the folder cannot be written; what stood there stays.
    """
    path = check(folder, force=force)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        yield temporary
        check(folder, force=force)  # another process may have been there
        old = None
        if path.is_dir():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.replace(path, old)
        os.replace(temporary, path)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; what stood there before is unchanged"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def write_checkpoint(
    model: nn.Module,
    folder: Path,
    source: str,
    *,
    packed: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    quantization: Mapping[str, Any] | None = None,
    shard: str = "5GB",
) -> list[str]:
    """Write a model as transformers does: config, generation config, tokenizer, safetensors in shards with an index.

    Args:
        source: what the model was loaded from, for its tokenizer.
        packed: module path → tensors that stand in the place of its `weight`.
        quantization: the config's `quantization_config`.
        shard: the most bytes of a file, as `5GB`.

    Returns:
        What a reader has to know.

    Raises:
        InputError: a size that cannot be read.
    """
    from toolkit.runs.models import load_tokenizer, quiet

    notes = []
    state = dict(model.state_dict())
    for path, tensors in (packed or {}).items():
        del state[f"{path}.weight"]
        state |= {f"{path}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
    config: Any = model.config
    before = getattr(config, "quantization_config", None)
    if quantization is not None:
        config.quantization_config = dict(quantization)
    try:
        with quiet():
            model.save_pretrained(folder, state_dict=state, max_shard_size=shard)  # type: ignore[operator]
    except (ValueError, TypeError) as error:
        raise InputError(f"cannot write the checkpoint in shards of {shard!r}: {error}") from None
    finally:
        if quantization is not None:
            if before is None:
                del config.quantization_config
            else:
                config.quantization_config = before
    try:
        load_tokenizer(source).save_pretrained(folder)
    except InputError as error:
        notes.append(f"no tokenizer was copied: {error}")
    return notes
