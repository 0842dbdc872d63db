"""The starts of one run's layers, one after the other, and what they do to the weights and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.interfaces import Start
from toolkit.records.start import StartFile
from toolkit.records.started import LayerOutcome
from toolkit.registry import registry
from toolkit.runs import started, starts
from toolkit.runs.initialization.inputs import output_error
from toolkit.runs.progress import Progress

if TYPE_CHECKING:
    import torch

    from toolkit.records.initialization import Initialization
    from toolkit.records.plan import Plan
    from toolkit.runs.initialization.bench import Bench


def computed(
    plan: Plan, bench: Bench, seed: int, layers: Iterable[str] | None = None
) -> Iterator[tuple[str, Start, float]]:
    """(layer, its start, seconds) of layers whose initializers need no calibration; by default all, in model order.

    Raises:
        InputError: a layer that cannot be started so (named).
    """
    for name in bench.dense if layers is None else layers:
        start, record = started.computed(name, plan.of(name), bench.dense[name], bench.dtype, seed)
        yield name, start, record.seconds


def after_calibration(
    plan: Plan, bench: Bench, study: Initialization, folder: Path, bar: Progress
) -> Iterator[tuple[str, Start, float]]:
    """As `computed`, of a plan whose initializers ask for calibration: block by block, on the study's text.

    Args:
        folder: where the starts lie meanwhile, so that an interrupted calibration goes on; nothing reads it later.
        bar: told of every layer that is calibrated; `calibrations` in all.

    Raises:
        InputError: a layer that cannot be started so (named), or inputs that are not finite.
        RunError: too many layers fell back, or the disk is full.
    """
    from toolkit.runs.starting.calibrating import calibrate

    assert study.calibration is not None
    counted = 0

    def report(done: int, total: int, name: str) -> None:
        nonlocal counted
        bar.step(f"calibrating {name}", done - counted)
        counted = done

    bar.begin("calibrating")
    calibrate(
        plan,
        study.calibration.text,
        folder,
        model=study.model,
        windows=study.calibration.windows,
        window=study.calibration.window,
        seed=study.seed,
        device=str(bench.device),
        dtype=str(bench.dtype).removeprefix("torch."),
        progress=report,
    )
    file = StartFile.load(folder / starts.REPORT)
    bar.step("calibrated", len(file.layers) - counted)  # those of a folder that was whole already
    for name in bench.dense:
        if name in file.layers:
            yield name, starts.read(folder, name, bench.device), file.layers[name].seconds
        else:
            yield from computed(plan, bench, study.seed, [name])


def calibrated(plan: Plan) -> bool:
    """Whether a plan's starts ask for calibration."""
    return any(each.needs_calibration for each in started.initializers(plan))


def calibrations(plan: Plan, names: Iterable[str]) -> int:
    """How many layers `after_calibration` calibrates or starts before it yields the first; 0 where none ask for it."""
    if not calibrated(plan):
        return 0
    return sum(not registry.make("initializer", plan.of(name).initializer).plain for name in names)


class Outcomes:
    """What starts do to a model's layers, against plainly quantized ones, which are measured once a quantizer."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._plain: dict[tuple[str, str], tuple[float, float | None]] = {}

    def of(self, name: str, quantizer: str, start: Start, seconds: float) -> tuple[LayerOutcome, torch.Tensor]:
        """A layer's outcome, and the weight (out, in) that it starts with, float32.

        ‖W − Ŵ − s·BA‖_F/‖W‖_F with float64 sums; the outputs' error as `inputs.output_error`.
        """
        layer, weight = self._bench.layers[name], self._bench.dense[name].float()
        key = (quantizer, name)
        if key not in self._plain:
            packed = registry.make("quantizer", quantizer).quantize(self._bench.dense[name])
            self._plain[key] = self._errors(name, weight, packed.dequantize(self._bench.dtype).float())
        effective = start.effective(self._bench.dtype)
        zero, output_zero = self._plain[key]
        residual, output = self._errors(name, weight, effective)
        outcome = LayerOutcome(
            role=layer.role,
            parameters=layer.parameters,
            zero=zero,
            residual=residual,
            output_zero=output_zero,
            output=output,
            residuals=[round(each, 7) for each in start.residuals],
            kept=start.kept,
            notes=dict(start.notes),
            seconds=round(seconds, 4),
        )
        return outcome, effective

    def _errors(self, name: str, weight: torch.Tensor, effective: torch.Tensor) -> tuple[float, float | None]:
        error = weight - effective
        norm = weight.double().norm().item()
        residual = error.double().norm().item() / norm if norm else 0.0
        second = self._bench.moments.get(name)
        return residual, None if second is None else output_error(error, weight, second)
