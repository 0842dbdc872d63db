"""Texts: named sources, files, hashes, windows; and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.runs.texts import documents as texts

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


class Letters:
    """A tokenizer of one token a letter, as transformers' are called."""

    def __call__(self, text, *, add_special_tokens, **_):
        assert add_special_tokens is False
        return {"input_ids": [ord(c) for c in text]}


def test_python_topics_are_sorted_and_hashed():
    from pydoc_data.topics import topics

    document = texts.read_text("python-topics")
    assert document.text == "\n\n".join(text for _, text in sorted(topics.items()))
    assert document.sha256 == hashlib.sha256(document.text.encode()).hexdigest()
    assert len(document.text) > 400_000


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_files_give_the_same_text(tmp_path, name):
    rows = ["Größe 1", "", " = Title = \n", "end"]
    joined = "\n\n".join(rows)
    content = joined if ".txt" in name else "\n".join(json.dumps({"text": r, "id": i}) for i, r in enumerate(rows))
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode(), mtime=0) if name.endswith(".gz") else content.encode())
    document = texts.read_text(str(path))
    assert document.text == joined
    assert document.source == name  # the folder is not part of the record


def test_wikitext2_from_the_hub_is_the_official_file_and_the_committed_studys_text(monkeypatch):
    import datasets

    folder = DATA / "wikitext2_raw"
    if not folder.exists():
        pytest.skip(f"no real rows at {folder}")
    lines = gzip.decompress((folder / "test.jsonl.gz").read_bytes()).decode("utf-8").splitlines()
    rows = [json.loads(line)["text"] for line in lines]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"text": rows})
    document = texts.read_text("wikitext2")
    assert document.text == texts.read_text(str(folder / "wiki.test.raw.gz")).text
    study = Path(__file__).parents[3] / "studies" / "ranking-control" / "results" / "reference--base" / "report.json"
    assert document.sha256 == json.loads(study.read_text())["texts"]["wikitext2"]["sha256"]


def test_wikitext2_out_of_reach_says_how_to_pass_a_file(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputError, match=r"Couldn't reach the hub.*--text wikitext2=wiki\.test\.raw"):
        texts.read_text("wikitext2")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n ", "is empty"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.txt.gz", b"no gzip", "no readable gzip"),
        ("a.txt.gz", gzip.compress(b"cut off" * 1000, mtime=0)[:-20], "no readable gzip"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"words": "a"}', r"a\.jsonl:1: .*key 'text'.*found words"),
        ("a.jsonl", b'{"text": 3}', "holds a string"),
        ("a.jsonl", b'["a"]', "key 'text'"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        texts.read_text(str(path))


def test_unknown_source_names_the_closest():
    with pytest.raises(InputError, match="did you mean 'python-topics'"):
        texts.read_text("python-topic")
    with pytest.raises(InputError, match=r"no file .*missing\.txt"):
        texts.read_text("missing.txt")


def test_items_are_names_and_sources():
    assert texts.parse_texts(["python-topics", "w=dir/test.jsonl.gz", "other/my text.txt"]) == {
        "python-topics": "python-topics",
        "w": "dir/test.jsonl.gz",
        "my-text": "other/my text.txt",
    }
    assert texts.parse_texts(["./a=b/c.txt"]) == {"c": "./a=b/c.txt"}
    with pytest.raises(InputError, match="two texts are called 'a'"):
        texts.parse_texts(["a=x.txt", "a=y.txt"])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(2, 40), st.none() | st.integers(2, 400))
def test_windows_are_the_beginning_of_the_text_cut_without_overlap(length, window, tokens):
    document = texts.Document("t", "".join(chr(200 + i) for i in range(length)))
    available = length if tokens is None else min(tokens, length)
    if available < window:
        with pytest.raises(InputError, match="less than one window"):
            texts.cut(document, Letters(), window=window, tokens=tokens)
        return
    cut = texts.cut(document, Letters(), window=window, tokens=tokens)
    flat = cut.ids.flatten().tolist()
    assert flat == [200 + i for i in range(available // window * window)]
    assert cut.ids.shape == (available // window, window)
    assert (cut.record.tokens, cut.record.windows, cut.record.stride) == (len(flat), len(cut.ids), window)
    assert cut.record.characters == length and cut.record.bos is False
