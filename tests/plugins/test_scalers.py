"""Scalings away from 1, where scaling mistakes hide."""

from __future__ import annotations

import pytest

import toolkit as tk


@pytest.mark.parametrize(
    ("key", "alpha", "rank", "expected"),
    [
        ("lora", 16, 8, 2.0),
        ("lora", 8, 32, 0.25),
        ("lora", 3.5, 7, 0.5),
        ("rslora", 16, 8, 5.656854249492381),
        ("rslora", 16, 32, 2.8284271247461903),
        ("rslora", 16, 4, 8.0),
        ("rslora", 8, 1, 8.0),
        ("fixed", 16, 8, 1.0),
        ("fixed(value=0.3)", 16, 8, 0.3),
        ("fixed(value=0.3)", 99, 1, 0.3),
    ],
)
def test_values(key, alpha, rank, expected):
    assert tk.scaler(key)(alpha, rank) == pytest.approx(expected, rel=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 32])
def test_equal_to_peft(rank):
    """The factor that PEFT computes for the same settings."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    for key, rslora in (("lora", False), ("rslora", True)):
        model = torch.nn.Sequential(torch.nn.Linear(48, 80))
        config = peft.LoraConfig(r=rank, lora_alpha=20, use_rslora=rslora, target_modules=["0"])
        layer = peft.get_peft_model(model, config).base_model.model[0]
        assert tk.scaler(key)(20, rank) == pytest.approx(layer.scaling["default"], rel=1e-15)


@pytest.mark.parametrize("key", ["lora", "rslora", "fixed"])
@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one(key, rank):
    with pytest.raises(tk.InputError, match=f"found {rank}"):
        tk.scaler(key)(16, rank)


@pytest.mark.parametrize("value", ["nan", "inf", "much"])
def test_a_fixed_value_that_is_no_number(value):
    with pytest.raises(tk.InputError, match="'value'"):
        tk.scaler("fixed", value=value)
