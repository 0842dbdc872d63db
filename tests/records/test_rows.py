"""Rows files: what is written is read, fast, and what is damaged is named."""

from __future__ import annotations

import gzip
import hashlib
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.records import rows
from toolkit.records.report import Rows

SUMS = st.lists(st.floats(0, 1e5).map(lambda v: round(v, 4)), min_size=3, max_size=3)


def put(folder, content, columns=rows.MANY, count=2):
    path = folder / "rows.jsonl.gz"
    path.write_bytes(content)
    return path, Rows(file=path.name, sha256=hashlib.sha256(content).hexdigest(), count=count, columns=columns)


@given(draws=st.lists(st.tuples(SUMS, SUMS), min_size=1, max_size=4))
def test_what_is_written_is_read(draws, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    lines = [[i, text, pair[at]] for i, pair in enumerate(draws) for at, text in enumerate("ab")]
    made = rows.write(folder, rows.MANY, lines)
    path = folder / made.file
    with gzip.open(path, "rt") as file:
        assert [json.loads(line) for line in file] == lines
    assert (made.count, made.columns) == (len(lines), ["draw", "text", "nll"])
    assert rows.draws_by_window(path, made, "r") == {t: [pair[at] for pair in draws] for at, t in enumerate("ab")}
    before = path.read_bytes()
    assert rows.write(folder, rows.MANY, lines) == made and path.read_bytes() == before


def test_one_selection_has_every_sum(tmp_path):
    made = rows.write(tmp_path, rows.ONE, [[0, "a", [1.5, 2.0], [0.1, 0.2], [3, 4]], [0, "b", [7.0], [0.0], [1]]])
    path = tmp_path / made.file
    assert rows.by_window(path, made, "r") == {"a": [1.5, 2.0], "b": [7.0]}
    assert rows.read(path, made, "r")["top"] == [[3, 4], [1]]


LINES = b'[0,"a",[1.5,2]]\n[1,"a",[1,2]]\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(LINES, mtime=0)[:-9], "ended before|end-of-stream|truncated"),
        (LINES, "[Nn]ot a gzipped file"),
        (gzip.compress(LINES[:20], mtime=0), r"has 2 rows|rows\.jsonl\.gz:2"),
        (gzip.compress(LINES * 2, mtime=0), "has 4 rows, and r states 2"),
        (
            gzip.compress(b'[0,"a",[1.5,2]]\n[1,"a"]\n', mtime=0),
            r":2: a list of 3 values is asked for; found \[1,.a.\]",
        ),
        (gzip.compress(b'[0,"a",[1.5,2]]\n{"draw":1}\n', mtime=0), ":2: a list of 3 values"),
        (gzip.compress(b'[0,"a",[1.5,2]]\n[1,"a",[1,2]\n', mtime=0), ":2: Expecting"),
        (gzip.compress(b'[0,"a",[1.5,2]],[1,"a",[1,2]]\n[1,"a",[1,2]]\n', mtime=0), ":1: Extra data"),
        (gzip.compress(b'[0,"a",[1.5,2]]\n[1,"a",[1,NaN]]\n', mtime=0), ":2: nll is .*a list of finite numbers"),
        (gzip.compress(b'[0,"a",[1.5,2]]\n[1,"a",[1,"2"]]\n', mtime=0), ":2: nll is"),
        (gzip.compress(b'[0,"a",[1.5,2]]\n[1,"a",[]]\n', mtime=0), ":2: nll is"),
        (gzip.compress(b'[0,"a",[1.5,2]]\n[1,"a",3.5]\n', mtime=0), ":2: nll is"),
        (gzip.compress(b'[0,"a",[1.5,2]]\n[1,7,[1,2]]\n', mtime=0), ":2: nll is"),
        (
            gzip.compress(b'[0,"a",[1.5,2]]\n[2,"a",[1,2]]\n', mtime=0),
            "draw 2 of text 'a' stands where draw 1 is asked for",
        ),
        (gzip.compress(b'[0,"a",[1.5,2]]\n[1,"a",[1]]\n', mtime=0), "draw 1 of text 'a' has 1 windows.* before it 2"),
    ],
)
def test_damage_is_named(tmp_path, content, message):
    path, stated = put(tmp_path, content)
    with pytest.raises(InputError, match=message):
        rows.draws_by_window(path, stated, "r")


def test_another_file_or_column_is_named(tmp_path):
    path, stated = put(tmp_path, gzip.compress(LINES, mtime=0))
    with pytest.raises(InputError, match=r"is not the file that r tells of: SHA-256 [0-9a-f]{12}, and 000000000000"):
        rows.read(path, stated.model_copy(update={"sha256": "0" * 64}), "r")
    with pytest.raises(InputError, match="no file"):
        rows.read(tmp_path / "else.gz", stated, "r")
    with pytest.raises(InputError, match="has no column 'nll'"):
        rows.by_window(path, stated.model_copy(update={"columns": ["draw", "text", "kl"]}), "r")
    with pytest.raises(InputError, match="holds text 'a' more than once, and r tells of one selection"):
        rows.by_window(path, stated, "r")


def test_many_draws_are_small_and_read_fast(tmp_path):
    """A twentieth of 17,000 draws of 2 texts of 32 windows, which may take 12 MB and 2 seconds."""
    rng = np.random.default_rng(0)
    level = {text: rng.normal(1500, 200, 32) for text in "ab"}
    lines = [[i, t, np.round(level[t] + rng.normal(0, 3, 32), 4).tolist()] for i in range(850) for t in "ab"]
    made = rows.write(tmp_path, rows.MANY, lines)
    assert (tmp_path / made.file).stat().st_size < 12e6 / 20
    start = time.process_time()
    found = rows.draws_by_window(tmp_path / made.file, made, "r")
    assert time.process_time() - start < 2  # measured: .02 s, and far more beside other jobs
    assert np.array(found["b"]).shape == (850, 32)
