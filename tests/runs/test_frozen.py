"""The frozen layer: it keeps packed weights alone, and its two products are those of the decoded weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import toolkit as tk
from toolkit.runs.frozen import FrozenLinear

QUANTIZERS = ["none", "nf4", "nf4(block=32,double=false)", "fp4-bnb", "nvfp4", "mxfp4", "fp4-e2m1", "residual"]
SHAPES = [(48, 80), (80, 48), (7, 13)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(
    quantizer: str = "nvfp4",
    shape: tuple[int, int] = (48, 80),
    compute: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    stored: torch.dtype = torch.bfloat16,
) -> FrozenLinear:
    packed = tk.quantizer(quantizer).quantize(random(*shape, dtype=stored))
    return FrozenLinear(packed, random(shape[0], seed=9, dtype=stored) if bias else None, compute)


def kept_between(run) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A result, and every tensor that autograd saved on the way to it."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        return run(), saved


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_gradient_equals_the_dense_one_in_float64(quantizer, shape, bias):
    layer = make(quantizer, shape, torch.float64, bias=bias)
    x = random(2, 3, shape[1], seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x[0, :1],), eps=1e-6, atol=1e-7)
    dense = x.detach() @ layer.packed.dequantize(torch.float64).T + (0 if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(layer(x), dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantizer", ["none", "nvfp4"])
def test_each_product_is_computed_in_the_compute_dtype(quantizer, compute, given):
    layer = make(quantizer, compute=compute)
    x = random(5, 80, seed=1, dtype=given).requires_grad_()
    y = layer(x)
    weight = layer.packed.dequantize(compute)
    assert torch.equal(y, nn.functional.linear(x.detach().to(compute), weight).to(given))
    incoming = random(5, 48, seed=2, dtype=given)
    y.backward(incoming)
    assert x.grad.dtype == given
    assert torch.equal(x.grad, (incoming.to(compute) @ weight).to(given))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_nothing_is_saved(bias, autocast, compute):
    layer = make(bias=bias, compute=compute)
    x = random(5, 80, dtype=torch.bfloat16).requires_grad_()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return layer(x)

    y, saved = kept_between(run)
    assert saved == []
    assert all(name == "_Frozen" or "AccumulateGrad" in name for name in names_of(y.grad_fn))


def names_of(node) -> set[str]:
    found, todo = set(), [node]
    while todo:
        at = todo.pop()
        if at is not None:
            found.add(at.name().removesuffix("Backward"))
            todo += [each for each, _ in at.next_functions]
    return found


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast_does_not_change_what_was_planned(autocast, inside):
    """Autocast would multiply a float32 layer in 16 bit, forward and, where backward runs inside it, backward."""
    layer, results = make(compute=torch.float32), []
    incoming = random(5, 48, seed=2, dtype=autocast)
    for enabled in (False, True):
        x = random(5, 80, seed=1, dtype=autocast).requires_grad_()
        with torch.autocast("cpu", dtype=autocast, enabled=enabled):
            y = layer(x)
            if inside:
                y.backward(incoming)
        if not inside:
            y.backward(incoming)
        results.append((y.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("guarded", [False, True])
def test_recomputation_gives_the_same_gradient(guarded):
    packed = tk.quantizer("mxfp4").quantize(random(80, 80))
    layer = FrozenLinear(packed, random(80, seed=3), torch.float16 if guarded else torch.float32, guarded=guarded)
    block = nn.Sequential(nn.Linear(80, 80), nn.SiLU(), layer)
    gradients = []
    for recompute in (False, True):
        x = random(4, 80, seed=1).requires_grad_()
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        block.zero_grad()
        y.square().sum().backward()
        gradients.append((x.grad, block[0].weight.grad.clone()))
    assert torch.equal(gradients[0][0], gradients[1][0]) and torch.equal(gradients[0][1], gradients[1][1])


def test_no_graph_below_an_input_that_needs_none():
    y, saved = kept_between(lambda: make()(random(5, 80)))
    assert not y.requires_grad and saved == []


def test_a_weight_kept_bit_for_bit_is_not_copied():
    layer = make("none", compute=torch.bfloat16)
    assert layer.decoded().data_ptr() == layer.packed.tensors["weight"].data_ptr()


def test_the_weight_is_no_parameter():
    layer = make("none", bias=True)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert not any(p.requires_grad for p in layer.parameters()) and not layer.weight.requires_grad


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantizer", ["nf4", "fp4-bnb"])
@pytest.mark.parametrize("shape", [(48, 128), (128, 64)])
def test_bitsandbytes_layers_have_the_dense_gradient_on_this_device(shape, quantizer, compute):
    dense = nn.Linear(shape[1], shape[0], dtype=torch.float32)
    dense.weight = nn.Parameter(random(*shape), requires_grad=False)
    layer = tk.quantizer(quantizer).linear(dense, compute)
    assert type(layer).__name__ == "Linear4bit"
    weight = tk.quantizer(quantizer).quantize(dense.weight).dequantize(torch.float32)
    x = random(6, shape[1], seed=1, dtype=compute).requires_grad_()
    incoming = random(6, shape[0], seed=2, dtype=compute)
    layer(x).backward(incoming)
    expected = incoming.float() @ weight
    tolerance = 1e-5 if compute == torch.float32 else 2e-2
    assert (x.grad.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_both_products_are_those_of_the_decoded_weight(quantizer, compute):
    layer = make(quantizer, (64, 128), compute, bias=True).cuda()
    x = random(9, 128, seed=1, dtype=compute).cuda().requires_grad_()
    y, saved = kept_between(lambda: layer(x))
    assert saved == []
    weight = layer.packed.dequantize(compute)
    assert torch.equal(y, nn.functional.linear(x.detach(), weight) + layer.bias.to(compute))
    incoming = random(9, 64, seed=2, dtype=compute).cuda()
    y.backward(incoming)
    assert torch.equal(x.grad, incoming @ weight)
