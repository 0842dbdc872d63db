"""The range guard: float16 products that cannot overflow, exact up to counted subnormals; who takes the answers."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

import toolkit as tk
from tests.conftest import configs
from toolkit.errors import InputError
from toolkit.records.plan import LayerPlan, Plan
from toolkit.runs import guard
from toolkit.runs.building import build
from toolkit.runs.frozen import FrozenLinear

IDS = torch.arange(48).view(2, 24) * 7 % 256
EXACT = 2.0**-11
"""Half a unit in the last place of float16, relative."""


def layer(weight: torch.Tensor, bias: torch.Tensor | None = None, quantizer: str = "none") -> FrozenLinear:
    return FrozenLinear(tk.quantizer(quantizer).quantize(weight), bias, torch.float16, guarded=True)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# k


@pytest.mark.parametrize(
    ("row", "largest", "k"),
    [
        ([1.0, 0.0], 65504.0, 0),  # the bound is the largest float16 itself
        ([1.0, 0.0], 65536.0, 1),
        ([3.0, 4.0], 65504.0, 3),  # 5 -> 8
        ([2.0, 0.0], 65504.0, 1),  # exactly a power of two: the least k, and no more
        ([4.0, 0.0], 65504.0, 2),
        ([0.0, 0.0], 1e30, 0),
        ([65504.0, 0.0], 1.0, 0),
        ([60000.0, 60000.0], 0.0, 0),
    ],
)
def test_k_is_the_least_that_fits(row, largest, k):
    assert guard.exponent(torch.tensor([row], dtype=torch.float16), largest).tolist() == [[k]]


def test_a_float32_row_must_itself_fit():
    assert guard.exponent(torch.tensor([[131008.0, 1.0]]), 1e-9).item() == 1
    assert guard.exponent(torch.tensor([[3e38, 3e38]]), 1.0).item() == 113  # its norm is beyond float32
    assert guard.exponent(torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0]]), 1e9).tolist() == [[0], [0]]


def test_powers_of_two_are_exact():
    k = torch.arange(-126, 128, dtype=torch.int32)
    assert guard.power_of_two(k).tolist() == [2.0**i for i in k.tolist()]


# products


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (1, 33)])
def test_rows_that_fit_are_the_plain_float16_product(shape):
    weight, x = random(*shape, scale=0.1).half(), random(7, shape[1], seed=1).half()
    frozen = layer(weight)
    y = frozen(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, nn.functional.linear(x, weight).float())
    assert guard.counts(nn.ModuleDict({"one": frozen}))["one"] == guard.Counts(7, 0, 0, 0)


@pytest.mark.parametrize("shape", [(48, 80), (80, 48)])
@pytest.mark.parametrize("scale", [10.0, 1e3, 6e3])
def test_overflowing_rows_equal_float64_forward_and_backward(shape, scale):
    weight, bias = random(*shape, scale=3).half(), random(shape[0], seed=5).half()
    x = (random(9, shape[1], seed=1) * scale).half().requires_grad_()
    plain = nn.functional.linear(x.detach(), weight)
    if scale > 1e3:
        assert plain.isinf().any()
    frozen = layer(weight, bias)
    y = frozen(x)
    exact = x.detach().double() @ weight.double().T
    # rounding: of the product in float16, of its accumulation in float32
    allowed = exact.abs() * EXACT * 1.01 + x.detach().double().abs() @ weight.double().abs().T * 2**-20
    assert ((y.double() - exact - bias.double()).abs() <= allowed).all()
    incoming = random(9, shape[0], seed=2) * scale
    y.backward(incoming)
    wanted = incoming.double() @ weight.double()
    fits = wanted.abs() < 65504
    # ∂y arrives in float32, and is rounded to float16's 11 bits before it is multiplied
    allowed = wanted.abs() * 2 * EXACT + incoming.double().abs() @ weight.double().abs() * EXACT
    assert ((x.grad.double() - wanted).abs() <= allowed)[fits].all()
    counted = frozen.guard.read()
    assert counted.rows == 18
    assert counted.saturated == (x.grad.isinf()).sum() == (~fits & x.grad.isinf()).sum()


@given(
    power=st.integers(0, 15),
    seed=st.integers(0, 99),
    rows=st.integers(1, 5),
    size=st.sampled_from([(3, 16), (16, 3), (8, 40)]),
)
def test_scaling_down_changes_no_bit(power, seed, rows, size):
    """2^p times a row is 2^p times its product, bit for bit, however the guard scaled; else it was counted."""
    x = random(rows, size[1], seed=seed).half()
    x = torch.where(x.abs() < 2.0**-6, 0, x).clamp(-1.9, 1.9)  # 2^p·x stays exact and finite
    weight = random(*size, seed=seed + 1).half()
    frozen = layer(weight)
    once = nn.functional.linear(x, weight).float()
    times = frozen((x.float() * 2.0**power).half())
    equal = torch.equal(times, once * 2.0**power)
    small = (once.abs() < 2.0**-14).any() or frozen.guard.read().subnormal > 0
    assert equal or small


@given(exponent=st.integers(-20, 100), seed=st.integers(0, 50))
def test_float32_rows_of_any_size(exponent, seed):
    x = random(3, 24, seed=seed) * 2.0**exponent
    weight = random(10, 24, seed=seed + 1).half()
    y = layer(weight)(x)
    exact = x.double() @ weight.double().T
    mass = x.double().abs() @ weight.double().abs().T
    floor = weight.double().abs().sum(1) * 2.0**-25 + 2.0**-25  # inputs and products that are subnormal
    assert y.isfinite().all()
    assert ((y.double() - exact).abs() <= mass * 2 * EXACT + floor * max(1.0, 2.0**exponent)).all()


def test_subnormal_values_of_scaled_rows_are_counted():
    weight = torch.eye(4, 8).half() * 4096
    x = torch.zeros(3, 8)
    x[0, 0], x[0, 1] = 2.0**14, 2.0**-13  # scaled by 2^-11: the second one is subnormal
    x[1, 0] = 2.0**-13  # not scaled
    frozen = layer(weight)
    y = frozen(x.half())
    k = 11
    assert guard.exponent(x.half(), 4096.0).squeeze(-1).tolist() == [k, 0, 0]
    assert y[0, 0] == 2.0**26 and y[1, 0] == 0.5
    counted = frozen.guard.read()
    # the input 2^-24, and three products: 2^-12 is normal, two of the four are zero
    assert (counted.rows, counted.scaled, counted.subnormal) == (3, 1, 1 + 2)


def test_zero_rows_and_what_is_not_finite_are_passed_on():
    weight = random(6, 8, scale=500).half()
    x = torch.zeros(4, 8).half()
    x[1, 3], x[2, 2] = float("inf"), float("nan")
    x[3] = 60000
    y = layer(weight)(x)
    assert torch.equal(y[0], torch.zeros(6))
    assert not y[1].isfinite().any() and y[2].isnan().all()
    assert y[3].isfinite().all() and y[3].abs().max() > 65504


@pytest.mark.parametrize("quantizer", ["nf4", "nvfp4", "mxfp4", "residual(inner=nvfp4)"])
def test_packed_weights_are_guarded_alike(quantizer):
    weight = random(48, 80, scale=4).half()
    frozen = layer(weight, quantizer=quantizer)
    x = random(5, 80, seed=1, scale=8000).half()
    exact = x.double() @ frozen.weight.double().T
    assert exact.abs().max() > 65504
    mass = x.double().abs() @ frozen.weight.double().abs().T
    assert ((frozen(x).double() - exact).abs() <= exact.abs() * EXACT * 1.01 + mass * 2**-20).all()


def test_float32_compute_overflows_nowhere_inside_and_counts_what_saturates_outside():
    weight = random(48, 80, scale=2).half()
    frozen = FrozenLinear(tk.quantizer("none").quantize(weight), None, torch.float32)
    frozen.count_casts()
    x = random(5, 80, seed=1, scale=2000).half().requires_grad_()
    y = frozen(x)
    exact = nn.functional.linear(x.detach().float(), weight.float())
    assert y.dtype == torch.float16 and torch.equal(y, exact.half())
    assert frozen.casts.read().saturated == exact.half().isinf().sum() > 0
    # backward: products of 2e4 · 2 cancel in float32, and their partial sums are beyond float16
    incoming = torch.full_like(y, 2e4)
    incoming[:, 1::2] *= -1
    frozen2 = FrozenLinear(
        tk.quantizer("none").quantize(torch.full((48, 80), 9.0, dtype=torch.float16)), None, torch.float32
    )
    z = frozen2(x)
    x.grad = None
    z.backward(incoming)
    assert torch.equal(x.grad, torch.zeros_like(x.grad))


# the model


PLANS = {
    "mlp down": ["model.layers.0.mlp.down_proj", "model.layers.2.mlp.down_proj"],
    "attention out": ["model.layers.1.self_attn.o_proj"],
    "query alone": ["model.layers.1.self_attn.q_proj"],
    "gate": ["model.layers.0.mlp.gate_proj"],
    "whole attention": [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"],
}


def model(family: str = "llama", dtype: torch.dtype = torch.float16, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(configs()[family])
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return made.to(dtype).eval()


def plan(names: list[str], base: str = "none", **adapter) -> Plan:
    plain = Plan.protecting(None, base, **adapter)
    kept = plain.default.model_copy(update={"quantizer": "none", "range_guard": True})
    return plain.model_copy(update={"layers": dict.fromkeys(names, kept)})


@pytest.mark.parametrize("names", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("base", ["none", "nf4(block=32)", "mxfp4"])
def test_a_guarded_model_computes_what_the_unguarded_one_does(names, base):
    kept = {name: LayerPlan(quantizer="none") for name in names}
    unguarded = build(model(), Plan(default=LayerPlan(quantizer=base), layers=kept), dtype="float16")
    guarded = build(model(), plan(names, base), dtype="float16")
    with torch.inference_mode():
        expected, found = (m(input_ids=IDS, use_cache=False).logits.float() for m in (unguarded, guarded))
    assert (expected - found).abs().max() <= 0.02 * expected.abs().max()
    assert set(guard.consumers(guarded)) == set(names)
    assert sum(each.saturated for each in guard.counts(guarded).values()) == 0
    assert all(guard.counts(guarded)[name].rows == IDS.numel() for name in names)


def test_consumers_are_stated():
    said = guard.consumers(build(model(), plan(PLANS["query alone"] + PLANS["mlp down"]), dtype="float16"))
    assert said["model.layers.0.mlp.down_proj"] == "takes float32"
    stream = guard.receivers(build(model(), plan(["model.layers.1.mlp.down_proj"]), dtype="float16"))
    inputs = [f"model.layers.2.{x}" for x in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
    assert stream == [*inputs, "model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj", "lm_head"]
    assert said["model.layers.1.self_attn.q_proj"].startswith("cast to float16, and counted, because in LlamaAttention")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_attention_never_gets_float32_which_autocast_would_narrow_uncounted(family, attention):
    names = {
        "llama": PLANS["whole attention"],
        "phi3": ["model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn.o_proj"],
        "gpt2": ["transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_proj"],
    }[family]
    built = build(model(family), plan(names), dtype="float16", attention=attention)
    said = guard.consumers(built)
    taken = {name for name, text in said.items() if text == "takes float32"}
    # the residual sum takes it; GPT-2's float16 LayerNorm, which comes next, does not
    assert taken == ({name for name in names if name.endswith("o_proj")} if family != "gpt2" else set())
    with torch.inference_mode():
        assert built(input_ids=IDS, use_cache=False).logits.isfinite().all()
        with torch.autocast("cpu", dtype=torch.float16):
            assert built(input_ids=IDS, use_cache=False).logits.isfinite().all()


def test_an_answer_beyond_float16_survives_where_its_consumer_takes_it_and_is_counted_where_not():
    down, query = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"

    def blown(name: str, factor: float) -> nn.Module:
        made = model()
        with torch.no_grad():
            made.get_submodule(name).weight *= factor
        return made

    plain = blown(down, 2e4)
    with torch.inference_mode():
        assert not plain(input_ids=IDS, use_cache=False).logits.isfinite().all()
    guarded = build(blown(down, 2e4), plan([down]), dtype="float16")
    with torch.inference_mode():
        found = guarded(input_ids=IDS, use_cache=False).logits
        oracle = blown(down, 2e4).float()(input_ids=IDS, use_cache=False).logits
    assert found.isfinite().all()
    assert (found.float() - oracle).abs().max() <= 0.02 * oracle.abs().max()
    assert guard.totals(guarded)["range guard: rows scaled down"] > 0
    assert "range guard: values saturated" not in guard.totals(guarded)

    guarded = build(blown(query, 4e4), plan([query]), dtype="float16")
    with torch.inference_mode():
        guarded(input_ids=IDS, use_cache=False)
    assert guard.counts(guarded)[query].saturated > 0
    assert guard.totals(guarded)["range guard: values saturated"] == guard.counts(guarded)[query].saturated


def test_the_next_layer_counts_what_its_cast_saturates():
    gate = "model.layers.0.mlp.gate_proj"
    made = model()
    with torch.no_grad():
        made.get_submodule(gate).weight *= 3e4
    built = build(made, plan([gate]), dtype="float16")
    with torch.inference_mode():
        built(input_ids=IDS, use_cache=False)
    counted = guard.counts(built)
    assert counted[gate].saturated == 0
    assert counted["model.layers.0.mlp.down_proj"].saturated > 0
    assert guard.receivers(built) == ["model.layers.0.mlp.down_proj"]


@pytest.mark.parametrize("dora", [False, True])
def test_a_guarded_layer_trains_its_adapter(dora):
    names = PLANS["mlp down"]
    built = build(model(), plan(names, "mxfp4", rank=3, scaler="rslora", dora=dora), dtype="float16")
    built(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    gradients = [p.grad for n, p in built.named_parameters() if "lora_B" in n]
    assert len(gradients) == 21 and all(g.isfinite().all() and g.abs().sum() > 0 for g in gradients)


def test_counts_survive_a_copy_and_are_no_state():
    built = build(model(), plan(PLANS["mlp down"]), dtype="float16")
    other = copy.deepcopy(built)
    with torch.inference_mode():
        other(input_ids=IDS, use_cache=False)
    assert all(each.rows == 0 for each in guard.counts(built).values())
    assert any(each.rows for each in guard.counts(other).values())
    assert not [key for key in built.state_dict() if "numbers" in key]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_where_nothing_is_computed_in_float16_there_is_nothing_to_guard(dtype):
    built = build(model(dtype=torch.bfloat16), plan(PLANS["mlp down"]), dtype=dtype)
    assert guard.consumers(built) == {} and guard.totals(built) == {}
    assert type(built.get_submodule(PLANS["mlp down"][0])) is nn.Linear


def test_a_guard_beside_another_compute_dtype_is_refused():
    planned = LayerPlan(quantizer="none", range_guard=True, compute_dtype="float32")
    with pytest.raises(InputError, match=r"layer model.layers.0.mlp.up_proj: range_guard .*computed in float32"):
        build(model(), Plan(default=LayerPlan(quantizer="none"), layers={"model.layers.0.mlp.up_proj": planned}))


def test_a_guard_on_a_stacked_expert_is_refused():
    with pytest.raises(InputError, match="a range guard is planned"):
        build(model("mixtral"), Plan(default=LayerPlan(quantizer="nf4", range_guard=True)), dtype="float16")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 1e3, 6e3])
@pytest.mark.parametrize("quantizer", ["none", "nf4"])
def test_on_a_gpu_guarded_products_equal_float64(quantizer, scale):
    frozen = layer(random(96, 160, scale=3).half(), quantizer=quantizer).cuda()
    weight = frozen.decoded().double()
    x = (random(33, 160, seed=1) * scale).half().cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        y = frozen(x)
    exact = x.detach().double() @ weight.T
    mass = x.detach().double().abs() @ weight.abs().T
    assert y.dtype == torch.float32 and ((y.double() - exact).abs() <= mass * EXACT).all()
    incoming = random(33, 96, seed=2).cuda()
    y.backward(incoming)
    wanted = incoming.double() @ weight
    assert ((x.grad.double() - wanted).abs() <= incoming.double().abs() @ weight.abs() * 2 * EXACT).all()
    k = torch.arange(-126, 128, dtype=torch.int32)
    assert torch.equal(guard.power_of_two(k.cuda()).cpu(), guard.power_of_two(k))
