"""A study of starts as plain data: every number of its table, and nothing about how it is printed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from toolkit.analysis.certificates import locks
from toolkit.analysis.printing.starts import KIND
from toolkit.analysis.printing.trained.cells import signed
from toolkit.analysis.reading.started import StartedResults, read
from toolkit.analysis.statistics import bootstrap
from toolkit.records.initialization import AS_THEY_ARE
from toolkit.records.started import LayerOutcome, Started

SCHEMA = 1
OUTCOMES = {"loss": "nll", "kl": "kl"}
"""Declared outcome → column of the rows."""

LOWER, HIGHER, OPEN, FEW = "lower", "higher", "not separated", "too few windows"


def summary(study: str | os.PathLike[str] | StartedResults) -> dict[str, Any]:
    """Everything that the table of a study of starts states, as plain JSON data.

    Returns:
        `status` (confirmatory, or exploratory and why), `sixteen` (scores of the 16-bit model), `entries` (one an arm
        and scaling), `contrasts` (the declared comparisons), `missing`, `sentences`, `notes`, and what was run.
        Losses are in nats a token; residuals and output errors are means over layers, weighted by their parameters.

    Raises:
        InputError: as `toolkit.analysis.reading.started.read`.
    """
    results = study if isinstance(study, StartedResults) else read(study)
    asked, one = results.study, results.any
    found = locks.judged(results.folder, asked, one.fingerprint, results.hashes, results.marks, list(results.missing))
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        "study": asked.name,
        "question": asked.question,
        "form": asked.form,
        "model": one.model,
        "fingerprint": one.fingerprint,
        "reference": one.reference.note,
        "device": one.provenance.device,
        "compute_dtype": one.provenance.compute_dtype,
        "rank": asked.rank,
        "scaler": asked.scaler,
        "scalings": list(asked.scalings),
        "activations": list(asked.activations),
        "texts": {name: text.model_dump(mode="json") for name, text in one.texts.items()},
        "calibration": None if one.calibration is None else one.calibration.model_dump(mode="json"),
        "analysis": asked.analysis.model_dump(mode="json"),
        "status": {"confirmatory": found.confirmatory, "reasons": list(found.reasons), "lock": found.hash},
        "sixteen": None if results.sixteen is None else _scores(results.sixteen),
        "entries": [
            _entry(results, arm.name, s, report)
            for arm in asked.arms
            for s in asked.scalings
            if (report := results.of(arm.name, s)) is not None
        ],
        "contrasts": _contrasts(results),
        "missing": list(results.missing),
    }
    data["sentences"] = _sentences(data)
    data["notes"] = _notes(data)
    return data


def _scores(report: Started) -> dict[str, dict[str, Any]]:
    return {
        text: {key: score.model_dump(mode="json") for key, score in scores.items()}
        for text, scores in report.scores.items()
    }


def _entry(results: StartedResults, arm: str, s: float, report: Started) -> dict[str, Any]:
    declared, layers = results.study.arm(arm), list(report.layers.values())
    roles = list(dict.fromkeys(layer.role for layer in layers))
    memory = report.provenance.peak_memory
    return {
        "arm": arm,
        "scaling": s,
        "any_scaling": report.scaling is None and len(results.study.scalings) > 1,
        "run": report.run,
        "base": declared.base,
        "initializer": declared.initializer,
        **_means(layers),
        "roles": {role: _means([layer for layer in layers if layer.role == role]) for role in roles},
        "iterates": _iterates(layers),
        "layers": len(layers),
        "worse": sum(layer.residual > layer.zero for layer in layers),
        "worse_outputs": sum(
            layer.output > layer.output_zero
            for layer in layers
            if layer.output is not None and layer.output_zero is not None
        ),
        "fallbacks": dict(report.fallbacks),
        "seconds": report.seconds,
        "peak_bytes": memory.get("peak_allocated", memory.get("peak_resident")),
        "scores": _scores(report),
    }


def _means(layers: list[LayerOutcome]) -> dict[str, float | None]:
    """Means over layers, weighted by parameters; ratios over the layers that quantization changes."""

    def mean(value: Callable[[LayerOutcome], float], of: list[LayerOutcome]) -> float | None:
        weight = sum(layer.parameters for layer in of)
        return sum(value(layer) * layer.parameters for layer in of) / weight if weight else None

    seen = [layer for layer in layers if layer.output is not None and layer.output_zero]
    return {
        "plain": mean(lambda layer: layer.zero, layers),
        "residual": mean(lambda layer: layer.residual, layers),
        "relative": mean(lambda layer: layer.residual / layer.zero, [layer for layer in layers if layer.zero]),
        "output": mean(lambda layer: layer.output or 0.0, seen),
        "relative_output": mean(lambda layer: (layer.output or 0.0) / (layer.output_zero or 1.0), seen),
    }


def _iterates(layers: list[LayerOutcome]) -> list[float]:
    """Mean of each iterate's residual over the zero start's; a layer that ended earlier counts with its last."""
    fitted = [layer for layer in layers if len(layer.residuals) > 1 and layer.residuals[0]]
    weight = sum(layer.parameters for layer in fitted)
    most = max((len(layer.residuals) for layer in fitted), default=0)
    return [
        sum(
            layer.parameters * layer.residuals[min(t, len(layer.residuals) - 1)] / layer.residuals[0]
            for layer in fitted
        )
        / weight
        for t in range(most)
    ]


def _contrasts(results: StartedResults) -> list[dict[str, Any]]:
    """The declared comparisons, (first − second) a token, at each scaling, text and rounding of inputs."""
    asked = results.study
    analysis, baseline = asked.analysis, asked.analysis.baseline
    tests = asked.family_size if analysis.correction == "bonferroni" else 1
    coverage = 1 - analysis.level / tests
    found = []
    for first, second in asked.pairs:
        for key in asked.activations:
            for text, about in results.any.texts.items():
                tokens = np.full(about.windows, about.window - 1, dtype=np.float64)
                for s in asked.scalings:
                    one, other = results.of(first, s), results.of(second, s)
                    if one is None or other is None:
                        continue
                    a, b = (results.windows[r.run][key, text][OUTCOMES[analysis.outcome]] for r in (one, other))
                    over = bootstrap.mean(
                        a - b,
                        tokens,
                        block=min(analysis.block, about.windows),
                        resamples=analysis.resamples,
                        level=coverage,
                        what=f"{first} − {second} on {text}",
                    )
                    found.append(
                        {"first": first, "second": second, "baseline": second == baseline, "scaling": s}
                        | {"text": text, "activations": key, "outcome": analysis.outcome}
                        | {"difference": over.value, "verdict": _verdict(over), "coverage": coverage}
                        | {name: value for name, value in asdict(over).items() if name != "value"}
                    )
    return found


def _verdict(over: bootstrap.Interval) -> str:
    if over.low is None or over.high is None:
        return FEW
    return LOWER if over.high < 0 else HIGHER if over.low > 0 else OPEN


def _where(data: dict[str, Any], text: str, key: str) -> str:
    """Which text and rounding of inputs, as far as there are several."""
    words = [f"on {text}"] if len(data["texts"]) > 1 else []
    words += [f"with inputs rounded by {key}" if key != AS_THEY_ARE else "with inputs as they are"] * (
        len(data["activations"]) > 1
    )
    return " ".join(["", *words])


def _sentences(data: dict[str, Any]) -> list[str]:
    """One a declared pair, text and rounding of inputs: at which scalings its interval excludes 0."""
    said, groups = [], {}
    for entry in data["contrasts"]:
        groups.setdefault((entry["first"], entry["second"], entry["activations"], entry["text"]), []).append(entry)
    several = len(data["scalings"]) > 1
    for (first, second, key, text), entries in groups.items():
        parts = []
        for verdict in dict.fromkeys(entry["verdict"] for entry in entries):
            mine = [entry for entry in entries if entry["verdict"] == verdict]
            span = sorted(entry["difference"] for entry in mine)
            size = " to ".join(dict.fromkeys(signed(value) for value in (span[0], span[-1])))
            at = f" at s = {', '.join(format(entry['scaling'], 'g') for entry in mine)}" if several else ""
            parts.append(f"{verdict}{at} ({size})")
        outcome = entries[0]["outcome"]
        said.append(f"{first} against {second}{_where(data, text, key)}: {outcome} {'; '.join(parts)}.")
    return said


def _notes(data: dict[str, Any]) -> list[str]:
    analysis, notes = data["analysis"], []
    tests = len(data["contrasts"])
    how = (
        f"each covers 1 − {analysis['level']:g}/comparisons, so that all of them cover at once"
        if analysis["correction"] == "bonferroni"
        else f"each covers {1 - analysis['level']:g}, not corrected for {tests} comparisons"
    )
    notes.append(
        f"Intervals are over windows of these texts, paired, by a bootstrap of blocks of {analysis['block']} "
        f"window{'s' * (analysis['block'] > 1)}; {how}. They do not tell of other texts."
    )
    notes.append(
        "Residual: ‖W − Ŵ − s·BA‖/‖W‖, relative to ‖W − Q(W)‖/‖W‖ of the plainly quantized base of the same quantizer; "
        "means over layers, weighted by parameters."
    )
    if data["calibration"] is not None:
        notes.append(
            "Output error: √(tr(E R Eᵀ)/tr(W R Wᵀ)) with the moments R of the 16-bit model's inputs on the calibration "
            "text, for every arm alike, relative to the plainly quantized base's."
        )
    if any(entry["any_scaling"] for entry in data["entries"]) and len(data["scalings"]) > 1:
        notes.append("An arm whose start adds nothing (s·BA = 0) is one run, shown at every scaling.")
    fallen = [e for e in data["entries"] if e["fallbacks"]]
    for entry in fallen:
        told = "; ".join(f"{reason}: {count}" for reason, count in entry["fallbacks"].items())
        notes.append(f"Fall-backs of {entry['run']} (layers): {told}.")
    return notes
