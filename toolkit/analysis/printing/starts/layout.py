"""What the table of a study of starts begins with: what was run, and what must be known."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.trained.layout import MOST, status
from toolkit.records.initialization import CALIBRATION


def caption(data: dict[str, Any]) -> list[str]:
    """One sentence a line."""
    scalings = ", ".join(f"{s:g}" for s in data["scalings"])
    lines = [
        status(data),
        f"Study {data['study']} ({data['form']} form): {data['question']}",
        f"Model: {data['model']} (weights {data['fingerprint'][:12]}).",
        f"Reference weights: {data['reference'].rstrip('.')}.",
        f"Started and scored on {data['device']}, compute in {data['compute_dtype']}; rank {data['rank']}, scaler "
        f"{data['scaler']}, s = {scalings}. Nothing is trained: each arm is scored with the weights that it starts "
        "with, Ŵ + s·BA.",
    ]
    texts = dict(data["texts"])
    if data["calibration"] is not None:
        texts[CALIBRATION] = data["calibration"]
    for name, text in texts.items():
        what = "Calibration text" if name == CALIBRATION else f"Text {name}"
        lines.append(
            f"{what}: {text['source']}, SHA-256 {text['sha256'][:12]}, {text['windows']} windows of {text['window']} "
            f"tokens, {text['tokens']:,} tokens."
        )
    lines += data["notes"]
    if data["missing"]:
        rest = f"; and {len(data['missing']) - MOST} more" if len(data["missing"]) > MOST else ""
        lines.append(f"Missing runs ({len(data['missing'])}): {'; '.join(data['missing'][:MOST])}{rest}.")
    return lines
