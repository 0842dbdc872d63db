"""A table as CSV: one line a run and text, an arm, text and control, a claim, or a headroom; in full precision."""

from __future__ import annotations

import csv
import io
from typing import Any

from toolkit.analysis.printing import starts, trained
from toolkit.analysis.printing.starts import csv_lines as started_lines
from toolkit.analysis.printing.trained import csv_lines as trained_lines

COLUMNS = (
    *("study", "form", "confirmatory", "model", "fingerprint", "text", "text_sha256"),
    *("role", "budget", "arm", "selector", "run"),
    *("tokens", "loss", "perplexity", "kl", "agreement", "recovered"),
    *("layers", "parameters", "bytes", "share", "loss_minus_base", "loss_minus_base_se"),
    *("control", "claim", "law", "draws", "asked", "outcome", "value", "median", "sd", "gap", "below_floor"),
    *("at_least_as_good", "p", "smallest_p", "descriptive", "exact", "matched"),
    *("mismatch_mean", "mismatch_largest", "feasible_subsets"),
    *("test", "corrected_p", "standardized_gap", "verdict"),
    *("headroom", "headroom_low", "headroom_high", "oracle_p", "oracle_separated", "sd_over_sets", "se_over_text"),
)

OTHERS = {trained.KIND: trained_lines, starts.KIND: started_lines}
"""Kind of a table's data → the module of its lines, where it is none of selections."""


def render(data: dict[str, Any]) -> str:
    """RFC 4180 quoting, a heading line, `\\n` line ends; a cell that does not apply is empty."""
    out = io.StringIO()
    other = OTHERS.get(data["kind"])
    columns = COLUMNS if other is None else other.COLUMNS
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for line in _lines(data) if other is None else other.lines(data):
        writer.writerow({k: _cell(v) for k, v in line.items()})
    return out.getvalue().rstrip("\n")


def _lines(data: dict[str, Any]) -> list[dict[str, Any]]:
    lines = []
    head = {key: data[key] for key in ("study", "form", "model", "fingerprint") if key in data}
    head["confirmatory"] = data["status"]["confirmatory"]
    for text, about in data["texts"].items():
        common = head | {"text": text, "text_sha256": about.get("sha256")}
        for run in data.get("references", []):
            lines.append(common | {"role": "reference", "arm": run["arm"], "run": run["run"], **run["scores"][text]})
        for arm in data["arms"]:
            line = common | {"role": "arm", **arm.get("scores", {}).get(text, {})}
            named = ("budget", "arm", "selector", "run", "layers", "parameters", "bytes", "share")
            line |= {k: arm[k] for k in named if k in arm}
            pair = arm.get("paired", {}).get(text, {}).get("base", {})
            line |= {
                "loss_minus_base": pair.get("difference"),
                "loss_minus_base_se": pair.get("standard_error"),
            }
            lines += [line | _comparison(data, control, text) for control in arm["controls"]] or [line]
        lines += [common | line for line in _found(data, text)]
    return lines


def _comparison(data: dict[str, Any], control: dict[str, Any], text: str) -> dict[str, Any]:
    names = ("control", "claim", "law", "draws", "asked", "smallest_p", "descriptive", "exact", "matched")
    item = control["texts"][text]
    return {
        **{k: control[k] for k in (*names, "feasible_subsets")},
        "outcome": data["analysis"]["outcome"],
        "value": item["outcome"],
        **{k: item[k] for k in ("median", "sd", "gap", "below_floor", "at_least_as_good", "p")},
        "mismatch_mean": control["mismatch"]["mean"],
        "mismatch_largest": control["mismatch"]["largest"],
    }


def _found(data: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """The claims on one text, and the headroom."""
    verdicts, lines = data["verdicts"] or {"claims": [], "headroom": []}, []
    for claim in verdicts["claims"]:
        names = ("arm", "budget", "control", "law", "draws", "at_least_as_good", "p", "smallest_p", "exact", "test")
        lines.append(
            {"role": "claim", "text": claim["text"], "claim": True}
            | {name: claim[name] for name in (*names, "verdict")}
            | {
                "outcome": data["analysis"]["outcome"],
                "gap": claim["effect"]["gap"],
                "standardized_gap": claim["effect"]["standardized"],
                "corrected_p": claim["adjusted"],
            }
        )
    for item in verdicts["headroom"]:
        lines.append(
            {"role": "headroom", "text": item["text"], "arm": item["arm"], "budget": item["budget"]}
            | {"headroom": item["headroom"], "headroom_low": item["low"], "headroom_high": item["high"]}
            | {"oracle_p": item["oracle_test"]["p"], "oracle_separated": item["separated"]}
            | {name: item[name] for name in ("sd_over_sets", "se_over_text", "draws")}
        )
    return [line for line in lines if line["text"] == text]


def _cell(value: Any) -> Any:
    """Booleans in lower case; everything else as it is."""
    return str(value).lower() if isinstance(value, bool) else value
