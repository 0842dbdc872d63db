"""Files: written whole or not at all, and refused with file, key, line and what is allowed."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InputError, RunError
from toolkit.records import io
from toolkit.records.plan import LayerPlan, Plan
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection

PLAN = {"schema": 1, "kind": "plan", "default": {"quantizer": "nf4"}, "layers": {"a.b": {"quantizer": "none"}}}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def leftovers(folder):
    return [p.name for p in folder.iterdir() if p.name.endswith(".tmp")]


@given(plain)
def test_what_is_written_is_read_back(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "round" / "data.json"
    assert io.write_json(path, data) == path
    assert io.read_json(path) == data == json.loads(path.read_text())


def test_integers_of_any_length(tmp_path):
    path = io.write_json(tmp_path / "big.json", {"n": 7**4000})
    assert io.read_json(path)["n"] == 7**4000
    path.write_text('{"n": ' + "9" * 5000 + "}")
    with pytest.raises(InputError, match=r"big\.json"):
        io.read_json(path)


def test_folders_are_made_and_permissions_are_those_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = io.write_json(tmp_path / "a" / "b" / "c.json", [1])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and leftovers(path.parent) == []


@pytest.mark.parametrize("where", ["write_text", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, where):
    path = io.write_json(tmp_path / "data.json", {"old": 1})

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_text" if where == "write_text" else f"os.{where}", full)
    with pytest.raises(RunError, match=r"cannot write .*data\.json: No space left on device; what stood there before"):
        io.write_json(path, {"new": 2})
    monkeypatch.undo()
    assert io.read_json(path) == {"old": 1} and leftovers(tmp_path) == []


def test_a_disk_that_fills_up_half_way(tmp_path):
    """A real refusal of the system: the process may write no file above 64 kB."""
    code = (
        "import resource, signal, sys; from toolkit.records.io import write_json; from toolkit.errors import RunError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "write_json(sys.argv[1], ['old'])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "try: write_json(sys.argv[1], ['x' * 100] * 10_000)\n"
        "except RunError as error: print(error)\n"
    )
    path = tmp_path / "data.json"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout and io.read_json(path) == ["old"] and leftovers(tmp_path) == []


def test_an_error_in_the_block_removes_the_temporary_file(tmp_path):
    path = io.write_json(tmp_path / "data.json", [1])
    with pytest.raises(ZeroDivisionError), io.atomic(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "[\n 1\n]\n" and leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        io.write_json(tmp_path / "file" / "data.json", [1])


def test_missing_files_offer_the_closest(tmp_path):
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(InputError, match=r"did you mean 'profile\.json'"):
        io.read_json(tmp_path / "profil.json")
    with pytest.raises(InputError, match="there is no folder"):
        io.read_json(tmp_path / "nothing" / "profile.json")
    with pytest.raises(InputError, match="is a folder"):
        io.read_json(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b'{"schema": 1, "kind"', "is not JSON.*line 1"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "holds list, and a plan"),
        (b'"plan"', "holds str, and a plan"),
        (b'{"kind": "plan"}', "no key 'schema'"),
        (b'{"schema": 7}', "has schema 7; this version of the toolkit reads plan files of schema 1"),
        (b'{"schema": "one"}', "has schema 'one'"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_file(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"(?s){message}") as error:
        Plan.load(path)
    assert str(path) in str(error.value) and error.value.exit_code == 2


@given(st.integers(1, len(json.dumps(PLAN)) - 1))
def test_a_file_cut_short_anywhere_is_refused(tmp_path_factory, length):
    path = tmp_path_factory.getbasetemp() / "cut.json"
    path.write_text(json.dumps(PLAN)[:length])
    with pytest.raises(InputError, match=r"cut\.json"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"defualt": 1}, "unknown key 'defualt'; did you mean 'default'"),
        ({"default": {"quantiser": "nf4"}}, "unknown key 'default.quantiser'; did you mean 'quantizer'"),
        ({"layers": {"a.b": {"quantizer": "nf4", "adaptor": 1}}}, "unknown key 'layers.a.b.adaptor'.*'adapter'"),
        ({"layers": {"a": {"quantizer": 4}}}, r"layers\.a\.quantizer: .*string \(found 4\)"),
        (
            {"default": {"quantizer": "nf4", "compute_dtype": "fp32"}},
            "default.compute_dtype: .*'float32', 'float16' or 'bfloat16'",
        ),
        ({"default": None}, "default: .*found None"),
        ({"kind": "profile"}, "kind: .*'plan'"),
    ],
)
def test_keys_and_types_are_named_with_what_is_allowed(change, message):
    with pytest.raises(InputError, match=f"(?s)here: {message}"):
        io.parse(Plan, PLAN | change, "here")


def test_at_most_five_faults_at_once():
    layers = {f"l{i}": {"quantizer": i} for i in range(9)}
    with pytest.raises(InputError) as error:
        io.parse(Plan, PLAN | {"layers": layers}, "here")
    assert str(error.value).count("\n") == 4


def test_another_kind_of_file_is_refused(tmp_path):
    path = io.write_json(tmp_path / "plan.json", PLAN)
    for record in (Profile, Selection):
        with pytest.raises(InputError, match="kind"):
            record.load(path)


def test_the_hash_is_of_canonical_text():
    plan = Plan(default=LayerPlan(quantizer="nf4"), layers={"b": LayerPlan(quantizer="none")})
    default = {"quantizer": "nf4", "range_guard": False, "initializer": "zero"}
    data = {"schema": 1, "kind": "plan", "dataflow": "stock", "default": default}
    data["layers"] = {"b": default | {"quantizer": "none"}}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert plan.hash == hashlib.sha256(text.encode()).hexdigest()
    assert io.digest({"a": 1, "b": 2}) == io.digest({"b": 2, "a": 1}) != io.digest({"a": 2, "b": 1})


def test_records_cannot_be_changed():
    plan = Plan(default=LayerPlan(quantizer="nf4"))
    with pytest.raises(ValueError, match="frozen"):
        plan.model = "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not YAML"),
        ("a: &a [*a]", "contains itself"),
        (
            "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)),
            "more than 100,000 values",
        ),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("a: 1\nb: {c: 1, c: 2}\n", r":2: key 'b\.c' stands twice \(also in line 2\)"),
        ("a: 1\n\na: 2\n", r":3: key 'a' stands twice \(also in line 1\)"),
        ("on: 1\n", ":1: key 'on' is read as bool"),
        ("a:\n - 1: x\n", ":2: key '1' is read as int"),
        ("day: 2026-02-30\n", "cannot be read: day is out of range"),
    ],
)
def test_yaml_that_says_something_else_than_it_seems(tmp_path, text, message):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        io.read_yaml(path)


def test_yaml_gives_data_and_lines(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("# a comment\na: 1\nb:\n  - c: x\n    d: ü\n")
    data, lines = io.read_yaml(path)
    assert data == {"a": 1, "b": [{"c": "x", "d": "ü"}]}
    assert lines == {("a",): 2, ("b",): 3, ("b", 0): 4, ("b", 0, "c"): 4, ("b", 0, "d"): 5}
    path.write_bytes("a: ü".encode("latin-1"))
    with pytest.raises(InputError, match="is not UTF-8 text"):
        io.read_yaml(path)
