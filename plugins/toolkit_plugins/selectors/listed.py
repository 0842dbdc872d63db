"""A list that somebody made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from toolkit.errors import InputError, closest
from toolkit.interfaces import Selector
from toolkit.records.budget import Budget
from toolkit.records.io import read_bytes, read_json
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection


@dataclass
class Listed(Selector):
    """Select the layers that a file names, such as the skip list of a model quantized by Unsloth.

    `file` holds one name a line (blank lines and lines that begin with # are left out), a JSON list of names,
    or a Hugging Face `config.json` whose `quantization_config.llm_int8_skip_modules` is such a list (the
    deployed selection that AQLoRA §7.2 compares with). An entry stands for every layer whose path holds it as
    a run of whole dotted components: `layers.1` is not `layers.10`, `v_proj` not `qkv_proj`. The output head
    may be named: it is no layer and stays in 16 bit anyway.

    A skip list written for many models also names modules that this one lacks; `absent=ignore` lets such
    entries pass, as long as one entry matches.

    Raises:
        InputError: no file, a file of another form, or an entry that matches no layer (closest names given).
    """

    name = "listed"
    needs_budget = False

    file: str = ""
    absent: Literal["error", "ignore"] = "error"

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> list[str]:
        """The named layers, in model order."""
        if not self.file:
            raise InputError("listed reads its layers from a file: set its option file=PATH")
        paths = [(layer.name, _components(layer.name)) for layer in profile.layers]
        heads = {profile.head, profile.head.rpartition(".")[2]} if profile.head else set()
        chosen: set[str] = set()
        for entry in _entries(self.file):
            wanted = _components(entry)
            found = {name for name, parts in paths if _holds(parts, wanted)}
            if not found and entry not in heads and self.absent == "error":
                known = {".".join(parts[:n]) for name, parts in paths for n in range(1, len(parts) + 1)}
                known |= {part for _, parts in paths for part in parts}
                raise InputError(
                    f"{self.file}: {entry!r} matches no layer of {profile.model}; {closest(entry, known)} "
                    "(absent=ignore lets such entries pass)"
                )
            chosen |= found
        if not chosen:
            raise InputError(f"{self.file} names no layer of {profile.model}")
        return [name for name, _ in paths if name in chosen]


def _components(path: str) -> list[str]:
    """`a.b[3]` as a, b, [3]."""
    return path.replace("[", ".[").split(".")


def _holds(parts: list[str], wanted: list[str]) -> bool:
    return any(parts[at : at + len(wanted)] == wanted for at in range(len(parts) - len(wanted) + 1))


def _entries(file: str) -> list[str]:
    """The names in a file of one of the three forms."""
    content = read_bytes(file)
    if content.lstrip()[:1] in (b"[", b"{"):
        return _from_json(read_json(file), file)
    try:
        lines = [line.strip() for line in content.decode("utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error}") from None
    return [line for line in lines if line and not line.startswith("#")]


def _from_json(data: Any, file: str) -> list[str]:
    where = file
    if isinstance(data, dict):
        where = f"{file}: quantization_config.llm_int8_skip_modules"
        settings = data.get("quantization_config")
        data = settings.get("llm_int8_skip_modules") if isinstance(settings, dict) else None
        if data is None:
            raise InputError(f"{where} is missing; a list of names, or a config.json with that key, is read")
    if not isinstance(data, list) or not all(isinstance(entry, str) and entry for entry in data):
        raise InputError(f"{where} is no list of layer names")
    return data
