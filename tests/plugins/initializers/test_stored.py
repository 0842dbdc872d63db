"""A base read from another library's checkpoint: bit for bit what was written, and refused where it is not there."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit as tk
from tests.runs.exporting.conftest import source  # noqa: F401 — a fixture
from toolkit.errors import InputError
from toolkit.runs.models import load_model
from toolkit.weights.layers import layers_of

FORMS = {"nvfp4": "compressed-tensors", "mxfp4": "compressed-tensors", "nf4": "bnb", "nf4(double=false)": "bnb"}
LAYER = "model.layers.1.mlp.down_proj"


def weight_of(folder, name=LAYER):
    return next(layer.weight() for layer in layers_of(load_model(folder, device="cpu")) if layer.name == name)


@pytest.fixture
def written(tmp_path, source):  # noqa: F811
    def write(quantizer):
        plan = tk.Plan.protecting(None, base=quantizer)
        plan.save(tmp_path / "plan.json")
        more = {} if FORMS[quantizer] == "bnb" else {"fused": "separate"}
        tk.export(tmp_path / "plan.json", FORMS[quantizer], tmp_path / "base", model=source(), verify=False, **more)
        return tmp_path / "base"

    return write


@pytest.mark.parametrize("quantizer", FORMS)
def test_what_was_written_is_read_bit_for_bit(written, source, quantizer):  # noqa: F811
    folder = written(quantizer)
    weight = weight_of(source())
    start = tk.initialize(
        weight, initializer=f"stored:{folder}", quantizer=quantizer, rank=4, alpha=8, scaler="lora", name=LAYER
    )
    own = tk.quantizer(quantizer).quantize(weight)
    for key, tensor in own.tensors.items():
        if key == "global_scale":  # a reciprocal of a reciprocal
            torch.testing.assert_close(start.base.tensors[key], tensor, rtol=2**-22, atol=0)
        else:
            assert torch.equal(start.base.tensors[key].view(-1), tensor.view(-1)), key
    assert start.kept == 1 and start.residuals[1] == pytest.approx(start.residuals[0], rel=1e-6)
    assert not start.B.any() and start.scaling == 2


def test_codes_that_other_software_chose_are_kept(written, source):  # noqa: F811
    folder = written("nvfp4")
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    held[f"{LAYER}.weight_packed"] ^= 0x11  # the lowest bit of every code
    save_file(held, file, metadata={"format": "pt"})
    weight = weight_of(source())
    start = tk.initialize(weight, initializer=f"stored:{folder}", quantizer="nvfp4", rank=4, name=LAYER)
    assert start.residual > 2 * start.residuals[0]
    assert torch.equal(start.base.tensors["codes"], tk.quantizer("nvfp4").quantize(weight).tensors["codes"] ^ 0x11)


def test_a_model_is_built_on_it(written, source):  # noqa: F811
    folder = written("mxfp4")
    plan = tk.Plan.protecting(None, base="mxfp4", initializer=f"stored:{folder}")
    ids = torch.arange(24).view(1, 24)
    built = tk.build(source(), plan, dtype="float32")(ids).logits
    assert torch.equal(built, tk.build(source(), tk.Plan.protecting(None, base="mxfp4"), dtype="float32")(ids).logits)


@pytest.mark.parametrize(
    ("key", "quantizer", "name", "message"),
    [
        ("stored", "nvfp4", LAYER, "name its folder"),
        ("stored:nowhere", "nvfp4", LAYER, "no folder nowhere"),
        ("stored:FOLDER", "fp4-e2m1", LAYER, "holds fp4-e2m1"),
        ("stored:FOLDER", "nvfp4", "model.layers.1.mlp.down_prj", "down_proj"),
        ("stored:FOLDER", "nvfp4", "model.layers.1.mlp.up_proj", "of shape"),
        ("stored:FOLDER", "nf4", LAYER, "no 'weight'"),
    ],
)
def test_what_is_not_there_is_refused(written, source, key, quantizer, name, message):  # noqa: F811
    folder = written("nvfp4")
    with pytest.raises(InputError, match=message):
        tk.initialize(
            weight_of(source()),
            initializer=key.replace("FOLDER", str(folder)),
            quantizer=quantizer,
            rank=4,
            name=name,
        )
