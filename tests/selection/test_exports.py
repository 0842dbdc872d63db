"""Selections in the form that PEFT and transformers read, on real models of those libraries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import toolkit as tk
from toolkit.cli import main
from toolkit.selection.exports import as_text, write_folder

LAYER = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}


@pytest.fixture
def llama(profile_of):
    """The profile of a Llama of twelve blocks, so that layers.1 and layers.10 exist."""
    return profile_of(12, LAYER)


def config():
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )


def names(profile, indexes):
    return tk.Selection(
        selector="by-hand",
        model=profile.model,
        fingerprint=profile.fingerprint,
        layers=[profile.names[i] for i in sorted(indexes)],
        parameters=len(indexes),
        bytes=2 * len(indexes),
        of={"layers": len(profile), "parameters": len(profile), "bytes": 2 * len(profile)},
    )


@pytest.mark.slow  # imports of the libraries
@pytest.mark.parametrize("indexes", [[7, 9, 13], [70, 77], list(range(0, 84, 3)), list(range(84))], ids=str)
def test_peft_adapts_exactly_the_selected_layers(llama, indexes):
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    selection = names(llama, indexes)
    targets = json.loads(as_text(selection, llama, "target-modules"))
    assert targets == selection.layers
    model = get_peft_model(AutoModelForCausalLM.from_config(config()), LoraConfig(r=2, target_modules=targets))
    found = [n for n, m in model.base_model.model.named_modules() if isinstance(m, LoraLayer)]
    assert sorted(found) == sorted(selection.layers)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config()).save_pretrained(folder)
    return folder


@pytest.mark.slow  # imports of the libraries
@pytest.mark.parametrize("indexes", [[9], [7, 13, 72], []], ids=str)
def test_transformers_quantizes_exactly_the_others(llama, checkpoint, indexes):
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    bnb = pytest.importorskip("bitsandbytes")
    selection = names(llama, indexes)
    skipped = json.loads(as_text(selection, llama, "skip-modules"))
    assert skipped == [*selection.layers, "lm_head"]
    quantization = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=quantization, device_map="cpu")
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    quantized = {n for n, m in linear.items() if isinstance(m, bnb.nn.Linear4bit)}
    assert set(linear) == {*llama.names, "lm_head"}
    assert quantized == set(llama.names) - set(selection.layers)


AWKWARD = [
    "layers.1.v_proj",
    "layers.10.v_proj",
    "layers.1.qkv_proj",
    "encoder.layers.1.v_proj",
    "layers.1.v_proj.inner",
]


def awkward(profile_of):
    """Names that end or begin one another, at the root and below it."""
    profile = profile_of(1, {str(i): (3, 4) for i in range(len(AWKWARD))}, head="score")
    rows = [row.model_copy(update={"name": name}) for row, name in zip(profile.layers, AWKWARD, strict=True)]
    return profile.model_copy(update={"layers": rows})


@pytest.mark.parametrize("at", range(len(AWKWARD)))
def test_names_that_hold_one_another(profile_of, at):
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from transformers.quantizers.quantizers_utils import should_convert_module

    profile = awkward(profile_of)
    selection = names(profile, [at])
    targets = json.loads(as_text(selection, profile, "target-modules"))
    setting = LoraConfig(target_modules=targets)
    assert [n for n in AWKWARD if check_target_module_exists(setting, n)] == [AWKWARD[at]]
    skipped = json.loads(as_text(selection, profile, "skip-modules"))
    assert skipped[-1] == "score" and len(skipped) == 2
    assert [n for n in AWKWARD if not should_convert_module(n, skipped)] == [AWKWARD[at]]
    assert not should_convert_module("score", skipped)
    assert isinstance(targets, list) == (at != 0) and (skipped[0] == AWKWARD[at]) == (at != 0)


def test_a_head_with_a_row_is_a_layer_like_others(profile_of):
    profile = profile_of(1, {"q": (3, 4), "up": (5, 4)}, head="model.layers.0.up")
    assert json.loads(as_text(names(profile, [0]), profile, "skip-modules")) == ["model.layers.0.q"]


def test_experts_of_a_stack_are_no_modules(profile_of):
    profile = profile_of(2, {"q": (3, 4), "experts.up[0]": (5, 4), "experts.up[1]": (5, 4)})
    selection = names(profile, [0, 2])
    for form in ("target-modules", "skip-modules"):
        with pytest.raises(tk.InputError, match=r"'model\.layers\.0\.experts\.up\[1\]' is one expert of a stack"):
            as_text(selection, profile, form)
    assert as_text(selection, profile, "names") == "model.layers.0.q\nmodel.layers.0.experts.up[1]"


def test_wrong_forms_and_models(llama, profile_of):
    with pytest.raises(tk.InputError, match=r"did you mean 'target-modules'"):
        as_text(names(llama, [0]), llama, "target-module")
    with pytest.raises(tk.InputError, match="another model"):
        as_text(names(profile_of(2, LAYER, model="other"), [0]), llama, "names")


@pytest.fixture
def files(tiny, tmp_path):
    """A profile's file, and two nested selections'."""
    tiny.save(tmp_path / "p.json")
    for share in ("0.25", "0.5"):
        tk.select("top-error", tiny, f"layers={share}").save(tmp_path / f"top{share}.json")
    return tmp_path


def run(capsys, *arguments, code=0):
    assert main([str(a) for a in ("select", *arguments)]) == code
    return capsys.readouterr()


def test_select_writes_draws_into_a_folder(files, tiny, capsys):
    ask = ["random-matched", "--profile", files / "p.json", "--like", files / "top0.5.json", "--within", "0.2"]
    run(capsys, *ask, "--draws", 12, "--match", "adapter-parameters", "-o", files / "d")
    found = sorted((files / "d").iterdir())
    assert [p.name for p in found[:2]] == ["draw-00000.json", "draw-00001.json"] and len(found) == 12
    like = tk.Selection.load(files / "top0.5.json")
    expected = tk.draws("random-matched(within=0.2,match=adapter-parameters)", tiny, like=like, count=12)
    assert [tk.Selection.load(p) for p in found] == expected
    before = found[3].stat().st_mtime_ns
    run(capsys, *ask, "--draws", 14, "--match", "adapter-parameters", "-o", files / "d")  # the beginning is the same
    assert len(list((files / "d").iterdir())) == 14 and found[3].stat().st_mtime_ns == before
    said = run(capsys, *ask, "--draws", 14, "--seed", 1, "-o", files / "d", code=2).err
    assert "draw-00000.json exists with other content" in said
    assert [tk.Selection.load(p) for p in found] == expected
    assert "need a folder" in run(capsys, *ask, "--draws", 2, code=2).err
    assert "is a file" in run(capsys, *ask, "--draws", 2, "-o", files / "p.json", code=2).err


def test_select_writes_families(files, tiny, capsys):
    likes = ["--like", files / "top0.25.json", "--like", files / "top0.5.json"]
    ask = ["random-permuted", "--profile", files / "p.json", *likes]
    run(capsys, *ask, "--chain", "--draws", 3, "-o", files / "f")
    found = sorted((files / "f").iterdir())
    assert [p.name for p in found[:3]] == ["draw-00000-1.json", "draw-00000-2.json", "draw-00001-1.json"]
    small, large = (tk.Selection.load(p) for p in found[4:6])
    assert set(small.layers) < set(large.layers) and small.draw == large.draw == 2 and small.chain == large.chain
    run(capsys, *ask, "--chain", "--draws", 3, "--as", "names", "-o", files / "n")
    assert (files / "n" / "draw-00002-1.txt").read_text().split() == small.layers
    assert "only nested families (--chain)" in run(capsys, *ask, "-o", files / "g", code=2).err
    assert "leave --budget out" in run(capsys, *ask, "--chain", "--budget", "layers=0.5", code=2).err
    assert "--like" in run(capsys, *ask[:3], "--chain", "-o", files / "g", code=2).err
    assert not (files / "g").exists()


def test_select_says_where_fewer_exist(files, tiny, capsys):
    ask = ["depth-matched", "--profile", files / "p.json", "--like", files / "top0.25.json", "--draws", 10**6]
    said = run(capsys, *ask, "--as", "names", "-o", files / "d").err
    like = tk.Selection.load(files / "top0.25.json")
    count = tk.select("depth-matched", tiny, like=like).feasible_subsets
    assert f"only {count} different draws were found of the 1000000" in said
    assert len(list((files / "d").iterdir())) == count


@pytest.mark.parametrize("form", ["target-modules", "skip-modules", "names"])
def test_select_as(files, tiny, capsys, form):
    ask = ["top-error", "--profile", files / "p.json", "--budget", "layers=0.5", "--as", form]
    out = run(capsys, *ask).out
    found = out.split() if form == "names" else json.loads(out)
    like = tk.Selection.load(files / "top0.5.json")
    assert found == like.layers + (["lm_head"] if form == "skip-modules" else [])
    run(capsys, *ask, "-o", files / "out")
    assert (files / "out").read_text() == out


def test_a_folder_is_all_or_nothing(tiny, tmp_path):
    found = [[s] for s in tk.draws("random-count", tiny, "layers=0.25", count=4)]
    (tmp_path / "draw-00003.json").write_text("{}")
    with pytest.raises(tk.InputError, match="draw-00003"):
        write_folder(tmp_path, found, tiny)
    assert [p.name for p in tmp_path.iterdir()] == ["draw-00003.json"]


def test_select_starts_without_heavy_libraries(files):
    arguments = ["select", "random-matched", "--profile", str(files / "p.json"), "--like", str(files / "top0.5.json")]
    arguments += ["--within", "0.2", "-o", str(files / "s.json")]
    code = (
        "import sys, time; start = time.process_time(); from toolkit.cli import main; "
        f"code = main({arguments!r}); "
        "libraries = ('torch', 'transformers', 'bitsandbytes', 'peft', 'scipy', 'matplotlib'); "
        "print(code, [m for m in libraries if m in sys.modules], time.process_time() < 1.5)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "0 [] True"
