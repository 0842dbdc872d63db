"""Texts to measure a loss on: read from a named source or a file, hashed, and cut into equal windows.

The embedded default needs no network: the technical English of CPython's `pydoc_data.topics`, which differs
between Python versions, so that every report carries the text's hash.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, closest
from toolkit.records.io import read_bytes
from toolkit.records.report import Text
from toolkit.records.study import slug

if TYPE_CHECKING:
    import torch

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
JOIN = "\n\n"
"""Between topics and between rows, as is customary for WikiText perplexities."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A text as it was read.

    Attributes:
        source: the named source, or the file's name (its folder is a matter of the machine, not of the text).
    """

    source: str
    text: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the UTF-8 text, in hexadecimal."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Token ids (windows × window, int64) of a text, and the record of how they were cut."""

    ids: torch.Tensor
    record: Text


def parse_texts(items: Iterable[str]) -> dict[str, str]:
    """Name → source from `[NAME=]SOURCE` items; a name left out is made from the source.

    Raises:
        InputError: two texts of one name.
    """
    texts: dict[str, str] = {}
    for item in items:
        name, equals, source = item.partition("=")
        if not equals or not name or set(name) & set("/\\"):
            name, source = _name(item), item
        if name in texts:
            raise InputError(f"two texts are called {name!r}; name one of them, as in --text other={source}")
        texts[name] = source
    return texts


def _name(source: str) -> str:
    if source in SOURCES:
        return source
    name = Path(source).name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return slug(name) or "text"


def read_text(source: str) -> Document:
    """The text of a named source, or of a file (.txt, .txt.gz, or .jsonl, .jsonl.gz with a key `text`).

    Raises:
        InputError: an unknown source, a missing or unreadable file, or a data set that cannot be reached.
    """
    if source in SOURCES:
        return Document(source, SOURCES[source]())
    path = Path(source).expanduser()
    if not path.exists() and not path.name.endswith(SUFFIXES):
        raise InputError(f"no text is called {source!r}, and there is no such file; {closest(source, SOURCES)}")
    text = _file_text(path)
    if not text.strip():
        raise InputError(f"{path} holds no text")
    return Document(path.name, text)


def _file_text(path: Path) -> str:
    content = read_bytes(path)
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is no readable gzip file: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from None
    return _rows_text(path, text) if path.name.removesuffix(".gz").endswith(".jsonl") else text


def _rows_text(path: Path, text: str) -> str:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number} is not JSON: {error}") from None
        found = row.get("text") if isinstance(row, dict) else None
        if not isinstance(found, str):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise InputError(f"{path}:{number}: each row needs a key 'text' that holds a string; found {keys}")
        if any("\ud800" <= letter <= "\udfff" for letter in found):
            raise InputError(f"{path}:{number} holds half of a surrogate pair, which is no text: UTF-8 cannot write it")
        rows.append(found)
    return JOIN.join(rows)


def _python_topics() -> str:
    """CPython's own help topics, sorted by key, joined by blank lines."""
    from pydoc_data.topics import topics

    return JOIN.join(topics[key] for key in sorted(topics))


def _wikitext2() -> str:
    """WikiText-2 (raw), test split: the official file `wiki.test.raw`, rebuilt from the hub's rows.

    The rows are the file's lines, those of a blank alone emptied, so that the two are one text (SHA-256 173c87a5…).
    Others join the rows by blank lines (GPTQ, §4), which gives another text; the choice is ours.
    """
    hint = "pass the official file instead: --text wikitext2=wiki.test.raw (or .gz)"
    try:
        import datasets
    except ImportError:
        raise InputError(f"wikitext2 is read through the package `datasets`, which is not installed; {hint}") from None
    try:
        rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
        return "".join(row or " \n" for row in rows["text"])
    except Exception as error:  # whatever the hub, the proxy or the cache answers: the text is not to be had
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"wikitext2 cannot be read from the Hugging Face hub ({reason}); {hint}") from error


SOURCES: Mapping[str, Callable[[], str]] = {"python-topics": _python_topics, "wikitext2": _wikitext2}
"""The named sources."""


def cut(document: Document, tokenizer: Any, *, window: int, tokens: int | None = None) -> Windows:
    """Token ids in non-overlapping windows: ⌊min(tokens, all)/window⌋ of them, the rest is left out.

    No special token is added, neither to the text nor to a window, so each window starts in mid-text, and its
    first token is never scored. The choice is ours; it is the same for all arms.

    Args:
        tokenizer: a tokenizer of transformers.
        window: tokens a window.
        tokens: at most this many tokens of the text; None takes all.

    Raises:
        InputError: the text is shorter than one window, or a window is longer than the tokens asked for.
    """
    import torch

    if tokens is not None and tokens < window:
        raise InputError(f"tokens={tokens} is less than one window of {window}; ask for at least that many")
    ids = tokenizer(document.text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    count = (len(ids) if tokens is None else min(len(ids), tokens)) // window
    if count == 0:
        raise InputError(
            f"text {document.source!r} has {len(ids)} tokens, less than one window of {window}; "
            "take a longer text or a shorter window"
        )
    record = Text(
        source=document.source,
        sha256=document.sha256,
        characters=len(document.text),
        tokens=count * window,
        windows=count,
        window=window,
        stride=window,
        bos=False,
    )
    return Windows(torch.tensor(ids[: count * window], dtype=torch.int64).view(count, window), record)


def fixed(windows: Mapping[str, Windows]) -> dict[str, dict[str, Any]]:
    """Text → what of it fixes the numbers: its hash, and not its source, for a file may hold what the hub gives."""
    return {
        name: {"sha256": each.record.sha256, "tokens": each.record.tokens, "window": each.record.window}
        for name, each in windows.items()
    }
