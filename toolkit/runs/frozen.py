"""A frozen layer that keeps any quantizer's packed weight and decodes it when it computes.

    forward:   y = x·Ŵᵀ + b        backward:   ∂x = ∂y·Ŵ

Ŵ is decoded anew each time, so that between the two only the packed weight exists; backward keeps neither x nor
Ŵ. The weight gets no gradient. Both products are computed in the layer's compute dtype, which autocast does not
change. Experts that are stacked in one parameter are decoded together (`FrozenStack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from toolkit.interfaces import Packed
from toolkit.runs.guard import Counter, Guard
from toolkit.weights.layers import Layer


class _Frozen(torch.autograd.Function):
    """x ↦ the layer's product; saves nothing but the layer itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FrozenLinear) -> torch.Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return _as_planned(layer.multiply, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _as_planned(ctx.layer.multiply_transposed, gradient, ctx.dtype), None


def _as_planned(product: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """The product in the dtypes that it names: autocast would compute a float32 layer in 16 bit."""
    kind = args[0].device.type
    if not torch.is_autocast_enabled(kind):
        return product(*args)
    with torch.autocast(kind, enabled=False):
        return product(*args)


class Holder(nn.Module):
    """Keeps packed tensors as buffers that move with the model and never change their dtype."""

    def hold(self, prefix: str, packed: Packed) -> None:
        for key, tensor in packed.tensors.items():
            self.register_buffer(_buffer(prefix, key), tensor)

    def held(self, prefix: str, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        return {key: self._buffers[_buffer(prefix, key)] for key in keys}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Holder:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for key, before in kept.items():  # `.to(dtype)` and `.half()` must not round scales
            after = self._buffers[key]
            if after is not None and before is not None and after.dtype != before.dtype:
                self._buffers[key] = before.to(after.device)
        return self


def _buffer(prefix: str, key: str) -> str:
    """A buffer's name, which cannot hold the dots of nested formats."""
    return f"{prefix}{key.replace('.', '-')}"


class FrozenLinear(Holder):
    """A linear layer of a packed weight: computes in `compute_dtype`, answers in the input's dtype.

    A layer that computes in float32 for a float16 model overflows nowhere inside; a result beyond float16's range
    becomes infinite when it is cast back, forward or backward, and that is counted (`toolkit.runs.guard.counts`).
    A guarded layer multiplies in float16 under the range guard and answers in float32, or as `guard.answer` says.

    Args:
        packed: the weight, (out, in).
        bias: kept as it is, or None; added in the compute dtype, under a guard in float32.
        compute_dtype: of both products.
        guarded: put it under the range guard; only where it computes in float16.
    """

    def __init__(
        self, packed: Packed, bias: torch.Tensor | None, compute_dtype: torch.dtype, *, guarded: bool = False
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.compute_dtype = compute_dtype
        self.quantizer = packed.quantizer
        self._shape = tuple(packed.shape)
        self._keys = list(packed.tensors)
        self.hold("packed_", packed)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.guard = Guard(packed.dequantize(compute_dtype)) if guarded else None
        self.casts: Counter | None = None

    def count_casts(self) -> None:
        """From now on count what saturates when a float32 product is cast to float16."""
        self.casts = Counter(next(iter(self.packed.tensors.values())).device)

    @property
    def packed(self) -> Packed:
        """The packed weight, as it is stored now."""
        return Packed(self.quantizer, self.held("packed_", self._keys), self._shape, self.compute_dtype)

    @property
    def weight(self) -> nn.Parameter:
        """Ŵ (out, in) in the compute dtype: decoded anew, for libraries that ask for a weight's values or dtype."""
        return nn.Parameter(self.decoded(), requires_grad=False)

    def decoded(self) -> torch.Tensor:
        """Ŵ (out, in) in the compute dtype; a weight that is kept bit for bit is cast and not copied."""
        if len(self._keys) == 1:
            only = self._buffers[_buffer("packed_", self._keys[0])]
            if only.shape == self._shape and self.quantizer.keeps(only.dtype):
                return only.to(self.compute_dtype)
        return self.packed.dequantize(self.compute_dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x·Ŵᵀ + b, without a graph."""
        if self.guard is not None:
            y = self.guard.forward_product(x, self.decoded())
            if self.bias is not None:
                y += self.bias
            return y if self.guard.answer == y.dtype else self.guard.narrow(y, self.guard.answer)
        y = nn.functional.linear(x.to(self.compute_dtype), self.decoded())
        if self.bias is not None:
            y += self.bias.to(y.dtype)
        return self._back(y, x.dtype)

    def multiply_transposed(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """∂y·Ŵ in `dtype`, without a graph."""
        if self.guard is not None:
            return self.guard.narrow(self.guard.backward_product(gradient, self.decoded()), dtype)
        return self._back(gradient.to(self.compute_dtype) @ self.decoded(), dtype)

    def _back(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return y.to(dtype) if self.casts is None else self.casts.narrow(y, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Frozen.apply(x, self)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"quantizer={self.quantizer.key}, compute_dtype={self.compute_dtype}"
        )


class FrozenStack(Holder):
    """Some experts of one 3-D parameter, packed; the others dense. As a parametrization it gives the whole stack.

    Each forward pass of the experts' module decodes the stack once, at its first use. Backward keeps the decoded
    stack, as it keeps a dense one: what is saved here is the memory between steps.

    Args:
        packed: expert index → packed weight, (out, in) each.
        dense: expert index → weight as the parameter stores it.
        transposed: whether the parameter stores (experts, in, out).
        dtype: of the decoded stack.
    """

    def __init__(
        self, packed: dict[int, Packed], dense: dict[int, torch.Tensor], *, transposed: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.transposed, self.dtype = transposed, dtype
        self.count = len(packed) + len(dense)
        self.shape = tuple(next(iter(packed.values())).shape)
        self._packed = {i: Packed(p.quantizer, dict.fromkeys(p.tensors), p.shape, dtype) for i, p in packed.items()}
        for index, each in packed.items():
            self.hold(f"expert{index}_", each)
        self.dense = nn.ParameterDict({str(i): nn.Parameter(w.detach(), requires_grad=False) for i, w in dense.items()})
        self._decoded: torch.Tensor | None = None
        self._open = False

    def expert(self, index: int) -> Packed | None:
        """One packed expert, or None where it is dense."""
        if index not in self._packed:
            return None
        empty = self._packed[index]
        return Packed(empty.quantizer, self.held(f"expert{index}_", empty.tensors), empty.shape, self.dtype)

    def begin(self, *_: Any) -> None:
        """From now on a decoded stack is used again."""
        self._open, self._decoded = True, None

    def end(self, *_: Any) -> None:
        """Drop it."""
        self._open, self._decoded = False, None

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        if self._decoded is not None:
            return self._decoded
        stack = []
        for index in range(self.count):
            packed = self.expert(index)
            if packed is None:
                stack.append(self.dense[str(index)].to(self.dtype))
            else:
                weight = packed.dequantize(self.dtype)
                stack.append(weight.mT if self.transposed else weight)
        whole = torch.stack(stack)
        if self._open:
            self._decoded = whole
        return whole


def freeze_stack(layers: list[Layer], packed: dict[int, Packed], dtype: torch.dtype) -> FrozenStack:
    """Put `FrozenStack` in the place of the parameter that these experts (all of one parameter) share.

    The dense parameter is freed. The module's own forward code, whichever the installed transformers chooses,
    reads the stack under the parameter's name as before.
    """
    module, name = layers[0].module, layers[0].parameter
    stored = getattr(module, name).detach()
    dense = {i: stored[i].clone().to(dtype) for i in range(stored.shape[0]) if i not in packed}
    stack = FrozenStack(packed, dense, transposed=layers[0].transposed, dtype=dtype)
    setattr(module, name, nn.Parameter(stored.new_empty(0), requires_grad=False))
    parametrize.register_parametrization(module, name, stack, unsafe=True)
    module.register_forward_pre_hook(stack.begin)
    module.register_forward_hook(stack.end, always_call=True)
    return stack


def stack_of(module: nn.Module, parameter: str) -> FrozenStack | None:
    """The stack that stands in a parameter's place, or None."""
    if not parametrize.is_parametrized(module, parameter):
        return None
    first = module.parametrizations[parameter][0]
    return first if isinstance(first, FrozenStack) else None
