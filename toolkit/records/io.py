"""Reading and writing records: atomic writes, and errors that name file, key, line and what is allowed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pydantic_core
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.errors import InputError, RunError, closest


class Refusal(InputError, ValueError):
    """A record's own check of one of its parts; inside a file, the message also names the place."""


MOST_VALUES = 100_000
"""Values that a YAML file may hold: aliases of aliases multiply, and would keep a reader busy for hours."""


class Record(BaseModel):
    """A part of a file: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, ser_json_inf_nan="constants")


class File(Record):
    """A whole file: a record with a schema version, known by its class."""

    version: ClassVar[int] = 1

    schema_: int = Field(default=1, alias="schema", description="version of this file format")

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON data; keys that hold nothing are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record to a JSON file, atomically."""
        return write_json(path, self.to_json())

    @classmethod
    def load(cls: type[F], path: str | os.PathLike[str]) -> F:
        """Read a record from a JSON file.

        Raises:
            InputError: the file is missing, empty, no JSON, of another schema version, or does not fit.
        """
        return parse(cls, read_json(path), str(path))

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON text: sorted keys, no spaces."""
        return digest(self.to_json())


F = TypeVar("F", bound=File)


def digest(data: Any) -> str:
    """SHA-256 of plain data as canonical JSON (sorted keys, no spaces), in hexadecimal."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`, moved onto it when the block ends well; else removed.

    Raises:
        RunError: the disk is full or the folder cannot be written; what stood at `path` stays.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        check_output(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; what stood there before is unchanged"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_output(path: str | os.PathLike[str]) -> None:
    """Refuse, before work is done for it, an output that cannot become a file.

    Raises:
        InputError: it is a folder or a device, or what should be its folder is a file.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder; the output is a file: give its name too")
    if path.exists() and not path.is_file():  # replacing one atomically would destroy it
        raise InputError(f"{path} is no ordinary file, and is not replaced; leave the output out for stdout")
    above = next((p for p in path.absolute().parents if p.exists()), None)
    if above is not None and not above.is_dir():
        raise InputError(f"{path} cannot be written: {above} is a file, not a folder")


def write_json(path: str | os.PathLike[str], data: Any) -> Path:
    """Write JSON atomically: indented, one value a line."""
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The file's bytes, or an InputError that says why there are none."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        hint = _neighbours(path)
        raise InputError(f"no file {path}{hint}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, and a file is asked for") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if not content.strip():
        raise InputError(f"{path} is empty")
    return content


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent} either)"
    names = [p.name for p in path.parent.iterdir()]
    hint = closest(path.name, names) if names else ""
    return f"; {hint}" if hint.startswith("did you mean") else ""


def read_json(path: str | os.PathLike[str]) -> Any:
    """Plain data from a JSON file."""
    content = read_bytes(path)
    try:
        return pydantic_core.from_json(content)
    except ValueError:
        try:
            return json.loads(content)  # Python's reader takes integers of any length; and its errors name the line
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from None


def parse(cls: type[F], data: Any, source: str, lines: dict[tuple[Any, ...], int] | None = None) -> F:
    """A record from plain data; errors name the source, the key, its line where known, and what is allowed."""
    if not isinstance(data, dict):
        raise InputError(f"{source} holds {type(data).__name__}, and a {cls.__name__.lower()} (a mapping) is asked for")
    found = data.get("schema")
    if found is not None and found != cls.version:
        raise InputError(
            f"{source} has schema {found!r}; this version of the toolkit reads {cls.__name__.lower()} files of schema "
            f"{cls.version}"
        )
    if lines is None and found is None:
        raise InputError(f"{source} has no key 'schema': it is no {cls.__name__.lower()} file")
    expected = getattr(cls.model_fields.get("kind"), "default", None)
    if isinstance(expected, str) and data.get("kind", expected) != expected:
        raise InputError(f"{source}: kind: found {data['kind']!r}, and a file of kind {expected!r} is asked for")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(cls, error, source, lines or {})) from None
    except InputError as error:  # raised by a record's own checks, which do not know the file
        raise InputError(f"{source}: {error}") from None


def _explain(cls: type[BaseModel], error: ValidationError, source: str, lines: dict[tuple[Any, ...], int]) -> str:
    messages = []
    for item in error.errors()[:5]:
        place = tuple(item["loc"])
        known = next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)
        where = f"{source}:{known}" if known is not None else source
        key = ".".join(str(p) for p in place)
        if item["type"] == "extra_forbidden":
            allowed = _keys_at(cls, place[:-1])
            messages.append(f"{where}: unknown key {key!r}; {closest(str(place[-1]), allowed)}")
        else:
            found = "" if item["type"] == "missing" else f" (found {item['input']!r:.80})"
            text = item["msg"].removeprefix("Value error, ")
            if item["type"] in ("model_type", "dict_type"):
                keys = _keys_at(cls, place) if item["type"] == "model_type" else []
                text = "a mapping is asked for" + (f", with keys of {', '.join(keys)}" if keys else "")
            messages.append(f"{where}: {key}: {text}{found}" if key else f"{where}: {text}")
    return "\n".join(messages)


def _keys_at(model: Any, place: tuple[Any, ...]) -> list[str]:
    """The keys allowed at a place in nested records."""
    import typing

    for step in place:
        field = getattr(model, "model_fields", {}).get(step) if isinstance(step, str) else None
        annotation = field.annotation if field else model
        candidates = [annotation, *typing.get_args(annotation)]
        candidates += [a for c in candidates for a in typing.get_args(c)]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    fields = getattr(model, "model_fields", {})
    return [f.alias or name for name, f in fields.items()]


def read_yaml(path: str | os.PathLike[str]) -> tuple[Any, dict[tuple[Any, ...], int]]:
    """Plain data from a YAML file (safe loading), and the line of every key, for errors.

    Raises:
        InputError: the file is missing, empty, no UTF-8 text or no YAML, or a key stands twice.
    """
    content = read_bytes(path)
    try:
        text = content.decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    except ValueError as error:  # a date such as 2026-02-30, a number of thousands of digits
        raise InputError(f"{path} holds a value that cannot be read: {error}") from None
    try:
        places = list(itertools.islice(_lines(node, ()), MOST_VALUES + 1))
        if len(places) > MOST_VALUES:
            raise InputError(f"{path} holds more than {MOST_VALUES:,} values once its aliases are written out")
        _check_keys(node, str(path))
    except RecursionError:
        raise InputError(f"{path} holds a value that contains itself") from None
    lines: dict[tuple[Any, ...], int] = {}
    for place, line in places:
        if place in lines:
            key = ".".join(map(str, place))
            raise InputError(f"{path}:{line}: key {key!r} stands twice (also in line {lines[place]})")
        lines[place] = line
    return data, lines


def _check_keys(node: yaml.Node | None, source: str) -> None:
    """Refuse keys that YAML reads as something else than text: `on` is a truth value, `1` a number."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, source)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        kind = key.tag.rpartition(":")[2]
        if kind not in ("str", "merge"):
            raise InputError(
                f"{source}:{key.start_mark.line + 1}: key {key.value!r} is read as {kind}, and text is asked for: "
                "write it in quotes"
            )
        _check_keys(value, source)


def _lines(node: yaml.Node | None, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, key.value)
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for at, value in enumerate(node.value):
            yield (*place, at), value.start_mark.line + 1
            yield from _lines(value, (*place, at))
