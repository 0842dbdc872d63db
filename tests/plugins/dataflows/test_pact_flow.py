"""What every switch changes and what it does not; what is kept for backward, to the byte; one layer's values."""

from __future__ import annotations

import math

import pytest
import torch
from toolkit_plugins.dataflows.pact.carried import carried, carry
from toolkit_plugins.dataflows.pact.execution import Execution
from toolkit_plugins.dataflows.pact.gated import gated
from toolkit_plugins.dataflows.pact.linear import multiply
from toolkit_plugins.dataflows.pact.norm import PactNorm
from toolkit_plugins.dataflows.pact.settings import Settings
from toolkit_plugins.dataflows.pact.weights import PactLinear
from toolkit_plugins.quantizers.nvfp4_rows import quantize_rows
from torch import nn

import toolkit as tk
from tests.plugins.dataflows.slow import ADAPTER, IDS, built, dense, inner, lora
from toolkit.errors import InputError

BF16 = torch.bfloat16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_bytes(width: int) -> int:
    """Of one row in NVFP4: codes, block scales, g."""
    return 9 * math.ceil(width / 16) + 4


def gate_bytes(width: int, gates: str) -> int:
    """Of one row of gate, or of up."""
    if gates == "nvfp4":
        return packed_bytes(width)
    groups = math.ceil(width / 128)
    return 2 * width if gates == "16bit" else groups * (128 * int(gates[3:]) // 8 + 4)


class Kept:
    """Storage that autograd keeps while it is open, every one once, parameters left out."""

    def __init__(self) -> None:
        self._seen: dict[int, torch.Tensor] = {}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.numel():
            self._seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._seen.values())


def layer_of(
    out: int = 48, width: int = 80, dtype: torch.dtype = torch.float32, *, bias: bool = False, seed: int = 3, **options
) -> PactLinear:
    weight = random(out, width, seed=seed)
    packed = tk.quantizer("nvfp4").quantize(weight)
    made = PactLinear(packed, random(out, seed=4) if bias else None, dtype, Settings(**options), weight)
    made.execution = Execution()
    return made


def norm_of(width: int, dtype: torch.dtype = BF16, **options) -> PactNorm:
    weight = nn.Parameter(random(width, seed=5).abs() + 0.5, requires_grad=False)
    return PactNorm(weight, 1e-5, dtype, Execution(), Settings(**options))


# one layer


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_frozen_product_is_rounded_once(dtype, bias):
    """In float64 from the codes, then the dtype; at 3 dimensions, on shapes that are not square."""
    layer = layer_of(48, 80, dtype, bias=bias)
    x = random(2, 5, 80, dtype=dtype)
    rows = quantize_rows(x.view(10, 80)).values().double()
    exact = rows @ layer.packed.dequantize(torch.float32).double().mT
    exact = exact + layer.bias.double() if bias else exact
    found = layer(x)
    assert found.shape == (2, 5, 48) and found.dtype == dtype
    ulp = torch.finfo(dtype).eps * exact.abs().amax()
    assert ((found.view(10, 48).double() - exact).abs() <= 0.51 * ulp + 1e-4).all()
    plain = x.view(10, 80).double() @ layer.packed.dequantize(torch.float32).double().mT
    assert (plain + (layer.bias if bias else 0) - exact).abs().max() > 0.1  # rounding of x shows


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_layer_and_its_adapter(dtype):
    """y and all three gradients at s = 0.7, from the equations; the weight of backward is the second layout."""
    layer = layer_of(48, 80, dtype, bias=True)
    a, b = random(3, 80, seed=6).requires_grad_(), random(48, 3, seed=7).requires_grad_()
    x = random(6, 80, dtype=dtype).requires_grad_()
    y = multiply(x, layer, a, b, 0.7)
    g = random(6, 48, seed=8, dtype=dtype)
    y.backward(g)
    A, B = a.detach().to(dtype).double(), b.detach().to(dtype).double()
    seen, entering = quantize_rows(x.detach()).values().double(), quantize_rows(g).values().double()
    there, back = (each.dequantize(torch.float32).double() for each in (layer.packed, layer.transposed.packed))
    wide = g.double()
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.3}
    expected = seen @ there.mT + layer.bias.double() + 0.7 * (seen @ A.mT) @ B.mT
    torch.testing.assert_close(y.detach().double(), expected, **close)
    torch.testing.assert_close(x.grad.double(), entering @ back.mT + 0.7 * wide @ B @ A, **close)
    torch.testing.assert_close(a.grad.double(), 0.7 * (wide @ B).mT @ seen, **close)
    torch.testing.assert_close(b.grad.double(), 0.7 * wide.mT @ (seen @ A.mT), **close)
    assert x.grad.dtype == dtype and a.grad.dtype == torch.float32


def test_the_two_layouts_differ_by_a_second_rounding():
    cached, shared, original = layer_of(), layer_of(layouts="shared"), layer_of(source="original")
    assert shared.transposed is None and shared.gap == 0
    forward = cached.packed.dequantize(torch.float32)
    again = tk.quantizer("nvfp4").quantize(forward.mT.contiguous()).dequantize(torch.float32).mT
    assert torch.equal(cached.transposed.packed.dequantize(torch.float32).mT, again)
    assert cached.gap == pytest.approx(float((again - forward).norm() / forward.norm()), rel=1e-5)
    once = tk.quantizer("nvfp4").quantize(random(48, 80, seed=3).mT.contiguous()).dequantize(torch.float32)
    assert torch.equal(original.transposed.packed.dequantize(torch.float32), once)
    assert original.gap > cached.gap > 0.03  # two roundings of one weight differ more than one of the other


def test_layouts_survive_casting_and_state(tmp_path):
    from safetensors.torch import load_file, save_file

    layer, other = layer_of(), layer_of(seed=9)
    x = random(3, 80)
    before = layer(x)
    layer.to(torch.float16).to(torch.float32)
    assert torch.equal(layer(x), before) and layer.transposed.packed.tensors["global_scale"].dtype == torch.float32
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    assert not torch.equal(other(x), before)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x), before)


# carried


def test_a_tensor_that_was_changed_carries_nothing():
    x = random(4, 32)
    rows = quantize_rows(x)
    assert carried(carry(x, rows, exact=False)).rows is rows
    assert carried(x * 1) is None and carried(x.view(2, 2, 32)) is None and carried(x.detach()) is None
    x.mul_(2)
    assert carried(x) is None
    with torch.inference_mode():
        made = carry(random(4, 32) + 1, rows, exact=True)
        assert carried(made).exact


# what is kept


@pytest.mark.parametrize("width", [64, 60])
@pytest.mark.parametrize(("norm", "value"), [("nvfp4", None), ("16bit", 2)])
def test_a_norm_keeps_its_output_and_a_float_a_token(width, norm, value):
    x = random(2, 5, width, dtype=BF16).requires_grad_()
    with Kept() as kept:
        norm_of(width, norm=norm)(x)
    assert kept.bytes == 10 * ((value * width if value else packed_bytes(width)) + 4)


@pytest.mark.parametrize("gates", ["nvfp4", "16bit", "int4", "int2"])
@pytest.mark.parametrize("nonlinear", ["16bit", "nvfp4"])
@pytest.mark.parametrize("width", [160, 90])
def test_gate_and_up_are_kept_as_they_are_said_to_be(gates, nonlinear, width):
    gate, up = (random(2, 5, width, seed=s, dtype=BF16).requires_grad_() for s in (1, 2))
    with Kept() as kept:
        gated(gate, up, BF16, Execution(), Settings(gates=gates, nonlinear=nonlinear))
    assert kept.bytes == 10 * 2 * gate_bytes(width, gates)


def test_a_frozen_layer_keeps_nothing_and_an_adapter_the_codes():
    layer, x = layer_of(dtype=BF16), random(10, 80, dtype=BF16).requires_grad_()
    a, b = (nn.Parameter(random(*shape, seed=6)) for shape in ((3, 80), (48, 3)))
    with Kept() as kept:
        layer(x)
    assert kept.bytes == 0
    with Kept() as kept:
        multiply(x, layer, a, b, 0.7)
    assert kept.bytes == 10 * (packed_bytes(80) + 3 * 2)


@pytest.mark.parametrize("norm", ["nvfp4", "16bit"])
@pytest.mark.parametrize("reuse", [True, False])
def test_what_read_one_norm_share_one_copy(norm, reuse):
    """q, k and v; with the norm's own that is one copy, or four."""
    layers = [layer_of(out, 64, BF16, norm=norm, reuse=reuse) for out in (64, 32, 32)]
    before = norm_of(64, norm=norm, reuse=reuse)
    x = random(10, 64, dtype=BF16).requires_grad_()
    with Kept() as kept:
        y = before(x)
        for layer in layers:
            multiply(y, layer, nn.Parameter(random(3, 64)), nn.Parameter(random(layer.out_features, 3)))
    copy = packed_bytes(64) if norm == "nvfp4" else 2 * 64
    assert kept.bytes == 10 * (copy * (1 if reuse else 4) + 4 + 3 * 3 * 2)


def block_bytes(hidden: int, width: int, heads: int, rank: int, norm: str, gates: str, reuse: bool) -> int:
    """A token, one Llama block with seven adapters; attention and the residuals apart."""
    y = packed_bytes(hidden) if norm == "nvfp4" else 2 * hidden
    low = 7 * 2 * rank
    norms = 2 * (y + 4) + (0 if reuse else (3 + 2) * y)
    return norms + 2 * gate_bytes(width, gates) + packed_bytes(heads) + packed_bytes(width) + low


@pytest.mark.parametrize(
    "options",
    [{}, {"norm": "16bit"}, {"gates": "16bit"}, {"gates": "int4"}, {"gates": "int2"}, {"reuse": False},
     {"norm": "16bit", "reuse": False}],
)  # fmt: skip
def test_a_whole_block_keeps_what_its_parts_do(options):
    """Two models whose blocks differ in number keep a difference of one block; attention's share is measured apart."""
    flow = "pact(" + ",".join(f"{k}={str(v).lower()}" for k, v in options.items()) + ")" if options else "pact"
    tokens = IDS.numel()

    def bytes_of(blocks: int, flow: str) -> int:
        model = built(dense(num_hidden_layers=blocks, dtype=BF16), flow, dtype="bfloat16")
        x = inner(model).get_input_embeddings()(IDS).detach().requires_grad_()
        with Kept() as kept:
            model(inputs_embeds=x, use_cache=False)
        return kept.bytes

    parts = {"norm": "nvfp4", "gates": "nvfp4", "reuse": True}
    expected = block_bytes(64, 96, 64, ADAPTER.rank, **(parts | options))
    plain = block_bytes(64, 96, 64, ADAPTER.rank, **parts)
    found, base = (bytes_of(2, each) - bytes_of(1, each) for each in (flow, "pact"))
    assert found - base == tokens * (expected - plain)
    attention = base / tokens - plain  # RoPE's and SDPA's own: a handful of 16-bit copies of q, k, v
    assert 0 < attention < 16 * 2 * 64


def test_nothing_is_kept_below_the_lowest_adapter():
    """Four blocks, the last adapted: its parts are kept and no other's; a block above without adapters keeps norms."""
    from toolkit.records.plan import LayerPlan, Plan
    from toolkit.runs.building import build

    def bytes_of(adapted: list[int], blocks: int) -> int:
        layers = {
            f"model.layers.{at}.self_attn.q_proj": LayerPlan(quantizer="nvfp4", adapter=ADAPTER) for at in adapted
        }
        plan = Plan(dataflow="pact", default=LayerPlan(quantizer="nvfp4"), layers=layers)
        model = build(dense(num_hidden_layers=blocks, dtype=BF16), plan, dtype="bfloat16")
        with Kept() as kept:
            model(input_ids=IDS, use_cache=False)
        return kept.bytes

    assert bytes_of([3], 4) == bytes_of([0], 1)
    assert bytes_of([0], 4) > bytes_of([2], 4) > bytes_of([3], 4)


# the switches


def passed(flow: str, zero: bool = False, dtype: str = "float32") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = built(dense(), flow, dtype=dtype)
    if zero:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.zeros_(parameter)
    torch.manual_seed(5)
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.float().logsumexp(-1).mean().backward()
    return logits.detach(), lora(inner(model))


@pytest.fixture(scope="module")
def plain():
    return passed("pact")


@pytest.mark.parametrize(
    ("flow", "forward", "backward"),
    [
        ("pact(execution=reference)", False, False),
        ("pact(layouts=shared)", False, True),
        ("pact(source=original)", False, True),
        ("pact(gradients=stochastic)", False, True),
        ("pact(gradients=16bit)", False, True),
        ("pact(norm=16bit)", True, True),
        ("pact(gates=16bit)", False, True),
        ("pact(gates=int4)", False, True),
        ("pact(gates=int2)", False, True),
        ("pact(nonlinear=nvfp4)", True, True),
        ("pact(reuse=false)", False, False),
    ],
)
def test_a_switch_changes_what_it_says(plain, flow, forward, backward):
    logits, gradients = passed(flow)
    assert torch.equal(logits, plain[0]) is not forward
    same = [torch.equal(gradients[name], plain[1][name]) for name in gradients]
    assert any(not each for each in same) is backward


def test_a_16_bit_norm_is_read_by_the_adapters_alone():
    """While B is zero the frozen products tell no difference."""
    assert torch.equal(passed("pact(norm=16bit)", zero=True)[0], passed("pact", zero=True)[0])


def test_the_last_layer_sees_what_enters_backward():
    """The head is dense: dB of the last down projection is taken from the 16-bit gradient, whatever enters W̃."""
    last = "model.layers.1.mlp.down_proj.lora_B.default.weight"
    found = [passed(f"pact(gradients={how})")[1][last] for how in ("nearest", "16bit", "stochastic")]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_stochastic_gradients_are_unbiased():
    """The mean of the input gradient over the noise is that of the gradient as it is."""
    layer = layer_of(gradients="stochastic")
    g = random(4, 48, seed=2)
    exact = Execution().input_gradient(g, layer, torch.float32, "16bit")
    torch.manual_seed(0)
    draws = Execution().input_gradient(g.repeat(2000, 1), layer, torch.float32, "stochastic").view(2000, 4, 80)
    standard = draws.std(0) / math.sqrt(2000)
    assert ((draws.mean(0) - exact).abs() <= 5 * standard).all() and (draws[0] != draws[1]).any()
    nearest = Execution().input_gradient(g, layer, torch.float32, "nearest")
    assert ((nearest - exact).abs() > 5 * standard).float().mean() > 0.5  # which the test would see


@pytest.mark.parametrize("options", [{"gates": "int3"}, {"norm": "nvfp5"}, {"reuse": "yes"}, {"execution": "fast"}])
def test_a_value_that_a_switch_does_not_have(options):
    with pytest.raises(InputError, match=f"no {next(iter(options))}="):
        Settings(**options)
