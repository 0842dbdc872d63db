"""What initializers that fit an adapter share: the inner base, errors, and what a plan may not ask of them."""

from __future__ import annotations

import dataclasses
import math

import torch

from toolkit.errors import InputError
from toolkit.interfaces import FALLBACK, LIMITED, Given, Initializer, Moments, Packed, Quantizer, Start
from toolkit.registry import registry
from toolkit_plugins.initializers import low_rank
from toolkit_plugins.initializers.compensation import output_error

CHUNK = 2**22
"""Weights of which a difference is held at a time."""


def check_rank(initializer: Initializer, shape: tuple[int, int], rank: int | None) -> None:
    """Refuse a layer without an adapter, and a rank that no factorization of the layer has.

    Raises:
        InputError: the rank is None, below 1 or above min(shape).
    """
    if rank is None:
        raise InputError(f"initializer {initializer.key} fits an adapter, and this layer has none: give it a rank")
    if not 1 <= rank <= min(shape):
        raise InputError(
            f"initializer {initializer.key} needs a rank of 1 to {min(shape)} for a layer of shape "
            f"{shape[0]}×{shape[1]}; found {rank}"
        )


def adapter_of(initializer: Initializer, given: Given) -> tuple[int, torch.Tensor]:
    """(rank, A) of a layer that is to be fitted.

    Raises:
        InputError: the layer's weight is no matrix, its rank is no rank of it, A is missing or of another shape, or
            its scaling is 0 or not finite.
    """
    weight = given.weight
    if weight.ndim != 2:
        raise InputError(f"layer {given.name}: a weight (out, in) is needed; found shape {tuple(weight.shape)}")
    check_rank(initializer, (weight.shape[0], weight.shape[1]), given.rank)
    if given.A is None or tuple(given.A.shape) != (given.rank, weight.shape[1]):
        found = "none" if given.A is None else f"shape {tuple(given.A.shape)}"
        raise InputError(f"layer {given.name}: its A must have shape ({given.rank}, {weight.shape[1]}); found {found}")
    if given.scaling == 0 or not abs(given.scaling) < float("inf"):
        raise InputError(
            f"layer {given.name}: a scaling of {given.scaling} adds nothing that could be fitted; "
            "a finite number other than 0 is needed"
        )
    assert given.rank is not None
    return given.rank, given.A.to(weight.device, torch.float32)


def moments_of(initializer: Initializer, given: Given) -> Moments:
    """The moments of a layer's inputs, as an initializer that is calibrated must have them.

    Raises:
        InputError: there are none, or they are of another width, of inputs rounded by another quantizer, not finite, or
            negative on the diagonal. The layer is named.
    """
    moments, width, layer = given.moments, given.weight.shape[-1], f"layer {given.name}"
    if moments is None:
        raise InputError(f"{layer}: initializer {initializer.key} needs calibration, and there are no moments")
    second = moments.second
    if tuple(second.shape) != (width, width):
        raise InputError(
            f"{layer}: the moments of {width} inputs have shape ({width}, {width}); found {tuple(second.shape)}"
        )
    if not bool(second.isfinite().all()):
        raise InputError(f"{layer}: the moments of its inputs hold NaN or infinity")
    if moments.activations != initializer.activations:
        raise InputError(
            f"{layer}: initializer {initializer.key} needs moments of inputs rounded by {initializer.activations}; "
            f"these are by {moments.activations}"
        )
    if (lowest := float(second.diagonal().amin())) < 0:
        raise InputError(f"{layer}: a mean square of its inputs is {lowest:.4g}; it is never negative")
    return moments


@dataclasses.dataclass(frozen=True)
class Base:
    """How a base is made from a weight that a fit has changed: by the quantizer alone, or by another initializer."""

    inner: Initializer

    @classmethod
    def of(cls, key: str) -> Base:
        """The base that the initializer of a key makes.

        Raises:
            InputError: there is none of that key, or it fits an adapter itself.
        """
        inner = registry.make("initializer", key)
        if inner.needs_rank:
            raise InputError(f"initializer {inner.key} fits an adapter itself; a base is made by one that does not")
        return cls(inner)

    def make(self, given: Given, weight: torch.Tensor) -> Start:
        """The packed base of `weight` (W, or float32), without an adapter, and the inner initializer's notes.

        They are of the weight that it was given, and stand as `base_…`, but for those that are counted.
        A quantizer that keeps the weight's dtype bit for bit is given that dtype; any other the float32 values.
        """
        dtype = given.weight.dtype
        if given.quantizer.keeps(dtype):
            weight = weight.to(dtype)
        if self.inner.plain:
            made = Start(given.quantizer.quantize(weight), None, None, 1.0, (0.0,))
        else:
            bare = dataclasses.replace(given, weight=weight, rank=None, A=None, scaling=1.0)
            made = self.inner.initialize(bare)
        notes = {key if key in (FALLBACK, LIMITED) else f"base_{key}": value for key, value in made.notes.items()}
        return dataclasses.replace(made, base=dataclasses.replace(made.base, dtype=dtype), notes=notes)


def error_of(given: Given, base: Packed) -> torch.Tensor:
    """E = W − Ŵ in float32, Ŵ as it will be read back: stored, decoded, and rounded to `given.dtype`.

    Raises:
        InputError: Ŵ is too large for that dtype.
    """
    decoded = base.dequantize(given.dtype).float()
    lowest, highest = decoded.aminmax()
    if not math.isfinite(float(lowest)) or not math.isfinite(float(highest)):
        raise InputError(
            f"layer {given.name}: its base is too large for {given.dtype or base.dtype}, which it is decoded to: it "
            "would be infinity; choose a wider dtype"
        )
    weight = given.weight.detach()
    if weight.dtype not in (torch.float16, torch.bfloat16):  # those are widened as they are read, without a copy
        weight = weight.float()
    return weight - decoded


def residual_of(given: Given, base: Packed) -> float:
    """‖W − Ŵ‖_F/‖W‖_F of a base without an adapter; 0 of a weight of zeros."""
    return norm(error_of(given, base)) / (norm(given.weight.detach().float()) or 1.0)


def no_change(given: Given) -> torch.Tensor | None:
    """B = 0, (out, rank), float32; None where the layer has no adapter."""
    return None if given.rank is None else torch.zeros(given.weight.shape[0], given.rank, device=given.weight.device)


def norm(matrix: torch.Tensor) -> float:
    """‖·‖_F, summed in float64."""
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64))


def left_over(error: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> float:
    """‖E − s·BA‖_F of the float32 factors as they are, some rows at a time, so that no copy of E is held."""
    rows = max(1, CHUNK // error.shape[1])
    parts = zip(error.split(rows), b.split(rows), strict=True)
    return math.hypot(*(norm(torch.addmm(some, left, a, alpha=-scaling)) for some, left in parts))


def output_notes(given: Given, base: Packed, a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """`output_error`, relative, over the inputs' moments, of Ŵ + s·BA; nothing where the layer was not calibrated."""
    if given.moments is None:
        return {}
    error = torch.addmm(error_of(given, base), b, a, alpha=-given.scaling)
    second = given.moments.second.to(error.device, torch.float64)
    return {"output_error": output_error(error, given.weight.detach().float(), second)}


def same(one: Packed, other: Packed) -> bool:
    """Whether two packed weights hold the same bits."""
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[key]) for key, tensor in one.tensors.items()
    )


@dataclasses.dataclass(frozen=True)
class Iterated(Initializer):
    """An initializer that goes on for a number of iterations.

    Attributes:
        iterations: T, at least 1.

    Raises:
        InputError: no iteration.
    """

    iterations: int = 1

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise InputError(
                f"option 'iterations' of initializer {self.name!r} is {self.iterations}; at least 1 is needed"
            )


@dataclasses.dataclass(frozen=True)
class OverBase(Initializer):
    """An initializer that fits an adapter of low rank over a base, which another initializer makes.

    Attributes:
        base: key of the one that makes Ŵ; `zero` is the quantizer's own Q.
        svd: how factors are found (`low_rank.best`): `auto`, `exact` or `randomised`.

    Raises:
        InputError: a base that fits an adapter itself.
    """

    base: str = "zero"
    svd: low_rank.Method = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", self._base.inner.key)

    @property
    def _base(self) -> Base:
        return Base.of(self.base)

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        """Whether the base's initializer does."""
        return self._base.inner.needs_calibration

    @property
    def activations(self) -> str:
        """The base's initializer's."""
        return self._base.inner.activations

    def check(self, shape: tuple[int, int], quantizer: Quantizer, rank: int | None) -> None:
        """Refuses a rank outside 1 to min(shape), and what the base's initializer refuses."""
        check_rank(self, shape, rank)
        self._base.inner.check(shape, quantizer, None)


@dataclasses.dataclass(frozen=True)
class Alternating(OverBase, Iterated):
    """Quantization and a low-rank fit in turn, over and over. Options as at `Iterated` and `OverBase`."""

    def __post_init__(self) -> None:
        Iterated.__post_init__(self)
        OverBase.__post_init__(self)
