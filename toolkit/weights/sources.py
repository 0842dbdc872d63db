"""Where a model's files are: the demo model, a local folder, or a Hugging Face id.

What is local never falls through to the hub, so that a misspelt path is an error here and no request there.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from toolkit.errors import InputError, closest
from toolkit.records.study import DEMO_MODEL
from toolkit.weights import demo_model
from toolkit.weights.checkpoints import CONFIG, INDEX, SINGLE, missing, read_json

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
FILES = (
    *(".safetensors", ".json", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".onnx", ".h5", ".msgpack"),
    *(".yaml", ".yml", ".txt", ".zip", ".tar", ".gz", ".tgz"),
)
"""What files end with and hub ids do not; a version's number after a point is no suffix."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A model's files.

    Attributes:
        path: a folder, or one file in it.
        name: how profiles and reports call the model.
        hub: whether the files came from the hub.
    """

    path: Path
    name: str
    hub: bool = False

    @property
    def folder(self) -> Path:
        """The folder that holds the config."""
        return self.path if self.path.is_dir() else self.path.parent


def resolve(model: str | os.PathLike[str]) -> Source:
    """Find a model's config and safetensors; the demo model is converted, a hub model fetched, on first use.

    Args:
        model: `demo`, a path, or a hub id (`org/name` or `name`).

    Raises:
        InputError: there is no such path (closest names), no such hub model, or the hub cannot be reached.
    """
    if is_demo(model):
        return Source(demo_model.demo_model(), demo_model.NAME)
    refuse_missing(model)
    if is_local(model):
        path = Path(model).expanduser()
        return Source(path, shown(path))
    return _fetch(str(model))


def refuse_missing(model: str | os.PathLike[str]) -> None:
    """Refuse a path that does not exist, without a request and before anything else is read.

    Raises:
        InputError: the path, and the closest names beside it.
    """
    if not is_local(model):
        return
    if not str(model):
        raise InputError(f"the model's name is empty; give a folder, a hub id, or {DEMO_MODEL!r}")
    path = Path(model).expanduser()
    if os.path.exists(path):  # False also for text that no file can be called
        return
    hint = ""
    if isinstance(model, str) and HUB_ID.fullmatch(model) and not model.lower().endswith(FILES):
        hint = f" (read as a path, because the folder {path.parent} exists; it is no hub id here)"
    raise InputError(missing(path) + hint)


def is_demo(model: str | os.PathLike[str]) -> bool:
    """Whether the embedded demo model is meant: `demo`, or the name that its reports carry."""
    return model in (DEMO_MODEL, demo_model.NAME)


def is_local(model: str | os.PathLike[str]) -> bool:
    """Whether a model is a path: an existing one, a path object, or text that no hub id looks like.

    Text is a path where it exists, starts with `.`, `/` or `~`, ends as a file does, has a path separator
    other than the one of `org/name`, or where `org` is a folder here.
    """
    if not isinstance(model, str):
        return True
    if is_demo(model):
        return False
    if not HUB_ID.fullmatch(model) or model.lower().endswith(FILES) or os.path.exists(model):
        return True
    return "/" in model and Path(model).parent.is_dir()


def shown(path: str | os.PathLike[str]) -> str:
    """A local model's name in reports: the path as given, or the demo model's name where it is its folder."""
    try:
        if Path(path).resolve() == demo_model.demo_folder().resolve():
            return demo_model.NAME
    except InputError:  # the demo model's package is not installed
        pass
    return str(path)


def _fetch(model: str) -> Source:
    """Config, index and safetensors of a hub model, from the hub's cache where they are there already."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(file: str) -> Path:
        return Path(hf_hub_download(model, file))

    try:
        folder = fetch(CONFIG).parent
        try:
            fetch(SINGLE)
        except EntryNotFoundError:  # not there, or not in the cache of a machine without network
            index = fetch(INDEX)
            shards = read_json(index).get("weight_map", {}).values()
            for shard in sorted(set(shards)):
                fetch(shard)
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"there is no {model!r} here; {model} is not in the hub's cache and the hub cannot be reached: "
            f"{_first(error)}{_meant(model)}"
        ) from None
    except EntryNotFoundError as error:
        raise InputError(
            f"{model} has no {CONFIG} with safetensors weights on the hub ({_first(error)}); pickle checkpoints "
            "are refused, because reading one can run any code"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(f"no model {model!r} here or on the hub: {_first(error)}{_meant(model)}") from None
    return Source(folder, model, hub=True)


def _meant(model: str) -> str:
    """The demo model or the folder here whose name is close to one that was not found."""
    near = closest(model, [DEMO_MODEL, *(p.name for p in Path().iterdir() if p.is_dir())])
    return f"; {near}" if near.startswith("did you mean") else ""


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
