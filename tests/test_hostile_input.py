"""Input that nobody should give: one clear error each, no traceback, nothing replaced, no silent answer."""

import json
import os
import struct

import pytest

import toolkit as tk
from toolkit.cli import main
from toolkit.errors import InputError, RunError
from toolkit.records.plan import Plan
from toolkit.records.profile import Profile
from toolkit.records.study import Study, slug
from toolkit.registry import registry
from toolkit.runs.texts.documents import read_text


@pytest.fixture(scope="module")
def profile(checkpoints, tmp_path_factory):
    """A profile file."""
    return tk.profile(checkpoints("llama")).save(tmp_path_factory.mktemp("hostile") / "profile.json")


def refused(capsys, *arguments, code=2):
    """The error of a command that must fail."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error and len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize("amount", ["1e-99999999", "1e-999999999999"])
def test_a_fraction_of_endless_places_is_refused_at_once(amount):
    with pytest.raises(InputError, match="decimal places"):
        tk.Budget.parse(f"layers={amount}")
    assert tk.Budget.parse("layers=1e-9").of(100) == 1


@pytest.mark.parametrize(
    "options",
    [["--set", "measure=mse", "--set", "measure=mae"], ["--within", "0.1", "--set", "within=0.2"]],
)
def test_an_option_given_twice_is_refused(capsys, profile, options):
    error = refused(capsys, "select", "top-error", "--profile", profile, "--budget", "layers=0.2", *options)
    assert "set twice" in error


def test_an_option_in_the_key_and_beside_it_is_refused():
    with pytest.raises(InputError, match=r"'block'.*set twice"):
        registry.make("quantizer", "nf4(block=64)", {"block": 128})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda row: row.update(parameters=7), "do not agree"),
        (lambda row: row.update(bytes=1), "do not agree"),
        (lambda row: row.update(shape=[-64, -64]), "do not agree"),
        (lambda row: row.update(block=99), "block 99"),
        (lambda row: row.update(error={}), "no quantizer"),
    ],
)
def test_a_profile_edited_by_hand_is_refused(tmp_path, profile, change, word):
    data = json.loads(profile.read_text())
    change(data["layers"][3])
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=word) as caught:
        Profile.load(path)
    assert data["layers"][3]["name"] in str(caught.value) and str(path) in str(caught.value)


def test_a_file_of_another_kind_is_one_line(capsys, profile):
    error = refused(capsys, "plan", "--base", "nf4", "--protect", profile)
    assert "'profile'" in error and "'selection'" in error


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), 0.0, -4.0])
def test_an_alpha_that_scales_nothing_is_refused(alpha):
    with pytest.raises(InputError, match="alpha"):
        Plan.protecting(None, "nf4", rank=8, alpha=alpha)


@pytest.mark.parametrize("options", [["--alpha", "32"], ["--scaler", "rslora"]])
def test_adapter_options_without_a_rank_are_refused(capsys, options):
    assert "--rank" in refused(capsys, "plan", "--base", "nf4", *options)


def test_an_output_that_is_no_file_is_refused_before_the_work(capsys, profile, tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.weights.profiling.profile", lambda *a, **k: pytest.fail("measured"))
    assert "is a folder" in refused(capsys, "profile", "demo", "-o", tmp_path)
    assert "not a folder" in refused(capsys, "profile", "demo", "-o", profile / "x" / "y.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_device_is_never_replaced_by_a_file(capsys, profile, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    error = refused(capsys, "select", "all", "--profile", profile, "-o", pipe)
    assert "no ordinary file" in error and pipe.is_fifo()


def test_what_was_not_foreseen_is_one_line_and_a_traceback_on_request(capsys, profile, monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr("toolkit.selection.select.select", broken)
    given = ["select", "all", "--profile", profile]
    assert "ZeroDivisionError: a b" in refused(capsys, *given, code=1)
    with pytest.raises(ZeroDivisionError):
        main([*map(str, given), "--debug"])


def test_an_interrupt_says_that_nothing_is_lost(capsys, profile, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.selection.select.select", interrupted)
    assert main(["select", "all", "--profile", str(profile)]) == 130
    assert capsys.readouterr().err.startswith(
        "interrupted; what was finished or saved is kept, the same command goes on"
    )


def test_a_selector_that_raises_is_named(profile):
    class Raising(tk.RankingSelector):
        """Fails."""

        name = "raising"

        def score(self, profile):
            return 1 / 0

    with pytest.raises(RunError, match="selector raising failed: ZeroDivisionError"):
        tk.select(Raising(), Profile.load(profile), "layers=0.2")


def test_a_damaged_header_and_config(checkpoints, tmp_path):
    from toolkit.weights.checkpoints import read_header

    nested = b"[" * 50_000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(nested)) + nested)
    with pytest.raises(InputError, match="header is damaged"):
        read_header(tmp_path / "model.safetensors")
    source = checkpoints("llama")
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": "three"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="num_hidden_layers is 'three'"):
        tk.profile(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.jsonl", b'{"text": "\\ud800 abc"}\n', "surrogate"),
        ("a.jsonl", b"[" * 100_000, "is not JSON"),
        ("a.txt.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 50, "gzip"),
    ],
)
def test_texts_that_are_no_text(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=word):
        read_text(str(tmp_path / name))


def test_names_without_a_plain_letter_still_name_a_folder():
    assert slug("選択") and slug("選択") != slug("深さ") and slug("top-error") == "top-error"


def test_a_plug_in_that_exits_at_import_is_left_out(monkeypatch, capsys):
    import importlib.metadata

    from toolkit.registry import Registry

    class Point:
        """An entry point whose module ends the process."""

        name, value, dist = "evil", "evil", None

        def load(self):
            raise SystemExit(3)

    real = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **k: [*real(**k), Point()])
    found = Registry()
    assert "top-error" in found.of_kind("selector")
    assert "evil" in found.failures and "evil" in capsys.readouterr().err


def test_a_study_without_a_text_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="texts"):
        Study(
            name="a",
            question="?",
            texts={},
            budgets=["layers=0.2"],
            arms=[{"selector": "top-error"}],
            controls=[{"selector": "random-count", "draws": 1}],
            analysis={"control": "random-count"},
        )
