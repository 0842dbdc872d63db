"""The interfaces of the toolkit's parts: what a plug-in author implements.

Every part is a `Component`: a class with a unique `name` in its `kind`, whose options are the fields of a
dataclass (or none at all). The core knows these classes and never a component by name. Nothing here
imports torch, so that selections can be made and judged without it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from toolkit import spec
from toolkit.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.records.budget import Budget
    from toolkit.records.plan import LayerPlan, Plan
    from toolkit.records.profile import Profile
    from toolkit.records.selection import Selection


class Component(ABC):
    """A named part. Options are dataclass fields with defaults: `@dataclass class NF4(Quantizer)`."""

    kind: ClassVar[str]
    name: ClassVar[str]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Option names and their default values, in declaration order."""
        if not dataclasses.is_dataclass(cls):
            return {}
        missing = dataclasses.MISSING
        return {
            f.name: f.default_factory() if f.default_factory is not missing else f.default
            for f in dataclasses.fields(cls)
            if f.init
        }

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its present value."""
        return {name: getattr(self, name) for name in self.defaults()}

    @property
    def key(self) -> str:
        """The component's key: its name and the options that differ from their defaults."""
        defaults = self.defaults()
        return spec.render(self.name, {k: v for k, v in self.options.items() if v != defaults[k]})

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the docstring, for lists."""
        return (inspect.getdoc(cls) or "").partition("\n")[0]


class Scaler(Component):
    """(alpha, rank) ↦ s, the factor on BA: x ↦ W₀x + s·BAx. The only place that computes it."""

    kind = "scaler"

    @abstractmethod
    def __call__(self, alpha: float, rank: int) -> float:
        """The scaling s of an adapter of this alpha and rank."""


@dataclasses.dataclass(frozen=True)
class Errors:
    """What quantization does to one weight, E = W − Ŵ, all in float64 sums over float32 values.

    mse = ‖E‖²/n, mae = Σ|E|/n, relative = ‖E‖_F/‖W‖_F (0 for a zero weight), max = max|E|. `bytes` is what the
    packed weight keeps, scales and constants included.
    """

    mse: float
    mae: float
    relative: float
    max: float
    bytes: int


@dataclasses.dataclass(frozen=True)
class Packed:
    """A quantized weight: the tensors that a quantizer stores, and what is needed to read them back.

    `tensors` is everything that is kept (codes, scales, constants); `shape` and `dtype` are the weight's.
    """

    quantizer: Quantizer
    tensors: Mapping[str, torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Ŵ, shape as given to `quantize`; decoded in float32, rounded once to `dtype` (default: the weight's)."""
        return self.quantizer.decode(self.tensors, self.shape).reshape(self.shape).to(dtype or self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes kept, scales and constants included."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """8·nbytes / number of weights."""
        count = 1
        for n in self.shape:
            count *= n
        return 8.0 * self.nbytes / count

    def to(self, device: torch.device | str) -> Packed:
        """The same packed weight on another device."""
        return dataclasses.replace(self, tensors={k: t.to(device) for k, t in self.tensors.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically: the tensors, and the key, shape and dtype as metadata."""
        from safetensors.torch import save_file

        from toolkit.records.io import atomic

        about = {"quantizer": self.quantizer.key, "shape": json.dumps(self.shape), "dtype": str(self.dtype)}
        with atomic(path) as temporary:
            save_file({k: t.contiguous() for k, t in self.tensors.items()}, temporary, metadata=about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Packed:
        """Read what `save` wrote, bit for bit.

        Raises:
            InputError: the file is missing, no safetensors, or no packed weight; or its quantizer is unknown.
        """
        import torch
        from safetensors import SafetensorError, safe_open

        from toolkit.registry import registry

        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — no mapping
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {path} as a packed weight: {error}") from None
        if missing := {"quantizer", "shape", "dtype"} - set(about):
            raise InputError(f"{path} is no packed weight: its metadata lack {', '.join(sorted(missing))}")
        dtype = getattr(torch, about["dtype"].removeprefix("torch."))
        return cls(registry.make("quantizer", about["quantizer"]), tensors, tuple(json.loads(about["shape"])), dtype)


class Quantizer(Component):
    """weight → packed tensor → weight; knows its bits per weight, scales included.

    Implement `encode` and `decode` in plain tensor operations, in float32, for any shape and device. A fast
    path overrides `measure`, and a layer class that computes from packed weights is given by `linear`.
    """

    kind = "quantizer"

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors to keep for a finite floating-point weight of any shape, dtype and strides."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Ŵ in float32 (any shape of the right number of elements) from what `encode` kept."""

    def quantize(self, weight: torch.Tensor) -> Packed:
        """Pack one weight.

        Raises:
            InputError: the weight is empty, not floating-point, or holds NaN or infinity.
        """
        weight = weight.detach()
        if not weight.is_floating_point() or weight.numel() == 0:
            raise InputError(
                f"{self.key} quantizes non-empty floating-point weights; "
                f"found {weight.dtype} of shape {tuple(weight.shape)}"
            )
        if not bool(weight.isfinite().all()):
            raise InputError(f"the weight holds NaN or infinity; {self.key} quantizes finite weights only")
        return Packed(self, self.encode(weight), tuple(weight.shape), weight.dtype)

    def measure(self, weight: torch.Tensor) -> Errors:
        """The errors of quantizing a weight, against its float32 values, before any rounding to 16 bit."""
        exact = weight.detach().float()
        packed = self.quantize(weight)
        error = (exact - self.decode(packed.tensors, packed.shape).reshape(exact.shape)).double()
        square, norm = error.square().sum().item(), exact.double().square().sum().item()
        n = exact.numel()
        return Errors(
            mse=square / n,
            mae=error.abs().sum().item() / n,
            relative=(square / norm) ** 0.5 if norm else 0.0,
            max=error.abs().max().item(),
            bytes=packed.nbytes,
        )

    def linear(self, linear: nn.Linear, compute_dtype: torch.dtype) -> nn.Module | None:
        """A layer of another library that stores this format natively, made from a dense linear layer.

        `None` (the default) leaves the choice to the data flow, whose generic frozen layer keeps `Packed`.
        """
        return None

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether weights of this dtype are kept bit for bit, so that their layers may be left untouched."""
        return False


@dataclasses.dataclass(frozen=True)
class Pick:
    """What a selector answers: layer names and, for matched ones, what the match was.

    Attributes:
        layers: names, in any order.
        mismatch: (reached − target)/target of the matched quantity, signed.
        feasible_subsets: how many subsets the draw could have been; an exact integer.
        inclusion: each layer's probability of being drawn, in profile order.
        inclusion_draws: how many simulated draws `inclusion` was estimated from; None where it is exact.
        single_total: whether the matched set meets the law itself and every feasible subset holds its total, so
            that its rank among the draws is exact.
    """

    layers: Sequence[str]
    mismatch: float | None = None
    feasible_subsets: int | None = None
    inclusion: Sequence[float] | None = None
    inclusion_draws: int | None = None
    single_total: bool | None = None


class Selector(Component):
    """profile + budget + randomness (+ a selection to match) → a set of layers.

    Used twice: which layers stay in 16 bit, which layers get an adapter. `random` selectors answer
    differently for each seed; `needs_like` selectors take their target from another selection, so that a
    budget may be left out; `needs_budget` is false for those that use neither (a list, all, none).
    """

    kind = "selector"
    random: ClassVar[bool] = False
    needs_like: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True

    @property
    def quantizers(self) -> tuple[str, ...]:
        """Keys of the quantizers whose errors or bytes it reads from the profile; a study has these measured."""
        return ()

    @abstractmethod
    def select(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None
    ) -> Pick | Sequence[str]:
        """The chosen layers' names. Must not change its arguments or use global random state."""

    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` distinct answers of a random selector, without replacement; fewer where fewer exist.

        The default repeats `select` and drops repeats; it gives up after 100 repeats in a row.
        """

        def draw() -> Pick:
            pick = self.select(profile, budget, rng, like)
            return pick if isinstance(pick, Pick) else Pick(list(pick))

        return unrepeated(draw, count)


def unrepeated(draw: Callable[[], Pick], count: int) -> list[Pick]:
    """`count` distinct answers of a function, repeats dropped; fewer after 100 repeats in a row."""
    found: dict[frozenset[str], Pick] = {}
    repeats = 0
    while len(found) < count and repeats < 100:
        pick = draw()
        names = frozenset(pick.layers)
        repeats = repeats + 1 if names in found else 0
        found.setdefault(names, pick)
    return list(found.values())


class Law(Selector):
    """A law of chance: a distribution over sets of layers that hold as much as a given selection.

    Implement `draws`. The docstring states the law. A law that can draw nested families also implements
    `chains`.

    Attributes:
        match: what each draw holds as much of as the matched selection: `parameters`, `bytes`, `extra-bytes`,
            `adapter-parameters`, or `layers` where it is their number alone. An option of that name sets it.
        within: how far a draw's total may be off, as a fraction of the matched one; None where nothing is promised.
            An option of that name sets it.
        shared: draw i is one random change of all layers (a permutation), whatever is matched: its stream then
            does not depend on the matched selection, so that draw i of several selections, or of several
            budgets, goes together. A set may then come up twice.
    """

    random = True
    needs_like = True
    match: ClassVar[str] = "parameters"
    within: ClassVar[Decimal | None] = None
    shared: ClassVar[bool] = False

    @property
    def holds(self) -> tuple[str, ...]:
        """What each draw has in common with the matched selection besides its total: `roles`, `sizes`, `thirds` …

        Verdicts under laws that hold more say whether composition, and not ranking, makes a difference.
        """
        return ()

    @classmethod
    def summary(cls) -> str:
        """Also which draws go together."""
        kinds = ["draws shared by all arms and budgets"] if cls.shared else []
        kinds += ["nested families"] if cls.chains is not Law.chains and not cls.shared else []
        return super().summary() + (f" ({', '.join(kinds)})" if kinds else "")

    @property
    def nests(self) -> bool:
        """Whether it draws nested families, that is, implements `chains`."""
        return type(self).chains is not Law.chains

    @classmethod
    def standard(cls) -> list[Law]:
        """The forms of this law that belong to the standard set of controls; none by default."""
        return []

    @abstractmethod
    def draws(
        self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None, count: int
    ) -> list[Pick]:
        """`count` draws; distinct ones unless the law is `shared`, and then fewer where fewer exist."""

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> Pick:
        """The first draw."""
        return self.draws(profile, budget, rng, like, 1)[0]

    def chains(self, profile: Profile, likes: Sequence[Selection], rng: Random, count: int) -> list[tuple[Pick, ...]]:
        """`count` families, one pick a matched selection, nested as those are.

        Raises:
            InputError: this law draws no families; or the matched selections are not nested, where it needs that.
        """
        raise InputError(f"{self.key} draws no nested families; use a law that does, or draw each budget by itself")


@dataclasses.dataclass
class RankingSelector(Selector):
    """Top-K by a score, under any budget, ties broken by layer order.

    Implement `score`: one number a layer in profile order, larger is kept first. Under a layers budget
    K = ⌈ρL⌉ in exact decimals (`rounding=floor` takes ⌊ρL⌋); under a parameters or bytes budget the longest
    prefix of the ranking that never exceeds it.
    """

    rounding: Literal["ceil", "floor"] = "ceil"

    @abstractmethod
    def score(self, profile: Profile) -> Sequence[float]:
        """One finite number a layer, in profile order; larger is kept first."""

    def select(self, profile: Profile, budget: Budget | None, rng: Random, like: Selection | None) -> Sequence[str]:
        from toolkit.selection.ranking import top

        assert budget is not None  # the core refuses a missing budget before it asks
        return top(profile, self.score(profile), budget, rounding=self.rounding, selector=self.key)


class DataFlow(Component):
    """How a planned model computes, and what it keeps for backward."""

    kind = "dataflow"

    def check(self, plan: Plan) -> None:
        """Refuse, before any weight is loaded, a plan that this data flow cannot compute.

        Raises:
            InputError: naming layer, component and reason.
        """

    @abstractmethod
    def apply(self, model: nn.Module, layers: Mapping[str, LayerPlan], dtype: torch.dtype) -> nn.Module:
        """Replace each planned layer in the model, which is changed in place and returned, perhaps wrapped.

        Args:
            model: dense, in its checkpoint's dtype.
            layers: name → decision, for every layer that is planned.
            dtype: the compute dtype where a decision names none; what stays dense is cast to it afterwards.
        """


KINDS: dict[str, type[Component]] = {c.kind: c for c in (Quantizer, Selector, Scaler, DataFlow)}
"""Every kind of component and its interface; the registry, the lists and the checks read this."""
