"""A study's table as CSV: one line a run and text, or an arm, text and control; numbers in full precision."""

from __future__ import annotations

import csv
import io
from typing import Any

COLUMNS = (
    *("study", "form", "model", "fingerprint", "text", "text_sha256", "role", "budget", "arm", "selector", "run"),
    *("tokens", "loss", "perplexity", "kl", "agreement", "recovered"),
    *("layers", "parameters", "bytes", "share", "loss_minus_base", "loss_minus_base_se"),
    *("control", "claim", "law", "draws", "asked", "outcome", "median", "gap", "at_least_as_good"),
    *("p", "smallest_p", "descriptive", "exact", "matched"),
    *("mismatch_mean", "mismatch_largest", "feasible_subsets"),
)


def render(data: dict[str, Any]) -> str:
    """RFC 4180 quoting, a heading line, `\\n` line ends; a cell that does not apply is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for line in _lines(data):
        writer.writerow({k: _cell(v) for k, v in line.items()})
    return out.getvalue().rstrip("\n")


def _lines(data: dict[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for text, about in data["texts"].items():
        common = {key: data[key] for key in ("study", "form", "model", "fingerprint")}
        common |= {"text": text, "text_sha256": about["sha256"]}
        for run in data["references"]:
            lines.append(common | {"role": "reference", "arm": run["arm"], "run": run["run"], **run["scores"][text]})
        for arm in data["arms"]:
            line = common | {"role": "arm", **arm["scores"][text]}
            line |= {k: arm[k] for k in ("budget", "arm", "selector", "run", "layers", "parameters", "bytes", "share")}
            pair = arm.get("paired", {}).get(text, {}).get("base", {})
            line |= {
                "loss_minus_base": pair.get("difference"),
                "loss_minus_base_se": pair.get("standard_error"),
            }
            lines += [line | _comparison(data, control, text) for control in arm["controls"]] or [line]
    return lines


def _comparison(data: dict[str, Any], control: dict[str, Any], text: str) -> dict[str, Any]:
    names = ("control", "claim", "law", "draws", "asked", "smallest_p", "descriptive", "exact", "matched")
    item = control["texts"][text]
    return {
        **{k: control[k] for k in (*names, "feasible_subsets")},
        "outcome": data["analysis"]["outcome"],
        **{k: item[k] for k in ("median", "gap", "at_least_as_good", "p")},
        "mismatch_mean": control["mismatch"]["mean"],
        "mismatch_largest": control["mismatch"]["largest"],
    }


def _cell(value: Any) -> Any:
    """Booleans in lower case; everything else as it is."""
    return str(value).lower() if isinstance(value, bool) else value
