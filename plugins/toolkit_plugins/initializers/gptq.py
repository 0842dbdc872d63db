"""GPTQ on the quantizer's own grid."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from toolkit.errors import InputError
from toolkit.interfaces import FALLBACK, LIMITED, Given, Initializer, Packed, Quantizer, Start
from toolkit.registry import registry
from toolkit.weights.precision import full_float32
from toolkit_plugins.initializers.compensation import compensate, factorize, output_error, sequence
from toolkit_plugins.initializers.fitting import error_of, moments_of, no_change, norm


@dataclasses.dataclass(frozen=True)
class GPTQ(Initializer):
    """The base by second-order error compensation, min ‖(W − Ŵ)x‖² over the calibration inputs, on any block format.

    With the Hessian H = 2R of tr(E R Eᵀ), E = W − Ŵ, columns are rounded one after the other, and what remains of
    each one's error is moved onto those still to come (Frantar et al., 2023; `compensation.compensate`); H's factor 2
    changes nothing. PACT (abstract) adapts it to NVFP4's scales and to quantized activations, and says no more
    of how: what follows is our choice. W is read in float32, H factorized in float64.

    The scales of a whole tensor stay as W gives them (NVFP4's tensor scale, the double quantization's constants);
    those of a group of columns are `static`, or `refresh`ed by the format's own rule when the group's turn comes, or
    `search`ed for the least error that the group's own compensated rounding adds. With `order` = `columns` a group's
    columns come at different times: its scales are searched before the first, for Σ_j R_jj·(w_j − ŵ_j)², and cannot
    be refreshed. Where blocks run over the ends of rows, there are no groups: scales are static and columns go one by
    one, which the note `limited` says where it was asked otherwise.

    The defaults are the best by measurement (benchmarks/results/gptq.json: the seven layers of one block of the demo
    model, 4,096 tokens). Output errors on another text than was calibrated with, relative to rounding, geometric means:

        scales, order       NVFP4  MXFP4  NF4
        search, groups      .538   .573   .575
        search, none        .545   .588   .584
        search, columns     .567   .580   .594
        static, groups      .658
        static, columns     .652   .594   .629
        static, none        .677   .626   .655
        refresh, groups     .652
        refresh, none       .669

    The moments of the inputs have the activations' rounding in them where `activations` names it. An input that was
    never seen (R_jj = 0) takes no part: its weights are rounded plainly, not zeroed. Damping is λ = damping·mean R_jj
    over the inputs seen, raised tenfold where the factorization fails (`compensation.factorize`).

    B is 0 and A the seeded one where the layer has an adapter. `residuals` are of weights: rounding's, then GPTQ's,
    which is larger, since GPTQ trades weights for outputs; what is kept goes by the relative output error on the
    layer's own moments, √(tr(E R Eᵀ)/tr(W R Wᵀ)), and is never above rounding's. Notes of a start:
    `output_error`, of what is kept; `output_error_rounding`; `output_error_compensated`, where it was not kept;
    `tokens`; `damping`, as it was in the end, and `damping_raised`, how often it was raised; `dead`, inputs never seen;
    `fallback` with its reason, where the layer is rounded instead.

    Attributes:
        scales: `search`, `refresh` or `static`.
        order: `groups`, `columns` or `none`: which columns come first, those of the largest E[x²].
        block: columns a block of updates, at least 1; it changes the speed alone.
        damping: 0 to 1.
        activations: key of the quantizer of the inputs, such as `nvfp4`; `none` leaves them.

    Raises:
        InputError: a block below 1, a damping outside 0 to 1, an unknown quantizer of activations, or scales that
            are to be refreshed while columns are ordered one by one.
    """

    name = "gptq"
    needs_calibration = True
    needs_rank = False

    scales: Literal["search", "refresh", "static"] = "search"
    order: Literal["groups", "columns", "none"] = "groups"
    block: int = 128
    damping: float = 0.01
    activations: str = "none"  # type: ignore[assignment]  # an option here, a property of those that have none

    def __post_init__(self) -> None:
        if self.block < 1:
            raise InputError(f"option 'block' of initializer 'gptq' is {self.block}; at least 1 is needed")
        if not 0 <= self.damping <= 1:
            raise InputError(f"option 'damping' of initializer 'gptq' is {self.damping}; 0 to 1 is allowed")
        if self.scales == "refresh" and self.order == "columns":
            raise InputError(
                "initializer 'gptq' cannot refresh a group's scales when its columns come at different times: "
                "scales=refresh goes with order=groups or order=none"
            )
        object.__setattr__(self, "activations", registry.make("quantizer", self.activations).key)

    def check(self, shape: tuple[int, int], quantizer: Quantizer, rank: int | None) -> None:
        """Refuses a quantizer without a grid."""
        if not quantizer.has_grid:
            able = [name for name, (cls, _) in registry.of_kind("quantizer").items() if cls.grid is not Quantizer.grid]
            raise InputError(
                f"initializer {self.key} rounds column by column, and quantizer {quantizer.key} has no grid for it; "
                f"those that have: {', '.join(able)}"
            )

    @full_float32()
    def initialize(self, given: Given) -> Start:
        """The start; which of rounding and GPTQ it is, and what became of either, is in its notes.

        Raises:
            InputError: no moments, or moments of another width, of other activations, or with NaN or infinity; a
                quantizer without a grid, or a weight that it refuses.
        """
        self.check((given.weight.shape[0], given.weight.shape[-1]), given.quantizer, given.rank)
        moments = moments_of(self, given)
        second = moments.second.double()
        seen = second.diagonal() > 0
        notes: dict[str, float | int | str | bool] = {"tokens": moments.tokens, "dead": int((~seen).sum())}
        weight = given.weight.detach().float()
        whole = norm(weight) or 1.0
        rounded = given.quantizer.quantize(given.weight)
        bases = [rounded]
        made: Packed | None = None
        if not bool(seen.any()):
            notes[FALLBACK] = "rounding: no input was seen"
        else:
            made = self._made(given, weight, second, seen, notes)
        errors = [error_of(given, base) for base in (bases if made is None else [*bases, made])]
        outputs = [output_error(error, weight, second) for error in errors]
        kept = len(outputs) - 1
        if made is not None:
            bases.append(made)
            if outputs[1] > outputs[0]:
                kept = 0
                notes |= {FALLBACK: "rounding: its output error is lower", "output_error_compensated": outputs[1]}
        notes |= {"output_error": outputs[kept], "output_error_rounding": outputs[0]}
        residuals = tuple(norm(error) / whole for error in errors)
        return Start(bases[kept], given.A, no_change(given), given.scaling, residuals, kept, notes)

    def _made(
        self,
        given: Given,
        weight: torch.Tensor,
        second: torch.Tensor,
        seen: torch.Tensor,
        notes: dict[str, float | int | str | bool],
    ) -> Packed | None:
        """GPTQ's base; None where H cannot be factorized."""
        grid = given.quantizer.grid(given.weight)
        assert grid is not None
        hessian = torch.where(seen & seen[:, None], second, 0.0)
        hessian.diagonal()[~seen] = second.diagonal()[seen].mean()
        order = sequence(second, grid, self.order)
        found = factorize(hessian[order][:, order], self.damping)
        if found is None:
            notes[FALLBACK] = "rounding: the Hessian could not be factorized at any damping up to 1"
            return None
        notes |= {"damping": found.damping, "damping_raised": found.raised}
        fit = None if self.scales == "static" else self.scales
        if grid.group is None:
            lost = ["scales are static"] * (fit is not None) + ["columns go one by one"] * (self.order == "groups")
            if lost:
                notes[LIMITED] = f"{', '.join(lost)}: blocks run over the ends of rows"
            fit = None
        if fit == "search" and self.order == "columns":
            assert grid.group is not None
            importance = hessian.diagonal().float()
            for columns in torch.arange(weight.shape[1], device=weight.device).split(grid.group):
                grid.fit(columns, weight[:, columns], importance[columns])
            fit = None
        return compensate(grid, weight, found.upper, order, block=self.block, fit=fit)
