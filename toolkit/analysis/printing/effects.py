"""What each layer alone is worth, measured, beside what the profile says of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolkit.analysis.reading.reports import Results
from toolkit.errors import InputError
from toolkit.records.profile import MEASURES, Profile
from toolkit.records.report import QUANTIZE, RESTORE
from toolkit.selection.similarity import spearman

KINDS = {RESTORE: "restored to 16 bit, all others quantized", QUANTIZE: "quantized, all others in 16 bit"}


@dataclass(frozen=True)
class Effects:
    """One sweep on one text.

    Attributes:
        kind: `restore`: loss(base) − loss(layer alone restored); `quantize`: loss(layer alone quantized) −
            loss(16 bit). Nats a token, above zero where the layer's 16-bit weight helps.
        values: one a layer, in profile order.
        correlation: Spearman's ρ with the profile's error; None where one of the two is constant.
    """

    kind: str
    text: str
    values: np.ndarray
    correlation: float | None


def errors(profile: Profile, quantizer: str, measure: str = "mse") -> np.ndarray:
    """Each layer's error under a quantizer.

    Raises:
        InputError: the profile does not hold that error.
    """
    if measure not in MEASURES:
        raise InputError(f"a profile measures {', '.join(MEASURES)}; found {measure!r}")
    return np.asarray(profile[f"error.{quantizer}.{measure}"], dtype=np.float64)


def effects(results: Results, error: np.ndarray) -> list[Effects]:
    """The effects of every sweep on every text, by text, then restored before quantized; those whose runs are there."""
    found = []
    for text in results.texts:
        for kind in KINDS:
            run, reference = results.sweeps.get(kind), results.base if kind == RESTORE else results.sixteen_bit
            if run is None or run.draws is None or reference is None:
                continue
            sign = -1.0 if kind == RESTORE else 1.0
            values = sign * (run.draws.outcomes[text]["loss"] - reference.scores[text].loss)
            rho = float(spearman({"effect": values, "error": error})[0][1])
            found.append(Effects(kind, text, values, rho if rho == rho else None))
    return found
