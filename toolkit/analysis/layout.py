"""The table's rows and headings as text cells, shared by Markdown and LaTeX."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any


@dataclass(frozen=True)
class Grid:
    """One printed table: a caption, a heading, rows of text cells, and the rows before which a line is drawn."""

    caption: str
    heading: list[str]
    rows: list[list[str]]
    breaks: list[int] = field(default_factory=list)

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers, which are set to the right."""
        return all(not row[column] or row[column][0] in "0123456789+−<–" for row in self.rows)


NOTHING = "–"


def grids(data: dict[str, Any]) -> list[Grid]:
    """Every table of a study: for each text the scores and the comparisons, then how alike selections are."""
    found = []
    for text in data["texts"]:
        found.append(_scores(data, text))
        if any(arm["controls"] for arm in data["arms"]):
            found.append(_comparisons(data, text))
    return found + _likeness(data)


def caption(data: dict[str, Any]) -> list[str]:
    """What was run, on which weights and texts: one sentence a line."""
    note = data["reference"]["note"]
    lines = [
        f"Study {data['study']} ({data['form']} form): {data['question']}",
        f"Model: {data['model']} (weights {data['fingerprint'][:12]}).",
        f"Reference weights: {note if note.endswith('.') else note + '.'}",
        f"Quantizer of the layers that are not protected: {data['base']}; of the protected ones: {data['protect']}.",
    ]
    for name, text in data["texts"].items():
        lines.append(
            f"Text {name}: {text['source']}, SHA-256 {text['sha256'][:12]}, {text['windows']} windows of "
            f"{text['window']} tokens, {text['tokens']:,} tokens"
            f"{', each window with a beginning-of-text token' if text['bos'] else ''}."
        )
    lines += data["notes"]
    if data["missing"]:
        lines.append(f"Missing runs ({len(data['missing'])}): {'; '.join(data['missing'])}.")
    return lines


def _scores(data: dict[str, Any], text: str) -> Grid:
    heading = ["budget", "arm", "loss", "perplexity", "KL", "agreement", "gap recovered"]
    heading += ["layers", "parameters", "MiB", "share"]
    paired = any("paired" in arm for arm in data["arms"])
    if paired:
        heading.append("loss − base ± s.e.")
    rows, breaks = [], []
    for run in data["references"]:
        rows.append(["", run["arm"], *_score(run["scores"][text]), *[NOTHING] * (4 + paired)])
    last = None
    for arm in data["arms"]:
        if arm["budget"] != last:
            breaks.append(len(rows))
        rows.append(
            [
                arm["budget"] if arm["budget"] != last else "",
                arm["arm"],
                *_score(arm["scores"][text]),
                f"{arm['layers']:,}",
                f"{arm['parameters']:,}",
                f"{arm['bytes'] / 2**20:,.1f}",
                f"{100 * arm['share']:.2f}%",
            ]
            + ([_difference(arm, text)] if paired else [])
        )
        last = arm["budget"]
    title = (
        f"{text}: loss and KL(16-bit ‖ arm) in nats a token, agreement of the top token with 16 bit, share of the gap "
        "from base to 16 bit recovered; and what each arm protects: layers, parameters, 16-bit bytes, share of the "
        "layers' parameters"
    )
    return Grid(title, heading, rows, breaks)


def _score(score: dict[str, Any]) -> list[str]:
    share = score["recovered"]
    return [
        f"{score['loss']:.4f}",
        f"{score['perplexity']:.3f}",
        f"{score['kl']:.4f}",
        f"{100 * score['agreement']:.2f}%",
        NOTHING if share is None else f"{100 * share:.1f}%".replace("-", "−"),
    ]


def _difference(arm: dict[str, Any], text: str) -> str:
    pair = arm.get("paired", {}).get(text, {}).get("base")
    if pair is None:
        return NOTHING
    error = pair["standard_error"]
    return signed(pair["difference"]) + ("" if error is None else f" ± {error:.4f}")


def _comparisons(data: dict[str, Any], text: str) -> Grid:
    outcome = data["analysis"]["outcome"]
    heading = ["budget", "arm", "control", "draws", f"median {outcome}", "gap", "at least as good", "p"]
    heading += ["smallest p", "mismatch mean", "largest", "feasible subsets", "p is", "law"]
    rows, breaks = [], []
    budget = label = None
    for arm in data["arms"]:
        if arm["budget"] != budget:
            breaks.append(len(rows))
        for control in arm["controls"]:
            item = control["texts"][text]
            rows.append(
                [
                    arm["budget"] if arm["budget"] != budget else "",
                    arm["arm"] if (arm["budget"], arm["arm"]) != (budget, label) else "",
                    control["control"] + ("" if control["matched"] else " (flawed: memory not matched)"),
                    f"{control['draws']:,}",
                    f"{item['median']:.4f}",
                    signed(item["gap"]),
                    f"{item['at_least_as_good']:,}",
                    probability(item["p"]),
                    probability(control["smallest_p"]),
                    percent(control["mismatch"]["mean"]),
                    percent(control["mismatch"]["largest"]),
                    count(control["feasible_subsets"]),
                    ("exact" if control["exact"] else "Monte Carlo")
                    + (", descriptive" if control["descriptive"] else ""),
                    control["law"],
                ]
            )
            budget, label = arm["budget"], arm["arm"]
    title = (
        f"{text}: each arm against its own draws; gap = arm − median draw ({outcome}, nats a token); mismatch = "
        "(draw − arm)/arm of the protected parameters"
    )
    return Grid(title, heading, rows, breaks)


def _likeness(data: dict[str, Any]) -> list[Grid]:
    found = []
    selections = data["likeness"]["selections"]
    if selections:
        names = list(dict.fromkeys(name for item in selections.values() for name in item["arms"]))
        rows, breaks = [], []
        for budget, item in selections.items():
            breaks.append(len(rows))
            for at, (name, values) in enumerate(zip(item["arms"], item["jaccard"], strict=True)):
                cells = dict(zip(item["arms"], values, strict=True))
                rows.append(["" if at else budget, name, *(_likeness_cell(cells.get(n)) for n in names)])
        title = "How alike the selections are: layers that two arms share, over all layers of the two (Jaccard index)"
        found.append(Grid(title, ["budget", "arm", *names], rows, breaks))
    scores = data["likeness"]["scores"]
    names = scores.get("selectors", [])
    if len(names) > 1:
        title = "How alike the rankings are: Spearman's rank correlation of the layers' scores"
        rows = [
            [name, *(_likeness_cell(v) for v in values)] for name, values in zip(names, scores["spearman"], strict=True)
        ]
        found.append(Grid(title, ["selector", *names], rows))
    return found


def _likeness_cell(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}".replace("-", "−")


def signed(value: float) -> str:
    """Four decimals with a sign; a real minus."""
    text = f"{value:+.4f}"
    return ("0.0000" if float(text) == 0 else text).replace("-", "−")


def probability(p: float) -> str:
    """Three decimals, or `<0.001`."""
    return f"{p:.3f}" if p >= 0.0005 else "<0.001"


def percent(fraction: float) -> str:
    """A signed percentage: three decimals below 1%, one above."""
    value = 100 * fraction
    text = f"{value:+.3f}" if abs(value) < 1 else f"{value:+.1f}"
    return ("0" if float(text) == 0 else text).replace("-", "−") + "%"


def count(number: int | None) -> str:
    """An integer of any length: in full below a million, else rounded to two digits and a power of ten."""
    if number is None:
        return NOTHING
    if number < 10**6:
        return f"{number:,}"
    return f"{Decimal(number):.1e}".replace("e+", "e")
