from __future__ import annotations

import json

import pytest

import toolkit as tk


@pytest.fixture
def profile(profile_of):
    """Twelve blocks: names of which one is the beginning or a part of another."""
    return profile_of(
        12,
        {
            "self_attn.v_proj": (2, 3),
            "self_attn.qkv_proj": (6, 3),
            "mlp.gate": (4, 3),
            "mlp.gate_proj": (4, 3),
            "mlp.experts.up_proj[3]": (4, 3),
            "mlp.experts.up_proj[30]": (4, 3),
        },
    )


def listed(profile, path, text, **options):
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return tk.select("listed", profile, file=str(path), **options).layers


def test_whole_components_only(profile, tmp_path):
    file = tmp_path / "list"
    block = [n for n in profile.names if n.startswith("model.layers.1.")]
    assert listed(profile, file, "model.layers.1\n") == block and len(block) == 6
    assert listed(profile, file, "layers.1.mlp\n") == [n for n in block if ".mlp." in n]
    for role, count in (("v_proj", 12), ("gate", 12), ("gate_proj", 12), ("self_attn.v_proj", 12), ("mlp", 48)):
        found = listed(profile, file, role)
        assert len(found) == count
        assert all(f".{role}." in f"{n}." for n in found)
    assert listed(profile, file, "layers.2.mlp.experts.up_proj[3]") == ["model.layers.2.mlp.experts.up_proj[3]"]
    assert len(listed(profile, file, "layers.2.mlp.experts.up_proj")) == 2


def test_the_three_forms(profile, tmp_path):
    names = ["model.layers.7.mlp.gate", "model.layers.0.self_attn.v_proj", "lm_head"]
    expected = [names[1], names[0]]  # model order, without the head
    text = "# by hand\n\n  model.layers.7.mlp.gate \nmodel.layers.0.self_attn.v_proj\r\nlm_head\n"
    assert listed(profile, tmp_path / "names.txt", text) == expected
    assert listed(profile, tmp_path / "names.json", names) == expected
    config = {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": names},
    }
    assert listed(profile, tmp_path / "config.json", config) == expected


@pytest.mark.parametrize("entry", ["model.layers.99", "layer.1", "_proj", "proj", "model.layers.1.mlp.gat", "LM_HEAD"])
def test_an_entry_that_matches_nothing(profile, tmp_path, entry):
    with pytest.raises(tk.InputError, match=f"list: '{entry}' matches no layer of tiny"):
        listed(profile, tmp_path / "list", f"model.layers.1\n{entry}\n")


def test_close_names_are_offered(profile, tmp_path):
    with pytest.raises(tk.InputError, match="did you mean 'gate_proj'"):
        listed(profile, tmp_path / "list", "gate_prj\n")


def test_a_list_written_for_many_models(profile, tmp_path):
    names = ["lm_head", "multi_modal_projector", "merger", "model.layers.3.mlp.gate"]
    with pytest.raises(tk.InputError, match=r"multi_modal_projector.*absent=ignore"):
        listed(profile, tmp_path / "l.json", names)
    assert listed(profile, tmp_path / "l.json", names, absent="ignore") == names[-1:]
    with pytest.raises(tk.InputError, match="names no layer"):
        listed(profile, tmp_path / "l.json", names[:-1], absent="ignore")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "names no layer"),
        ("lm_head\n", "names no layer"),
        ("[1, 2]", "no list of layer names"),
        ("[", "not JSON"),
        ("{}", "llm_int8_skip_modules is missing"),
        ('{"quantization_config": {"llm_int8_skip_modules": null}}', "is missing"),
        ('{"quantization_config": {"llm_int8_skip_modules": "lm_head"}}', "no list of layer names"),
    ],
)
def test_files_of_another_form(profile, tmp_path, text, message):
    with pytest.raises(tk.InputError, match=message):
        listed(profile, tmp_path / "list", text)


def test_no_file(profile, tmp_path):
    with pytest.raises(tk.InputError, match="file=PATH"):
        tk.select("listed", profile)
    with pytest.raises(tk.InputError, match="no file"):
        tk.select("listed", profile, file=str(tmp_path / "missing.txt"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(tk.InputError, match="UTF-8"):
        tk.select("listed", profile, file=str(tmp_path / "binary"))
