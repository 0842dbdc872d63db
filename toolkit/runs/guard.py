"""The range guard: float16 products of rows that could overflow are computed scaled down, and scaled back in float32.

    k = max(0, ⌈log₂(max(‖x‖₂·max_j‖w_j‖₂, max|x|)/65504)⌉ for each row x,    y = 2^k·fl16((2^−k·x)·Wᵀ)

By Cauchy and Schwarz no element of the scaled product, and no partial sum of one, leaves float16's range. A power
of two changes no mantissa: the product is the one that float16 would give with a wider exponent, but where a
scaled value is subnormal in float16, which is counted. Backward is guarded alike, ∂x = ∂y·W with the columns of W.
NaN and infinity in x are passed on. (PACT, last page: "range guard on fp16 rows"; the formula of k is ours.)

A guarded layer answers in float32, which its consumer must take. `settle` runs the built model once on two tokens
and finds out: a residual sum takes it, and the stream is float32 from there on; a linear layer takes it through a
cast to its own dtype; attention, which autocast would give float16 without a word, and whatever else refuses
float32, gets it cast. Each such cast counts the finite values that become infinite: saturation is never silent.
What became of each layer's answer stands in `consumers`, and the numbers in `counts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

LARGEST = 65504.0
"""The largest finite float16."""
SMALLEST_NORMAL = 2.0**-14


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a layer's guard and casts did since the model was built; forward and backward together.

    A forward pass that checkpointing runs again counts again.

    Attributes:
        rows: that were multiplied under guard.
        scaled: rows whose product was computed scaled down.
        subnormal: values of scaled rows, inputs and products, that were subnormal in float16 (or products that were
            zero there), and so may have lost bits.
        saturated: finite values that a cast to float16 made infinite.
    """

    rows: int
    scaled: int
    subnormal: int
    saturated: int


class Counter(nn.Module):
    """Counts on the layer's device, so that counting never waits for it; in no state dict."""

    ROWS, SCALED, SUBNORMAL, SATURATED = range(4)

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.receives = False
        self.register_buffer("numbers", torch.zeros(4, dtype=torch.int64, device=device), persistent=False)

    def read(self) -> Counts:
        """The numbers so far."""
        return Counts(*self.numbers.tolist())

    @torch.no_grad()
    def add(self, place: int, number: int | torch.Tensor) -> None:
        self.numbers[place] += number

    def narrow(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """y in `dtype`; finite values that become infinite are counted."""
        narrowed = y.to(dtype)
        if dtype == torch.float16 and y.dtype != torch.float16:
            self.add(self.SATURATED, (narrowed.detach().isinf() & y.detach().isfinite()).sum())
        return narrowed

    def receive(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A forward pre-hook of a float16 layer that is given float32: cast, and count."""
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float32:
            return (self.narrow(args[0], torch.float16), *args[1:])
        return None


class Guard(Counter):
    """The guard of one weight: its largest norms, and where its layer's answer goes.

    Args:
        weight: Ŵ (out, in), of any float dtype.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.device)
        exact = weight.detach().float()
        self.row = exact.norm(dim=1).max().item()
        self.column = exact.norm(dim=0).max().item()
        self.answer = torch.float32
        self.consumer = "takes float32"

    def forward_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x·Wᵀ (…, out) in float32; `weight` is (out, in) in float16."""
        return self._product(x, weight, self.row)

    def backward_product(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """∂y·W (…, in) in float32."""
        return self._product(gradient, weight.mT, self.column)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, largest: float) -> torch.Tensor:
        k = exponent(x, largest)
        exact = x.float() * power_of_two(-k)
        scaled = exact.half()
        product = nn.functional.linear(scaled, weight)
        active = k > 0
        small = ((exact.abs() < SMALLEST_NORMAL) & (exact != 0) & active).sum()
        small += ((product.abs() < SMALLEST_NORMAL) & active & exact.any(-1, keepdim=True)).sum()
        self.numbers += torch.stack([torch.full_like(small, k.numel()), active.sum(), small, torch.zeros_like(small)])
        return product.float() * power_of_two(k)


def exponent(x: torch.Tensor, largest: float) -> torch.Tensor:
    """The least k ≥ 0 of each row for which 2^−k·x, and its product with rows of norm ≤ `largest`, fit float16.

    int32 (…, 1). A row of float32 is measured in float64, where its norm cannot overflow. 0 for rows that hold NaN
    or infinity, which nothing would make fit.
    """
    wide = torch.float32 if x.dtype == torch.float16 else torch.float64
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    bound = torch.maximum(norm * largest, x.abs().amax(-1, keepdim=True).to(wide)) / LARGEST
    mantissa, power = torch.frexp(bound)
    k = (power - (mantissa == 0.5).int()).clamp(min=0, max=126)
    return torch.where(bound.isfinite(), k, 0).int()


def power_of_two(k: torch.Tensor) -> torch.Tensor:
    """2^k in float32, exact: written into the exponent's bits, for −126 ≤ k ≤ 127."""
    return ((k + 127) << 23).view(torch.float32)


def counts(model: nn.Module) -> dict[str, Counts]:
    """Layer → counts, of every layer that is guarded, computes in float32 beside float16, or receives float32."""
    return {name: counter.read() for name, counter in _counters(model).items()}


def totals(model: nn.Module) -> dict[str, int]:
    """What is not zero, summed over layers and named for a report: `range guard: rows scaled down` and so on."""
    sums = {"rows scaled down": 0, "values subnormal": 0, "values saturated": 0}
    for each in counts(model).values():
        sums["rows scaled down"] += each.scaled
        sums["values subnormal"] += each.subnormal
        sums["values saturated"] += each.saturated
    return {f"range guard: {name}": number for name, number in sums.items() if number}


def consumers(model: nn.Module) -> dict[str, str]:
    """Guarded layer → what becomes of its float32 answer; `receivers` says where it is narrowed later on."""
    return {name: guard.consumer for name, guard in _guards(model).items()}


def receivers(model: nn.Module) -> list[str]:
    """Layers that are given float32, by a guarded layer or by the stream that it made float32, and narrow it."""
    return [name for name, counter in _counters(model).items() if counter.receives]


def _counters(model: nn.Module) -> dict[str, Counter]:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        name.rpartition(".")[0].removesuffix(".base_layer"): module
        for name, module in inner.named_modules()
        if isinstance(module, Counter)
    }


def _guards(model: nn.Module) -> dict[str, Guard]:
    return {name: counter for name, counter in _counters(model).items() if isinstance(counter, Guard)}


@torch.no_grad()
def settle(model: nn.Module, run: Callable[[], Any] | None = None) -> None:
    """Find out who takes float32, by running the model once on two tokens; the others get a counted cast.

    A linear layer that is given float32 and multiplies in float16 gets a pre-hook that casts. Where a module raises
    because dtypes differ, the guarded layers that answered inside it are made to answer in float16. The counts start
    from zero afterwards.

    Args:
        model: built, in float16, in evaluation mode.
        run: one forward pass; by default of two tokens.
    """
    guards = _guards(model)
    if not guards:
        return
    by_module = {id(module): module for module in guards.values()}
    device = next(model.parameters()).device
    if run is None:

        def run() -> Any:
            return model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)

    for _ in range(len(guards) + 1):
        try:
            with _Watch(model) as watch, _NoNarrowing(watch):
                run()
            break
        except RuntimeError as error:
            blamed = watch.blamed(by_module)
            if not blamed:
                raise
            for guard in blamed:
                guard.answer = torch.float16
                guard.consumer = f"cast to float16, and counted, because in {watch.running} {str(error)[:120]}"
    for module in watch.widened.values():
        counter = Counter(device)
        counter.receives = True
        module.add_module("received", counter)
        module.register_forward_pre_hook(counter.receive)
    for module in model.modules():
        if isinstance(module, Counter):
            module.numbers.zero_()


class _Watch:
    """One forward pass watched: which modules are running, which guards answered, which layers got float32."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack: list[tuple[nn.Module, list[Guard]]] = []
        self.widened: dict[str, nn.Module] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> _Watch:
        from toolkit.runs.audit import built_layers

        for layer in built_layers(self.model):
            if layer.index is None and not isinstance(getattr(layer.module, "guard", None), Guard):
                self._hooks.append(layer.module.register_forward_pre_hook(self._receiving(layer.name)))
        for module in self.model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter))
            self._hooks.append(module.register_forward_hook(self._leave))
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _receiving(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if args[0].dtype == torch.float32 and getattr(module, "compute_dtype", None) != torch.float32:
                self.widened[name] = module
                return (args[0].half(), *args[1:])
            return None

        return hook

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.stack.append((module, []))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        _, answered = self.stack.pop()
        guard = getattr(module, "guard", None)
        if isinstance(guard, Guard):
            answered.append(guard)
        if self.stack:
            self.stack[-1][1].extend(answered)

    @property
    def running(self) -> str:
        """The innermost module that was running."""
        return type(self.stack[-1][0]).__name__ if self.stack else type(self.model).__name__

    def blamed(self, guards: dict[int, Guard]) -> list[Guard]:
        """The guards that answered in float32 inside the innermost running module that has any."""
        for _, answered in reversed(self.stack):
            wide = [guard for guard in answered if id(guard) in guards and guard.answer == torch.float32]
            if wide:
                return wide
        return []


class _NoNarrowing(TorchFunctionMode):
    """Refuses what autocast would narrow to float16 in training: attention over a guarded layer's own answer."""

    PRODUCTS = (nn.functional.scaled_dot_product_attention, torch.matmul, torch.bmm, torch.baddbmm)

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = func in self.PRODUCTS and any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in args)
        stack = self.watch.stack
        if wide and stack and any(guard.answer == torch.float32 for guard in stack[-1][1]):
            raise RuntimeError(f"{func.__name__} is computed in float16 under autocast")
        return func(*args, **(kwargs or {}))
