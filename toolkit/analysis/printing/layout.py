"""The table's rows and headings as text cells, shared by Markdown and LaTeX."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing import verdict_grids
from toolkit.analysis.printing.grid import NOTHING, Grid, count, percent, probability, signed
from toolkit.analysis.printing.starts import KIND as STARTED
from toolkit.analysis.printing.starts import grids as started_grids
from toolkit.analysis.printing.starts import layout as started_layout
from toolkit.analysis.printing.trained import KIND
from toolkit.analysis.printing.trained import grids as trained_grids
from toolkit.analysis.printing.trained import layout as trained_layout


def grids(data: dict[str, Any]) -> list[Grid]:
    """Every table: each text's scores and comparisons, the claims and what bears on them, how alike selections are."""
    if data["kind"] == KIND:
        return trained_grids.grids(data)
    if data["kind"] == STARTED:
        return started_grids.grids(data)
    found = []
    for text in data["texts"]:
        if data["kind"] == "table":
            found.append(_scores(data, text))
        if any(arm["controls"] for arm in data["arms"]):
            found.append(_comparisons(data, text))
    found += verdict_grids.grids(data)
    return found + (_likeness(data) if "likeness" in data else [])


def sentences(data: dict[str, Any]) -> list[str]:
    """What was found, one sentence a claim; then one a claim on which the laws differ."""
    if data["kind"] in (KIND, STARTED):
        return list(data["sentences"])
    verdicts = data["verdicts"]
    if verdicts is None:
        return []
    return verdicts["sentences"] + [law["sentence"] for law in verdicts["laws"] if not law["agree"]]


def caption(data: dict[str, Any]) -> list[str]:
    """Whether the results are confirmatory, then what was judged, on which weights and texts: one sentence a line."""
    if data["kind"] == KIND:
        return trained_layout.caption(data)
    if data["kind"] == STARTED:
        return started_layout.caption(data)
    lines = [status(data), *(_of_study(data) if data["kind"] == "table" else _of_scores(data))]
    lines += data["notes"]
    if data.get("missing"):
        lines.append(f"Missing runs ({len(data['missing'])}): {_some(data['missing'])}.")
    return lines


MOST = 40
"""Missing runs that a caption names; the plain data name them all."""


def _some(items: list[str]) -> str:
    return "; ".join(items[:MOST]) + (f"; and {len(items) - MOST} more" if len(items) > MOST else "")


def status(data: dict[str, Any]) -> str:
    """Confirmatory, descriptive or exploratory, and why."""
    found = data["status"]
    if not found["confirmatory"]:
        return f"Exploratory: {'; '.join(found['reasons'])}."
    locked = f"made under the analysis locked before the first run, lock {found['lock'][:12]}"
    if data["verdicts"] is None or data["verdicts"]["family"]["descriptive"]:
        return f"Descriptive: {locked}, with draws that cannot reach its level."
    return f"Confirmatory: {locked}."


def _of_scores(data: dict[str, Any]) -> list[str]:
    scores = data["scores"]
    seeds = ", ".join(map(str, scores["seeds"]))
    rows = f", over {scores['rows']:,} {scores['part']}s" if scores["part"] else ""
    return [
        f"Model: {data['model']} (weights {data['fingerprint'][:12]}).",
        f"Scores: {scores['file']}, SHA-256 {scores['sha256'][:12]}, {scores['lines']:,} lines; each value is the mean "
        f"over {'seed' if len(scores['seeds']) == 1 else 'seeds'} {seeds}{rows}.",
        f"Selections: {data['selections']:,} files, of which {len(data['arms']):,} "
        f"{'is' if len(data['arms']) == 1 else 'are'} judged.",
    ]


def _of_study(data: dict[str, Any]) -> list[str]:
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
                (arm["budget"] or "") if arm["budget"] != last else "",
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
    outcome, floor = data["analysis"]["outcome"], data.get("floor")
    heading = ["budget", "arm", "control", "draws", f"median {outcome}", "sd", "gap", "at least as good", "p"]
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
                    (arm["budget"] or "") if arm["budget"] != budget else "",
                    arm["arm"] if (arm["budget"], arm["arm"]) != (budget, label) else "",
                    control["control"] + ("" if control["matched"] else " (flawed: memory not matched)"),
                    f"{control['draws']:,}",
                    f"{item['median']:.4f}",
                    NOTHING if item["sd"] is None else f"{item['sd']:.4f}",
                    signed(item["gap"]) + (" (≤ floor)" if item["below_floor"] else ""),
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
        f"{text}: each arm against its own draws under each law; gap = arm − median draw ({outcome}, {data['unit']}); "
        "sd: of the draws; mismatch = (draw − arm)/arm of the protected parameters"
    )
    if floor is not None:
        title += f"; gaps of at most {floor['difference'][text]:.1e} lie within the numerical floor"
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
