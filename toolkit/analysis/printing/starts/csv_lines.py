"""The table of a study of starts as CSV lines: scores, comparisons and roles, in full precision."""

from __future__ import annotations

from typing import Any

from toolkit.records.report import SIXTEEN_BIT

COLUMNS = (
    *("study", "form", "model", "fingerprint", "confirmatory", "part", "text", "activations", "arm", "scaling", "run"),
    *("base", "initializer", "role", "plain", "residual", "relative", "output", "relative_output", "worse"),
    *("worse_outputs", "layers", "tokens", "loss", "perplexity", "kl", "agreement", "fallbacks", "seconds"),
    *("peak_bytes", "first", "second", "outcome", "difference", "low", "high", "coverage", "verdict"),
)


def lines(data: dict[str, Any]) -> list[dict[str, Any]]:
    """One dictionary a line; what does not apply is left out."""
    head = {key: data[key] for key in ("study", "form", "model", "fingerprint")}
    head["confirmatory"] = data["status"]["confirmatory"]
    found: list[dict[str, Any]] = []
    for text, scores in (data["sixteen"] or {}).items():
        found += [
            {"part": "score", "text": text, "activations": key, "arm": SIXTEEN_BIT} | score
            for key, score in scores.items()
        ]
    means = ("plain", "residual", "relative", "output", "relative_output")
    names = ("arm", "scaling", "run", "base", "initializer", *means, "worse", "worse_outputs", "layers")
    for entry in data["entries"]:
        common = {name: entry[name] for name in (*names, "seconds", "peak_bytes")}
        common["fallbacks"] = sum(entry["fallbacks"].values())
        for text, scores in entry["scores"].items():
            found += [
                {"part": "score", "text": text, "activations": key} | common | score for key, score in scores.items()
            ]
        found += [
            {"part": "role", "arm": entry["arm"], "scaling": entry["scaling"], "run": entry["run"], "role": role} | of
            for role, of in entry["roles"].items()
        ]
    shown = ("text", "activations", "scaling", "first", "second", "outcome", "difference", "low", "high", "coverage")
    found += [{"part": "contrast"} | {name: entry[name] for name in (*shown, "verdict")} for entry in data["contrasts"]]
    return [head | line for line in found]
