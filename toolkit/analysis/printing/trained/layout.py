"""What a fine-tuning study's table begins with: what was run, and what must be known."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.trained.cells import percent

MOST = 40


def caption(data: dict[str, Any]) -> list[str]:
    """One sentence a line."""
    lines = [
        status(data),
        f"Study {data['study']} ({data['form']} form): {data['question']}",
        f"Model: {data['model']} (weights {data['fingerprint'][:12]}).",
    ]
    if data["reference"]:
        lines.append(f"Reference weights: {data['reference'].rstrip('.')}.")
    if data["device"]:
        lines.append(f"Trained on {', '.join(data['device'])}, compute in {', '.join(data['compute_dtype'])}.")
    if data["tasks"]:
        lines.append(f"Shared levers: {_levers(data)}.")
        seeds = data["seeds"]
        shown = ", ".join(seeds[:12]) + (f", … ({len(seeds)} in all)" if len(seeds) > 12 else "")
        lines.append(f"Seeds of each arm: {shown}; {data['reports']:,} reports.")
    for task in data["tasks"]:
        train, test = task["train"], task["test"]
        chance = "" if task["chance"] is None else f", chance {percent(task['chance'], 1)}"
        lines.append(
            f"Task {task['task']} ({task['key']}): {train['rows']:,} training rows of {train['source']} (SHA-256 "
            f"{train['sha256'][:12]}), {test['rows']:,} scored rows of {test['source']} (SHA-256 "
            f"{test['sha256'][:12]}){chance}."
        )
    lines += data["notes"]
    if data["missing"]:
        rest = f"; and {len(data['missing']) - MOST} more" if len(data["missing"]) > MOST else ""
        lines.append(f"Missing runs ({len(data['missing'])}): {'; '.join(data['missing'][:MOST])}{rest}.")
    return lines


def status(data: dict[str, Any]) -> str:
    """Confirmatory or exploratory, and why."""
    found = data["status"]
    if not found["confirmatory"]:
        return f"Exploratory: {'; '.join(found['reasons'])}."
    return f"Confirmatory: made under the analysis locked before the first run, lock {found['lock'][:12]}."


def _levers(data: dict[str, Any]) -> str:
    levers = data["levers"]
    steps = f"{levers['steps']:,} steps" if levers.get("steps") else f"{levers['epochs']} epoch(s)"
    parts = [
        f"r = {levers['rank']}",
        f"alpha {levers['alpha']:g}",
        f"learning rate {levers['learning_rate']:g} ({levers['schedule']})",
        f"{steps} of {levers['batch']} × {levers['accumulation']} rows",
        f"at most {levers['length']} tokens",
        f"attention {levers['attention']}",
    ]
    parts += ["length-grouped batches"] if levers["group_by_length"] else []
    parts += ["gradient checkpointing"] if levers["checkpointing"] else []
    parts += ["deterministic kernels"] if levers["deterministic"] else []
    if data["factors"]:
        parts.append(f"declared factors: {', '.join(data['factors'])}")
    return ", ".join(parts)
