"""The shell, verb by verb, from a checkpoint to a table and a figure; and its errors."""

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from typer.main import get_command

import toolkit as tk
from toolkit.cli import app, main

STUDY = {
    "name": "tiny",
    "question": "Does it run?",
    "base": "nf4",
    "window": 64,
    "tokens": 256,
    "batch": 2,
    "budgets": ["layers=0.2"],
    "arms": [{"selector": "top-error"}, {"selector": "bottom-error"}],
    "controls": [{"selector": "random-matched(within=0.2)", "name": "matched", "draws": 3}],
    "analysis": {"control": "matched"},
}


def ok(*arguments):
    assert main([str(a) for a in arguments]) == 0


def fails(capsys, code, *arguments):
    """The error text of a command that must fail."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == code
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def profiled(checkpoints, tmp_path_factory):
    """A model's folder and its profile file."""
    model = checkpoints("llama")
    path = tmp_path_factory.mktemp("cli") / "profile.json"
    ok("profile", model, "-q", "nf4", "-q", "nvfp4", "-o", path)
    return model, path


def test_profile_has_the_keys_that_scripts_read(profiled):
    model, path = profiled
    data = json.loads(path.read_text())
    assert data["schema"] == 1 and data["fingerprint"] and data["model"]
    row = data["layers"][0]
    assert row["name"] == "model.layers.0.self_attn.q_proj" and row["role"] == "q_proj" and row["block"] == 0
    assert row["shape"] == [64, 64] and row["parameters"] == 4096 and row["bytes"] == 8192
    assert set(row["error"]) == {"nf4", "nvfp4"}
    assert set(row["error"]["nf4"]) == {"mse", "mae", "relative", "max", "bytes"}
    assert tk.profile(model, ["nf4", "nvfp4"]).to_json() == data


def test_select_plan_and_build(profiled, tmp_path, capsys):
    model, profile = profiled
    top, draw, plan = tmp_path / "top.json", tmp_path / "draw.json", tmp_path / "plan.json"
    ok("select", "top-error", "--profile", profile, "--budget", "layers=0.2", "--set", "quantizer=nvfp4", "-o", top)
    chosen = json.loads(top.read_text())
    assert chosen["options"]["quantizer"] == "nvfp4" and chosen["budget"] == {"layers": "0.2"}
    assert len(chosen["layers"]) == 5 and "mismatch" not in chosen  # ⌈.2 × 21⌉
    ok("select", "random-matched", "--profile", profile, "--like", top, "--within", "0.3", "--seed", 7, "-o", draw)
    drawn = json.loads(draw.read_text())
    assert drawn["seed"] == 7 and drawn["matched_to"]["parameters"] == chosen["parameters"]
    assert abs(drawn["mismatch"]) <= 0.3 and drawn["feasible_subsets"] > 1 and len(drawn["inclusion"]) == 21
    ok("plan", "--protect", top, "--base", "nf4", "--rank", 4, "--alpha", 8, "--scaler", "rslora", "-o", plan)
    planned = tk.Plan.load(plan)
    assert planned.default.adapter.scaling == pytest.approx(8 / 2)
    built = tk.build(model, tk.Plan.protecting(tk.Selection.load(top), "nf4"))
    assert type(built.get_submodule(chosen["layers"][0])).__name__ == "Linear"
    quantized = [type(m).__name__ for m in built.modules() if type(m).__name__ in ("Linear4bit", "FrozenLinear")]
    assert len(quantized) == 21 - 5


def test_run_table_and_figure(profiled, text_file, tmp_path, capsys):
    model, _ = profiled
    study, out = tmp_path / "study.yaml", tmp_path / "out"
    study.write_text(yaml.safe_dump(STUDY))
    ok("run", study, "--model", model, "--text", f"letters={text_file}", "--out", out)
    said = capsys.readouterr().err
    assert "descriptive" in said  # before it starts: three draws cannot reach .05
    assert sorted(p.parent.name for p in out.glob("*/report.json")) == [
        "layers-0.2--bottom-error",
        "layers-0.2--bottom-error--matched",
        "layers-0.2--top-error",
        "layers-0.2--top-error--matched",
        "reference--16-bit",
        "reference--base",
        "repeat--base",
    ]
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/report.json")}
    ok("run", study, "--model", model, "--text", f"letters={text_file}", "--out", out)
    assert {p: p.stat().st_mtime_ns for p in out.glob("*/report.json")} == before
    capsys.readouterr()
    ok("table", out)
    shown = capsys.readouterr().out
    for word in ("top-error", "bottom-error", "smallest p", "descriptive", "16-bit", "mismatch"):
        assert word.lower() in shown.lower()
    ok("table", out, "--format", "json", "-o", tmp_path / "table.json")
    data = json.loads((tmp_path / "table.json").read_text())
    assert data["arms"] and not any("paired" in arm for arm in data["arms"])
    ok("table", out, "--format", "json", "--paired", "-o", tmp_path / "paired.json")
    for arm in json.loads((tmp_path / "paired.json").read_text())["arms"]:
        base = next(r for r in data["references"] if r["kind"] == "base")["scores"]["letters"]["loss"]
        difference = arm["paired"]["letters"]["base"]["difference"]
        assert difference == pytest.approx(arm["scores"]["letters"]["loss"] - base, abs=1e-6)
    capsys.readouterr()
    ok("table", out, "--format", "csv")
    assert len(list(csv.reader(io.StringIO(capsys.readouterr().out)))) > 4
    ok("figure", out, "-o", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_another_text_is_refused_in_the_same_folder(profiled, text_file, tmp_path, capsys):
    model, _ = profiled
    study, out = tmp_path / "study.yaml", tmp_path / "out"
    study.write_text(
        yaml.safe_dump(STUDY | {"controls": [{"selector": "random-count", "name": "matched", "draws": 1}]})
    )
    ok("run", study, "--model", model, "--text", f"letters={text_file}", "--out", out)
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("a", "b"))
    error = fails(capsys, 2, "run", study, "--model", model, "--text", f"letters={other}", "--out", out)
    assert "letters" in error and "--out" in error and len(error.splitlines()) <= 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["select", "top-eror", "--profile", "P", "--budget", "layers=0.2"], ["top-eror", "'top-error'"]),
        (["select", "top-error", "--profile", "P"], ["top-error", "needs a budget"]),
        (["select", "top-error", "--profile", "P", "--budget", "layers=2"], ["layers=2", "(0, 1]"]),
        (["select", "top-error", "--profile", "P", "--budget", "layer=0.2"], ["'layer'", "'layers'"]),
        (["select", "top-error", "--profile", "P", "--budget", "bytes=3"], ["nothing"]),
        (["select", "random-matched", "--profile", "P"], ["--like"]),
        (["select", "top-error", "--profile", "P", "--budget", "layers=0.2", "--set", "x"], ["KEY=VALUE"]),
        (["select", "top-error", "--profile", "P", "--budget", "layers=0.2", "--within", "0.1"], ["'within'"]),
        (["select", "top-error", "--profile", "missing.json", "--budget", "layers=0.2"], ["missing.json"]),
        (["plan", "--base", "nf5"], ["nf5", "nf4"]),
        (["list", "selector"], ["'selectors'"]),
        (
            ["calibrate", "loftq(base=gptq)", "--text", "x.txt"],
            ["is an initializer", "'loftq(base=gptq)' -o plan.json"],
        ),
        (["calibrate", "gradient-sensitivity", "--text", "x"], ["--text plays no part"]),
        (["fuse", "missing.json", "--model", "demo"], ["missing.json"]),
        (["profile", "./no/such/model"], ["no/such/model"]),
        (["run", "studies/ranking-contrl"], ["ranking-contrl"]),
        (["table", "./nowhere"], ["nowhere"]),
    ],
)
def test_bad_input_is_one_clear_error(profiled, capsys, arguments, words):
    error = fails(capsys, 2, *[str(profiled[1]) if a == "P" else a for a in arguments])
    assert error.startswith("error: ") and "Traceback" not in error and len(error.splitlines()) <= 4
    for word in words:
        assert word in error


@pytest.mark.parametrize("verb", ["initialize", "calibrate", "fuse"])
def test_a_plan_file_is_named_with_its_neighbours_and_its_model_asked_for(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tk.Plan.protecting(None, "nf4", rank=4, initializer="loftq").save("plan.json")
    more = ["-o", "out"] if verb != "calibrate" else ["-o", "out", "--text", "python-topics"]
    assert "pln.json; did you mean 'plan.json'?" in fails(capsys, 2, verb, "pln.json", *more)
    assert "--model" in fails(capsys, 2, verb, "plan.json", *more) and not (tmp_path / "out").exists()


def test_fuse_says_how_many_layers_share_a_scale(profiled, capsys, tmp_path):
    model, _ = profiled
    for base, words in (
        ("nvfp4", "layers share the scale of their fused group"),
        ("nf4", "no layer was given a shared"),
    ):
        tk.Plan.protecting(None, base).save(tmp_path / "plan.json")
        capsys.readouterr()
        ok("fuse", tmp_path / "plan.json", "--model", model, "-o", tmp_path / "fused.json")
        said = capsys.readouterr().err
        assert words in said
        given = [layer for layer in tk.Plan.load(tmp_path / "fused.json").layers.values() if "amax" in layer.quantizer]
        assert (f"{len(given)} layers share" in said) == bool(given) == (base == "nvfp4")


def test_every_example_in_a_help_text_parses():
    commands = get_command(app).commands
    seen = 0
    for command in commands.values():
        pieces = re.split(r"\b(?:[A-Z][a-z-]*|then)(?: \w+)*: (?=toolkit )", " ".join((command.help or "").split()))
        for words in (shlex.split(piece.partition(";")[0]) for piece in pieces[1:]):
            commands[words[1]].make_context(words[1], words[2:])
            seen += 1
    assert seen >= len(commands)


def test_debug_shows_the_traceback():
    with pytest.raises(tk.InputError):
        main(["plan", "--base", "nf5", "--debug"])


def test_list_as_json_and_as_text(capsys):
    ok("list", "selectors", "--json")
    found = json.loads(capsys.readouterr().out)
    assert {c["name"] for c in found} >= {"top-error", "random-matched", "listed"}
    assert all(c["kind"] == "selectors" and c["source"] and c["summary"] for c in found)
    ok("list")
    assert "quantizers" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["profile", "select", "plan", "run", "table", "figure", "list"])
def test_help_has_an_example(verb, capsys):
    ok(verb, "--help")
    assert f"Example: toolkit {verb}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("main(['list', 'selectors'])", ["torch", "transformers", "bitsandbytes", "matplotlib", "scipy"]),
        ("main(['select', 'top-error', '--profile', P, '--budget', 'layers=0.2'])", ["torch", "transformers"]),
        ("main(['profile', M])", ["transformers", "bitsandbytes", "matplotlib", "scipy"]),
    ],
)
def test_verbs_import_what_they_need(profiled, code, absent):
    script = (
        f"import sys; from toolkit.cli import main; M, P = {str(profiled[0])!r}, {str(profiled[1])!r}\n"
        f"assert {code} == 0\nprint([m for m in {absent!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_failure():
    """As `toolkit list | head` does."""
    code = "import sys; from toolkit.cli import main; sys.exit(main(['list']))"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command.stdout.close()
    _, said = command.communicate(timeout=120)
    assert (command.returncode, said) == (0, "")
